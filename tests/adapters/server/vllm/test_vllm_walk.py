"""The walk of a plain chat with a window is short: what is added to it is seen, and has to be worth it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from twins import guard

MOST_STAYS, MOST_WITH_OTHERS = 12, 34
"""Stays in rooms of the server, and with those in other distributions."""
MOST_CALLS = {5: 2400, 13: 3600}
"""Calls of functions of ours by turn of a chat with pictures; runs differ by up to 500."""


@guard
def test_a_plain_chat_takes_few_steps_to_the_engine() -> None:
    program = Path(__file__).with_name("walk.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rooms = [line.split()[0] for line in done.stdout.splitlines() if " ctxwin_" in line]
    own = [room for room, _ in itertools.groupby(room for room in rooms if not room.startswith("ctxwin_"))]
    assert {"app", "process", "vllm", "chat"} <= set(own), done.stdout
    assert len(own) <= MOST_STAYS, done.stdout
    assert len(rooms) <= MOST_WITH_OTHERS, done.stdout
    *counts, decoded = map(str.split, done.stdout.splitlines()[-3:])
    assert decoded == ["decoded", str(max(MOST_CALLS))], (
        done.stdout
    )  # each turn its own picture, not its whole history's
    calls = {int(turn): int(count) for word, turn, count in counts if word == "calls"}
    assert calls.keys() == MOST_CALLS.keys()
    assert all(count <= MOST_CALLS[turn] for turn, count in calls.items()), done.stdout
