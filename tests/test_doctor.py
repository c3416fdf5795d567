"""Contract of ``python -m pacache_torch doctor``.

It tells what is installed, loaded and working, as text and as JSON, exits with 0 exactly when the
CPU operators work, and still tells when the extension does not load, when torch_npu is there
without CANN, or when an operator gives wrong numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import pacache_torch
import pacache_torch.ops as ops
from pacache_torch import __main__ as command_line
from pacache_torch import _library, doctor

SECTIONS = {
    "ok", "versions", "built_with", "platform", "cpu", "extensions", "kernels", "torch_npu",
    "environment", "self_checks", "cpu_operators_run_by",
}  # fmt: skip


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = command_line.main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_has_every_section_and_true_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = examine(capsys)
    assert code == 0 and facts["ok"] is True
    assert set(facts) == SECTIONS
    assert facts["versions"]["pacache_torch"] == pacache_torch.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert facts["built_with"] == _library.build_info()
    assert [status["name"] for status in facts["extensions"]] == [status.name for status in _library.status()]
    assert {(c["device"], c["cache_mode"], c["ok"]) for c in facts["self_checks"]} >= {
        ("cpu", "Norm", True),
        ("cpu", "PA_NZ", True),
    }


def test_text_names_every_section_and_ends_with_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for heading in ("versions", "cpu", "kernels", "torch_npu", "environment", "extensions"):
        assert heading in lines
    assert f"  torch: {torch.__version__}" in lines
    assert "  cpu PA_NZ: ok, as expected" in lines
    assert lines[-1] == "The CPU operators work; run by the kernels of _C."


# What is wrong is said, and the exit code says so too


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("scatter_pa_kv_cache", "scatter_pa_kv_cache wrote a wrong key_cache"),
        ("paged_cache_load", "paged_cache_load returned a wrong key"),
    ],
)
def test_an_operator_that_does_nothing_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], op: str, problem: str
) -> None:
    monkeypatch.setattr(ops, op, lambda *args, **kwargs: None)
    code, facts = examine(capsys)
    assert code == 1 and facts["ok"] is False
    assert [check["detail"] for check in facts["self_checks"]] == [problem, problem]
    assert command_line.main(["doctor"]) == 1
    assert "The CPU operators do NOT work" in capsys.readouterr().out


def test_a_negative_slot_that_is_written_fails_the_self_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = ops.scatter_pa_kv_cache

    def writes_padding(key: Any, value: Any, kc: Any, vc: Any, slots: Any, **kwargs: Any) -> None:
        real(key, value, kc, vc, slots.clamp(min=0), **kwargs)

    monkeypatch.setattr(ops, "scatter_pa_kv_cache", writes_padding)
    code, facts = examine(capsys)
    assert code == 1 and not any(check["ok"] for check in facts["self_checks"])


def test_only_one_layout_broken_is_enough_to_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = ops.paged_cache_load

    def swaps_in_nz(kc: Any, vc: Any, *args: Any, cache_mode: str) -> Any:
        pair = (vc, kc) if cache_mode == "PA_NZ" else (kc, vc)
        return real(*pair, *args, cache_mode=cache_mode)

    monkeypatch.setattr(ops, "paged_cache_load", swaps_in_nz)
    code, facts = examine(capsys)
    assert code == 1
    assert [check["ok"] for check in facts["self_checks"]] == [True, False]


def test_an_extension_that_did_not_load_is_named_with_its_whole_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = "_C was built against torch 2.10.0\nundefined symbol: _ZN2at4_ops"
    broken = _library.ExtensionStatus(name="_C", path=None, loaded=False, cause=cause)
    monkeypatch.setattr(_library, "status", lambda: [broken])
    monkeypatch.setattr(_library, "build_info", lambda: None)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ImportError(cause)

    monkeypatch.setattr(ops, "scatter_pa_kv_cache", fails)
    code, facts = examine(capsys)
    assert code == 1
    assert facts["extensions"][0]["cause"] == cause
    assert facts["self_checks"][0]["detail"] == f"ImportError: {cause}"
    command_line.main(["doctor"])
    text = capsys.readouterr().out
    assert "_C: not loaded" in text and "undefined symbol: _ZN2at4_ops" in text


def test_a_fact_that_cannot_be_had_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> dict[str, Any]:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_cpu", broken)
    code, facts = examine(capsys)
    assert code == 0
    assert facts["cpu"] == {"error": "OSError: no such thing"}
    assert "torch" in facts["versions"]


# The same in a process of its own, on a copy of the package whose library is really broken


def copy_package(folder: Path) -> Path:
    """Copy the Python half of the package into ``folder``."""
    copy = folder / "pacache_torch"
    source = Path(pacache_torch.__file__).parent
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so", "*.json", "__pycache__"))
    return copy


def run_in(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the copy in ``folder``, out of reach of the package under test."""
    # -S, because the import hook of an editable install would find its own library for the copy.
    others = [path for path in sys.path if path]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACACHE_")}
    return subprocess.run(
        [sys.executable, "-S", "-m", "pacache_torch", *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": os.pathsep.join([str(folder), *others]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_library_that_is_missing(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    ran = run_in(tmp_path, "doctor", "--json")
    assert ran.returncode == 1, ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["platform"]["package"] == str(package)
    extension = facts["extensions"][0]
    assert extension["name"] == "_C" and not extension["loaded"]
    assert "was not built" in extension["cause"]
    assert facts["cpu_operators_run_by"].startswith("nothing")
    assert facts["kernels"]["scatter_pa_kv_cache"] == []
    assert "was not built" in facts["self_checks"][0]["detail"]
    assert facts["versions"]["torch"] == torch.__version__


def test_a_library_that_is_not_one(tmp_path: Path) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (copy_package(tmp_path) / f"_C{suffix}").write_bytes(b"not a library")
    ran = run_in(tmp_path, "doctor")
    assert ran.returncode == 1, ran.stderr
    assert "_C: not loaded" in ran.stdout and "ImportError" in ran.stdout
    assert "The CPU operators do NOT work" in ran.stdout


def test_a_library_for_another_torch(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    (package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"never opened")
    (package / "_built_with.json").write_text('{"torch": "1.2.3"}')
    ran = run_in(tmp_path, "doctor")
    assert ran.returncode == 1, ran.stderr
    assert "built against torch 1.2.3" in ran.stdout
    assert f"running with torch {torch.__version__}" in ran.stdout


def test_the_reference_in_place_of_a_missing_library(tmp_path: Path) -> None:
    copy_package(tmp_path)
    ran = run_in(tmp_path, "doctor", PACACHE_FORCE_REFERENCE="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "_C: not loaded" in ran.stdout
    assert "The CPU operators work; run by the Python reference" in ran.stdout


def test_the_demo_says_why_and_names_the_doctor(tmp_path: Path) -> None:
    copy_package(tmp_path)
    ran = run_in(tmp_path, "demo", "--quick", "--device", "cpu")
    assert ran.returncode == 1
    assert "_C is not loaded" in ran.stderr and "Traceback" not in ran.stderr
    assert "python -m pacache_torch doctor" in ran.stderr


# Environment


def test_environment_lists_what_matters_and_nothing_else() -> None:
    found = doctor.environment(
        {
            "PACACHE_CHECK": "1",
            "ASCEND_HOME_PATH": "/opt/ascend",
            "ATB_HOME_PATH": "/opt/atb",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "LD_LIBRARY_PATH": "/a:/b:",
            "HOME": "/home/someone",
            "MY_PASSWORD": "hunter2",
        }
    )
    assert found["PACACHE_CHECK"] == "1"
    assert found["ASCEND_HOME_PATH"] == "/opt/ascend"
    assert found["ATB_HOME_PATH"] == "/opt/atb"
    assert found["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert found["LD_LIBRARY_PATH"] == "set, 2 entries"
    assert "HOME" not in found and "MY_PASSWORD" not in found


def test_environment_says_what_is_not_set_and_keeps_secrets() -> None:
    found = doctor.environment({"ASCEND_ACCESS_TOKEN": "hunter2"})
    assert found["ASCEND_ACCESS_TOKEN"] == "set"
    assert found["LD_LIBRARY_PATH"] == found["ATB_HOME_PATH"] == "not set"


# torch_npu is looked for, never imported


def test_torch_npu_without_cann_is_reported_and_not_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    metadata = tmp_path / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    code, facts = examine(capsys)
    assert code == 0
    npu = facts["torch_npu"]
    assert npu["installed"] == "2.13.0" and npu["devices"] == 0
    assert npu["imported"].startswith("no")
    assert npu["cann"].startswith("libascendcl.so not found")


def test_cann_is_found_through_its_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "lib64").mkdir()
    library = tmp_path / "lib64" / "libascendcl.so"
    library.touch()
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    _, facts = examine(capsys)
    assert facts["torch_npu"]["cann"] == str(library)
