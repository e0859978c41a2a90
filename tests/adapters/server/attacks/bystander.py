"""A bystander who asks while a server is attacked, and what it sees."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from adapters.server.attacks.content import MARKS, picture, text
from adapters.server.attacks.load import crowd
from adapters.server.attacks.registry import ATTACKS, attempt
from adapters.server.attacks.victim import Client, Victim


@dataclass
class Seen:
    """What the bystander saw: seconds of each round, how many of its answers were what, and windows it had to open anew."""

    seconds: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    lost: int = 0

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.seconds, share)) if self.seconds else float("inf")


class _Rounds:
    """A small tenant: a standing window of three pictures with known answers, one that is opened anew, and a plain chat."""

    def __init__(self, port: int) -> None:
        self._user = Client(port, "Bearer key-bystander")
        self._questions = [f"color of {mark:02d}?" for mark in MARKS]
        self._chunks = [picture(i, f"t={i} s") for i in range(3)]
        self._window = self._user.window(budget=900, chunks=self._chunks)
        self._asked = self.lost = 0
        self.expected = [self._round(i) for i in range(3)]

    def _round(self, i: int) -> tuple[Any, ...]:
        """The standing window, a new one and a plain chat, each asked one small question."""
        question, told = self._questions[i], []
        told.append(self._user.ask(self._window, question))
        if told[0][0] == 410:  # its pictures were in a store that somebody has destroyed, which is said
            self.lost += 1
            self._window = self._user.window(budget=900, chunks=self._chunks)
            told[0] = self._user.ask(self._window, question)
        window = self._user.window(budget=900, chunks=self._chunks[: i + 1])
        told.append(self._user.ask(window, question))
        self._user.close(window)
        url = f"data:image/png;base64,{self._chunks[i]['image']}"
        told.append(self._user.chat([{"type": "image_url", "image_url": {"url": url}}, text(question)]))
        texts = []
        for status, answer in told:
            assert status == 200, (status, str(answer)[:200])
            texts.append(answer["text"] if "text" in answer else answer["choices"][0]["message"]["content"])
        return tuple(texts)

    def ask(self, seen: Seen) -> None:
        i = self._asked % 3
        self._asked += 1
        before = time.monotonic()
        try:
            made = self._round(i)
            seen.answers["right" if made == self.expected[i] else "wrong"] += 1
        except Exception as error:
            seen.answers[f"{type(error).__name__}: {str(error)[:120]}"] += 1
        seen.seconds.append(time.monotonic() - before)


def _asking(port: int, pipe: Connection) -> None:
    """The bystander's process: sends the expected answers, then for each number received what so many rounds saw, or for
    None what all rounds saw until the next message."""
    rounds = _Rounds(port)
    pipe.send(rounds.expected)
    with contextlib.suppress(EOFError):
        while True:
            count, seen = pipe.recv(), Seen()
            while len(seen.seconds) < (3 if count is None else count) or (count is None and not pipe.poll()):
                rounds.ask(seen)
            if count is None:
                pipe.recv()
            seen.lost, rounds.lost = rounds.lost, 0
            pipe.send(seen)


class Bystander:
    """Asks in a process of its own, so that what the attacks themselves cost does not count as the server's latency.

    Attributes:
        expected: its answers while nobody attacked.
    """

    def __init__(self, at: Victim) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_asking, args=(at.port, theirs), daemon=True)
        self._process.start()
        self.expected: list[tuple[str, ...]] = self._pipe.recv()

    def quiet(self, rounds: int) -> Seen:
        """What so many rounds see."""
        self._pipe.send(rounds)
        return self._seen()

    def begin(self) -> None:
        """Asks round after round from now on."""
        self._pipe.send(None)

    def end(self) -> Seen:
        """What it has seen since `begin`."""
        self._pipe.send("end")
        return self._seen()

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _seen(self) -> Seen:
        seen: Seen = self._pipe.recv()
        return seen


@dataclass
class Report:
    """What one attack did. ``median`` and ``p95`` are the bystander's latency over that of the quiet phases around it."""

    attack: str
    broken: str
    times: int
    answers: dict[str, int]
    lost: int
    median: float
    p95: float
    quiet_s: float
    peak: int
    alive: bool


def _from_afar() -> None:
    """This thread, and those that it starts, take only the processor time that nobody else wants.

    Attackers have machines of their own: what their side costs on this one is no latency of the server's.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def endure(at: Victim, bystander: Bystander, name: str, seconds: float = 6.0, rounds: int = 12) -> Report:
    """Runs one attack over and over for ``seconds`` (once at least), between two quiet phases, beside the bystander.

    Any other name is a `crowd`.
    """
    quiet = bystander.quiet(rounds)
    peak, broken, times = [at.resident()], "", 0
    done = threading.Event()

    def watches() -> None:
        _from_afar()
        while not done.wait(0.1):
            peak.append(at.resident())

    watching = threading.Thread(target=watches)
    watching.start()
    bystander.begin()
    until = time.monotonic() + seconds
    while times == 0 or (time.monotonic() < until and not broken):
        with ThreadPoolExecutor(1, initializer=_from_afar) as attacker:
            broken = attacker.submit(attempt, ATTACKS.get(name, crowd), at).result()
        times += 1
    if broken:
        time.sleep(3)
    seen = bystander.end()
    done.set()
    watching.join()
    alive = at.process.poll() is None and at.user("").call("/health", timeout=30)[0] == 200
    if alive:
        after = bystander.quiet(rounds)
        quiet.seconds += after.seconds
        seen.answers.update(after.answers)
    return Report(
        name, broken, times, dict(seen.answers), seen.lost, seen.quantile(0.5) / quiet.quantile(0.5),
        seen.quantile(0.95) / quiet.quantile(0.95), statistics.median(quiet.seconds), max(peak), alive,
    )  # fmt: skip
