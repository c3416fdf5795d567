"""A model directory that vLLM loads: a small Llama with random weights, large enough for greedy tokens to differ.

With weights as small as an initialiser makes them all logits are nearly equal, and two correct engines may choose
different tokens. With these the best token leads by far more than float32 rounds (the tests look at the lead).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_SIZE = 64
HIDDEN = NUM_HEADS * HEAD_SIZE
INTERMEDIATE = 384
VOCABULARY = 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_SIZE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def make(folder: Path) -> Path:
    """Write config.json and model.safetensors (5 MB), always the same."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)

    def normal(std: float, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    weights = {
        "model.embed_tokens.weight": normal(1.0, VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(0.3, VOCABULARY, HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}.self_attn.q_proj.weight": normal(0.12, HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": normal(0.12, NUM_KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{at}.self_attn.v_proj.weight": normal(0.12, NUM_KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{at}.self_attn.o_proj.weight": normal(0.12, HIDDEN, HIDDEN),
            f"{at}.mlp.gate_proj.weight": normal(0.06, INTERMEDIATE, HIDDEN),
            f"{at}.mlp.up_proj.weight": normal(0.06, INTERMEDIATE, HIDDEN),
            f"{at}.mlp.down_proj.weight": normal(0.06, HIDDEN, INTERMEDIATE),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
