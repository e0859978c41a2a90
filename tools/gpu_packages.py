"""Collect what a GPU machine without a network needs to run ``make gpu-check``: packages for its Python, and vLLM if wanted.

Usage: python tools/gpu_packages.py FOLDER [--python 3.12] [--vllm 0.32.0] [--capability 90] [pip arguments ...]

Without ``--vllm`` FOLDER is for ``PYTHONPATH`` (5 MB). With it FOLDER holds ``packages.tar.xz`` (some 40 MB instead of 700),
which `make gpu-check` unpacks there: vLLM's GPU build with the machine code of one compute capability only, and the packages
that it imports but images with torch and transformers usually lack. Kernels that small checks do not run are left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "diskcache")
NEEDED_BY_VLLM = (ROOT / "tools" / "gpu_packages.txt").read_text().split()
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_vllm_fa3_C", "cumem_allocator", "spinloop")
"""Of vLLM's compiled libraries, those that travel."""
_ATTENTION = re.compile(rb"flash_fwd_hdim[0-9_a-z]+_sm90")
_ATTENTION_SERVED = re.compile(rb"flash_fwd_hdim(128|64)_bf16(_paged|_split|_paged_split|_packgqa|)_sm90")
_BULK = (
    "vllm/model_executor/layers/fused_moe/configs/*.json",
    "vllm/model_executor/layers/quantization/utils/configs",
    "vllm/kernels/helion/configs",
    "vllm/entrypoints/serve/instrumentator/static",
    "vllm/third_party/tml_fa4",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/deep_gemm",
    "vllm/vllm_flash_attn/cute",
    "vllm/vllm-rs",
    "vllm-*.dist-info/RECORD",
    "mistral_common/data/*",
    "pycountry/locales",
    "tvm_ffi/include",
    "tvm_ffi/share",
    "xgrammar/include",
)
_LEFT_OUT = re.compile(r"/__pycache__$|\.pyi$|^\./bin$|^\./(dill|jsonschema)/tests$")
_FATBIN, _PTX, _ELF = b"\x50\xed\x55\xba", 1, 2
_SMALL = 20_000
"""Bytes of the largest intermediate code that is kept where a library has no machine code for the capability."""


def main() -> None:
    """Collect the packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine (default 3.12)")
    parser.add_argument("--vllm", help="version of vLLM's GPU build to take along")
    parser.add_argument("--capability", type=int, default=90, help="compute capability (default 90, Hopper)")
    options, pip_arguments = parser.parse_known_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip"]
    platforms = [
        f"--platform=manylinux{name}_x86_64" for name in ("2014", "_2_17", "_2_24", "_2_27", "_2_28", "_2_31", "_2_34")
    ]
    where = ["--no-deps", "--only-binary=:all:", f"--python-version={options.python}", *platforms, *pip_arguments]
    where += ["-c", str(ROOT / "constraints.txt")]
    if options.vllm is None:
        subprocess.run([*pip, "install", "-q", "--target", str(options.folder), *where, *NEEDED], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        site, wheels = Path(folder, "site"), Path(folder, "wheels")
        subprocess.run([*pip, "install", "-q", "--target", str(site), *where, *NEEDED, *NEEDED_BY_VLLM], check=True)
        without_pins = where[: where.index("-c")]
        subprocess.run([*pip, "download", "-q", "-d", str(wheels), *without_pins, f"vllm=={options.vllm}"], check=True)
        with zipfile.ZipFile(next(wheels.glob("vllm-*.whl"))) as wheel:
            names = [n for n in wheel.namelist() if not n.endswith(".so") or Path(n).name.split(".")[0] in LIBRARIES]
            wheel.extractall(site, names)
        for pattern in _BULK:
            for path in site.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for library in site.glob("vllm/**/*.so"):
            cut(library, options.capability)
        with tarfile.open(options.folder / "packages.tar.xz", "w:xz", preset=3) as archive:
            archive.add(site, ".", filter=lambda info: None if _LEFT_OUT.search(info.name) else info)
    size = (options.folder / "packages.tar.xz").stat().st_size
    sys.stdout.write(f"{options.folder / 'packages.tar.xz'}: {size / 1e6:.0f} MB\n")


def cut(library: Path, capability: int) -> None:
    """Zero the GPU code of other capabilities in a library. Headers stay, so the driver picks what is left; zeros pack well."""
    data = bytearray(library.read_bytes())
    containers: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for container, entry in _entries(data):
        containers[container].append(entry)
    for entries in containers.values():
        kept = [entry for entry in entries if entry[0] == _ELF and entry[1] == capability]
        if not kept:  # what the driver may compile
            kept = sorted(
                (e for e in entries if e[0] == _PTX and e[1] <= capability and e[3] <= _SMALL), key=lambda e: e[1]
            )[-1:]
        for entry in entries:
            _, _, start, size = entry
            attention = _ATTENTION.search(data, start, start + size)
            if entry not in kept or (attention and not _ATTENTION_SERVED.fullmatch(attention.group())):
                data[start : start + size] = bytes(size)
    library.write_bytes(data)


def _entries(data: bytearray) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Yield each piece of GPU code in a library: where its container begins, then its kind, capability, start and size."""
    position = data.find(_FATBIN)
    while position >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, position)
        if (version, header) != (1, 16):
            position = data.find(_FATBIN, position + 4)
            continue
        at, end = position + header, position + header + size
        while at < end:
            kind, _, length, payload = struct.unpack_from("<HHIQ", data, at)
            (capability,) = struct.unpack_from("<I", data, at + 28)
            yield position, (kind, capability, at + length, payload)
            at += length + payload
        position = data.find(_FATBIN, end)


if __name__ == "__main__":
    main()
