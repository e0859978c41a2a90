"""Helper processes: tenants use them in turns, and a killed one, or a killed server, leaves no files behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ctxwin.errors import BadMedia, EngineFailed
from ctxwin_server.sandbox import helper
from ctxwin_server.sandbox.decode_pool import ProcessPool

PROGRAM = """
import json, os, struct, sys, tempfile, time
while head := sys.stdin.buffer.read(8):
    raw = sys.stdin.buffer.read(struct.unpack("<Q", head)[0])
    name = json.loads(raw)[0] if raw else ""
    if not name:  # answered once it has started
        sys.stdout.buffer.write(struct.pack("<BQ", 0, 0)), sys.stdout.buffer.flush()
        continue
    file = tempfile.NamedTemporaryFile(delete=False)
    os.makedirs(os.path.join(tempfile.gettempdir(), "a", "b"), exist_ok=True)
    file.write(b"an upload"), file.flush()
    print(name, file=open(sys.argv[1], "a"), flush=True)
    while name.startswith("/") and not os.path.exists(name):
        time.sleep(0.01)
    sys.stdout.buffer.write(struct.pack("<BQ", 0, len(raw)) + raw)
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    (tmp_path / "helper_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def processes(folder: Path, count: int, seconds: float = 60.0) -> ProcessPool:
    class Programs(ProcessPool):
        module, program = "helper_program", str(folder.parent / "log")

    return Programs(seconds, 1 << 30, count, shared=True)


def ask(of: ProcessPool, tenant: str, name: str) -> str:
    head, _ = of.ask(name, b"", tenant)
    return str(head)


@pytest.mark.parametrize("count", [2, 3])
def test_a_short_file_does_not_wait_for_another_tenants_long_ones(folder: Path, count: int) -> None:
    """Four videos of one tenant had the only process, then the next: a text took 26 seconds."""
    helpers, gate = processes(folder, count), folder.parent / "gate"
    with ThreadPoolExecutor(8) as pool:
        try:
            long = [pool.submit(ask, helpers, "porch", str(gate)) for _ in range(4)]
            assert [pool.submit(ask, helpers, "yard", f"text {i}").result(60) for i in range(3)] == [
                "text 0", "text 1", "text 2",
            ]  # fmt: skip
            assert not any(future.done() for future in long)
            gate.touch()
            assert [future.result(60) for future in long] == [str(gate)] * 4
        finally:
            gate.touch()
            helpers.close()
    with pytest.raises(EngineFailed, match="shutting down"):
        ask(helpers, "yard", "late")


def test_tenants_that_wait_are_served_in_turns(folder: Path) -> None:
    helpers, gates = processes(folder, 1), [folder.parent / f"gate {i}" for i in range(2)]
    with ThreadPoolExecutor(12) as pool:
        try:
            running = pool.submit(ask, helpers, "porch", str(gates[0]))
            log = folder.parent / "log"
            while not log.exists():
                assert not running.done()
            waiting = []
            for tenant in ("porch", "porch", "porch", "yard", "shed"):
                waiting.append(pool.submit(ask, helpers, tenant, f"{tenant} {len(waiting)}"))
                while sum(map(helpers._turns.waiting, ("porch", "yard", "shed"))) < len(waiting):
                    pass
            gates[0].touch()
            for future in waiting:
                future.result(60)
        finally:
            gates[0].touch()
            helpers.close()
    assert log.read_text().splitlines()[1:] == ["yard 3", "shed 4", "porch 0", "porch 1", "porch 2"]


def test_files_of_a_job_go_with_it_and_a_killed_process_leaves_none(folder: Path) -> None:
    helpers = processes(folder, 1)
    try:
        assert ask(helpers, "", "text") == "text"
        (process,) = helpers._idle.queue
        assert process._scratch is not None and not list(process._scratch.path.iterdir())
        process._seconds = 1.0
        with pytest.raises(BadMedia, match="took more than"):
            ask(helpers, "", "/nowhere")
        assert list(folder.iterdir()) == []
        process._seconds = 60.0
        assert ask(helpers, "", "text") == "text"
    finally:
        helpers.close()
    assert list(folder.iterdir()) == []


def test_what_a_killed_server_left_goes_when_the_next_one_starts(folder: Path) -> None:
    program = (
        "import os, signal, sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from ctxwin_server.sandbox.helper import Scratch\n"
        "made = Scratch(); (made.path / 'upload').write_bytes(b'x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL and list(folder.glob("*/files/upload"))
    ours = helper.Scratch()
    other = folder.parent / "other"
    (other / "files").mkdir(parents=True)
    (folder / "ctxwin-scratch-link").symlink_to(other)
    (folder / "ctxwin-scratch-young").mkdir()  # its owner is about to lock it
    assert helper.sweep() == 1
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [ours._folder.name, "ctxwin-scratch-link", "ctxwin-scratch-young"]
    )
    assert (other / "files").is_dir()
    ours.remove()
    ours.remove()
