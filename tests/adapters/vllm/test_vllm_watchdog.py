"""A process that opened an engine is killed: all of vLLM's processes end, whatever they were doing, and nobody else's."""

from __future__ import annotations

import copy
import fcntl
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ctxwin_vllm.lifecycle import watchdog
from ctxwin_vllm.lifecycle.folders import runs
from ctxwin_vllm.lifecycle.watchdog import Lifeline
from engines import models
from waiting import wait_until

STARTS = """
import multiprocessing, os, sys, time
from pathlib import Path
from ctxwin_vllm.lifecycle.watchdog import Lifeline, starting


def sleep(line):
    time.sleep(120)


def fork(line, whose):
    child = multiprocessing.get_context("fork").Process(target=sleep, args=(None,))
    child.start()
    Path(line, f"{whose} {child.pid}").touch()
    sleep(line)


if __name__ == "__main__":
    folder = Path(sys.argv[1], f"ctxwin-{os.getpid()}-x")
    folder.mkdir()
    line = Lifeline(str(folder))
    spawn, forked = multiprocessing.get_context("spawn").Process, multiprocessing.get_context("fork").Process
    theirs = [forked(target=fork, args=(line, "theirs")), spawn(target=sleep, args=(str(line),))]
    for child in theirs:
        child.start()
    with starting():
        ours = [forked(target=sleep, args=(line,)), spawn(target=fork, args=(line, "ours"))]
        for child in ours:
            child.start()
    while len(below := list(folder.iterdir())) < 2:
        time.sleep(0.01)
    for whose, children in (("theirs", theirs), ("ours", ours)):
        pids = [path.name.split()[1] for path in below if path.name.startswith(whose)]
        print(*pids, *[child.pid for child in children], flush=True)
    time.sleep(120)
"""


def test_only_processes_that_were_given_the_name(tmp_path: Path) -> None:
    """Spawned with it, forked while vLLM starts, or forked by one of those; a host program's own children are its own."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    owner = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    theirs, ours = ([int(pid) for pid in owner.stdout.readline().split()] for _ in range(2))
    owner.stdout.close()
    assert len(theirs) == len(ours) == 3 and all(map(runs, theirs + ours))
    assert len(list(tmp_path.glob("ctxwin-*"))) == 1
    try:
        owner.kill()  # nobody has asked for its end yet
        until = time.monotonic() + 20
        while any(map(runs, ours)):
            assert time.monotonic() < until, [pid for pid in ours if runs(pid)]
            time.sleep(0.02)
        assert list(tmp_path.glob("ctxwin-*")) == [] and all(map(runs, theirs))
    finally:
        owner.wait(timeout=10)
        for pid in filter(runs, theirs + ours):
            os.kill(pid, signal.SIGKILL)


def test_copies_of_a_configuration_start_nothing_in_the_owner(tmp_path: Path) -> None:
    """vLLM copies what it was given."""
    before = threading.active_count()
    line = Lifeline(str(tmp_path / f"ctxwin-{os.getpid()}-x"))
    copied = copy.deepcopy({"folder": line})["folder"]
    assert copied == line and type(copied) is Lifeline and threading.active_count() == before


def test_in_a_process_with_many_files_open(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= 1100:
        pytest.skip("this machine allows no file numbers above 1023")
    opened, high = os.pidfd_open, []

    def open_high(pid: int) -> int:
        low = opened(pid)
        high.append(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1050))
        os.close(low)
        return high[-1]

    monkeypatch.setattr(os, "pidfd_open", open_high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    child = subprocess.Popen(["sleep", "60"])
    try:
        threading.Timer(0.1, child.kill).start()
        assert watchdog._wait(child.pid, os.getppid()) and high[0] >= 1050
    finally:
        child.kill()
        child.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("started", [1, 2])
@pytest.mark.parametrize("processes", ["multi", "async"])
def test_killed_while_vllm_starts(tmp_path: Path, processes: str, started: int) -> None:
    """When vLLM's engine process has just begun, and when its worker has."""
    from adapters.vllm import faults  # it needs vLLM

    model = models.write_vision_model(tmp_path / "model")
    script = f"""
        from pathlib import Path
        from ctxwin.engines.torchvision_repair import repair
        repair()
        from ctxwin_vllm.engine import VLLMEngine
        if __name__ == "__main__":
            VLLMEngine(Path({str(model)!r}), dtype="float32", processes={processes!r})
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    assert wait_until(lambda: len(faults.descendants(child.pid)) >= started, 300)
    below = faults.descendants(child.pid)
    assert len(faults.folders(child.pid)) == 1
    files = faults.mapped([child.pid, *below])
    assert child.poll() is None
    child.kill()
    assert wait_until(lambda: not faults.running(below), 120), faults.running(below)
    child.wait(timeout=10)
    assert wait_until(lambda: not faults.folders(child.pid), 10), faults.folders(child.pid)
    assert wait_until(lambda: not faults.left(files), 10), faults.left(files)
