"""The Python example of docs/vllm.md that needs vLLM runs as it stands, but for the model's path."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import model_directory
from clean_environment import clean_environment
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "vllm.md"

# What a reader would do next, and what the page tells to look at.
NEXT = """
from attending import implementation
from vllm import SamplingParams

layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
print({implementation(layer) for layer in layers.values()})
print(len(llm.generate("t3 t5 t8", SamplingParams(max_tokens=7, ignore_eos=True))[0].outputs[0].token_ids))
"""


def model_with_tokenizer(folder: Path) -> Path:
    """The small model, and words for its tokens."""
    model_directory.make(folder)
    words = {f"t{token}": token for token in range(model_directory.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    names = {"bos_token": "t0", "eos_token": "t1", "unk_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder


def test_the_example_of_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (example,) = [block for block in blocks if "from vllm import LLM" in block]
    assert example.count("path/to/model") == 1
    script = tmp_path / "example.py"
    script.write_text(example.replace("path/to/model", str(model_with_tokenizer(tmp_path / "model"))) + NEXT)
    environment = clean_environment(tmp_path) | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(
        [sys.executable, script],
        cwd=HERE,
        env=environment | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    assert ran.stdout.splitlines()[-2:] == ["{'pacache_torch.integrations.vllm_backend.PackedImpl'}", "7"]
