"""A process that is abandoned while it opens takes those below it along before they can say anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil")

ABANDONED = """
import subprocess, sys, time
import psutil
import ctxwin_vllm.lifecycle.descendants
from ctxwin.process_exit import abandon

kill = psutil.Process.kill
psutil.Process.kill = lambda process: (kill(process), time.sleep(0.5))  # as slow as a busy machine makes it
middle = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdout=subprocess.PIPE)
middle.stdout.readline()
abandon(7)
"""
MIDDLE = """
import subprocess, sys, time

below = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(below.stdout.readline().decode(), flush=True)
time.sleep(600)
"""
BELOW = """
import sys
from pathlib import Path

print("reading", flush=True)
sys.stdin.read()
Path(sys.argv[1]).write_text("its parent has ended")
"""


def test_nobody_below_an_abandoned_process_sees_another_end(tmp_path: Path) -> None:
    """As a worker does that reads what vLLM's engine hands over at its start."""
    seen = tmp_path / "seen"
    ended = subprocess.run([sys.executable, "-c", ABANDONED, MIDDLE, BELOW, str(seen)], timeout=120)
    assert ended.returncode == 7
    assert not seen.exists()
