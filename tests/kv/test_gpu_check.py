"""The check for GPU machines, in its reduced form on the processor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREE = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(out: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words, "--device", "cpu", "--quick", "--out", str(out)]
    # One thread: a second one of such small products mostly waits for the first, and on a busy machine for its turn.
    everything = {**os.environ, "PYTHONPATH": TREE, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=everything, check=False)


def test_bytes_and_launches_of_edits_are_the_models(tmp_path: Path) -> None:
    """A slide takes one launch for all layers, and no KV crosses from the host; a recall brings its chunk's alone."""
    pytest.importorskip("triton")
    done = run(tmp_path, "tools/gpu_check", "--only", "traffic")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())["traffic"]
    rows = {row["edit"]: row["seen"] for row in found}
    of_vllm = 3 * bool(find_spec("vllm"))
    assert len(rows) == len(found) == 20 + of_vllm and all(row["seen"] == row["expected"] for row in found)
    slide, patched, recall = (rows[name] for name in ("slide, rank 0", "slide, rank 32", "recall, rank 0"))
    assert slide["kv"] == patched["kv"] == 0 < slide["written"] == patched["written"]
    reorder, fork = rows["reorder, rank 0"], rows["fork and append, blocks gone, rank 0"]
    assert reorder["kv"] == 0 < reorder["written"] and fork["kv"] == fork["written"] // 5
    assert recall["kv"] == recall["written"] // 4 and slide["factors"] == 0 < patched["factors"]
    assert {row["launches"] for row in rows.values() if "launches" in row} == {1}
    assert rows["forwards"] == {"awaited": 2, "others": 0} and not any(row.get("stalls") for row in rows.values())
    for row in (rows["read back"], rows["read back, to the engine's process"]):
        assert row["back"] == row["written"] == recall["kv"] and row["copies"] == 1
    if of_vllm:
        assert rows["processes='single'"] == rows["processes='multi'"] == {"ahead": 1}
        assert rows["Gemma 3 (4B)"]["full"] > 4 * rows["Gemma 3 (4B)"]["sliding"]
    assert "slide, rank 0: bytes of KV through the host 0, waits of vLLM's thread 0, launches of the k" in done.stderr


@pytest.mark.slow
def test_kv_that_crosses_again_and_what_waits_is_found() -> None:
    pytest.importorskip("triton")
    script = """if True:
        import runpy, sys
        from ctxwin.kv.kernels import staging
        staging.to_device = lambda tensor, device: tensor.to(device)
        sys.path.insert(0, "tools/gpu_check")
        sys.argv[1:] = ["cpu"]
        runpy.run_path("tools/gpu_check/traffic.py", run_name="__main__")
    """
    everything = {**os.environ, "PYTHONPATH": TREE, "TRITON_INTERPRET": "1", "CTXWIN_RESIDENT_BYTES": "0"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=everything, check=True)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("row ")]
    faults = {row["edit"]: row["fault"] for row in rows}
    assert faults["slide, rank 0"].startswith("bytes of KV through the host 36864,")
    assert "waits of vLLM's thread 4, expected 0" in faults["slide, rank 0"]
    assert faults["read back"] == "waits of vLLM's thread 1, expected 0"


@pytest.mark.slow
def test_everything_is_compared_and_measured(tmp_path: Path) -> None:
    done = run(tmp_path, "tools/gpu_check")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["complete"] == {"correct": True, "traffic": True, "bandwidth": True, "break_even": True, "scans": True}
    assert len(found["correct"]) == 27 and not any(row["fault"] for row in found["correct"])
    assert {row["rank"] for row in found["bandwidth"]} == {0, 16, 32, 64}
    assert all(row["load_ms"] > 0 and row["copy_ms"] > 0 for row in found["bandwidth"])
    assert all(row["computed_ms"] > 0 and row["loaded_ms"] > 0 for row in found["break_even"])
    assert len({row["decoder"] for row in found["break_even"]}) == 3
    assert all(row["away"] < 1e-4 < row["without"] and row["composed_ms"] > 0 for row in found["scans"])
    assert (tmp_path / "gpu-check.png").read_bytes().startswith(b"\x89PNG")
    assert "8B (Llama 3), 256 tokens" in done.stderr


@pytest.mark.slow
def test_a_wrong_kernel_is_found(tmp_path: Path) -> None:
    script = """if True:
        import runpy, sys
        from ctxwin.kv.kernels.cpu import CpuKernel
        right = CpuKernel.layer
        CpuKernel.layer = lambda self, i: tuple(x * 1.01 for x in right(self, i))
        from ctxwin.engines.hf import decoder
        compose = decoder.compose_states
        decoder.compose_states = lambda front, chunk: compose({name: 0 * state for name, state in front.items()}, chunk)
        from time import monotonic
        import time
        time.monotonic = lambda: 600 * monotonic()  # as on a machine that gives this process a second of ten minutes
        sys.path.insert(0, "tools/gpu_check")
        runpy.run_path("tools/gpu_check/__main__.py", run_name="__main__")
    """
    done = run(tmp_path, "-c", script, "--compare")
    assert done.returncode == 1, done.stderr
    found = re.search(r"\d+ comparisons, (\d+) wrong", done.stdout)
    assert found is not None, done.stderr
    assert int(found[1]) >= 27 and "keys of layer 0 are" in done.stderr
    assert done.stderr.count("wrong: {'decoder': '9B (Qwen3.5)'") == 3


@pytest.mark.slow
@pytest.mark.vllm
def test_the_engine_answers_right_and_is_timed(tmp_path: Path) -> None:
    done = run(tmp_path, "tools/gpu_check", "--only", "engines")
    assert done.returncode == 0, done.stderr
    *programs, times = json.loads((tmp_path / "gpu-check.json").read_text())["engines"]
    assert len(programs) == 9 and {row["fault"] for row in programs} == {None}
    assert all(row["equal"] == row["compared"] > 2 for row in programs)
    assert all(row["away"] < 1e-4 and row["compared"] == 12 for row in programs if "exact" in row["program"])
    assert programs[-1]["steps_together"] < programs[-1]["steps_alone"]  # they shared steps
    assert times["slide_ms"] > 0 and times["computed_ms"] > 0
