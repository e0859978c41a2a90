"""Losses and waits of a fleet of two: replicas killed under load, or replaced.

``python -m evals.studies.fleet kill --minutes 5``: windows are edited and asked while a replica is killed every 20 s. Every
acknowledged edit must be there in the end, and every answer is held against the same edits and asks in one process.
``restart``: the same load while the fleet is deployed anew, from a client that retries once. Needs redis-server.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import redis
from openai import OpenAI

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.errors import CtxwinError
from ctxwin.tiny import world
from ctxwin_client import RemoteWindow
from ctxwin_ray import FleetArguments
from ctxwin_ray.application import fleet
from ctxwin_ray.run import APPLICATION, running

REDIS, PORT = 6397, 8397
SYSTEM, EXACT = "You watch a camera.", Fidelity("exact")
VLLM = ["--max-model-len", "2048", "--dtype", "float32"]


@dataclass
class Done:
    """Something that a client did to a window, and what it was told."""

    at: float
    seconds: float
    window: int
    op: str
    arguments: tuple[Any, ...]
    result: Any = None
    computed: int = 0
    prompt: int = 0


@dataclass
class Load:
    """Clients that edit and ask windows, each window from one thread."""

    url: str
    count: int
    retries: int
    seed: int = 0
    clients: int = 4
    done: list[Done] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    windows: list[RemoteWindow] = field(default_factory=list)
    expected: list[list[str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.frames = world.make_stream(seed=self.seed, n_frames=64)
        self.chunks = [Chunk.image(world.render(f), text=f"t={i} s") for i, f in enumerate(self.frames)]
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=8, timeout=120)
        for k in range(self.count):
            self.windows.append(RemoteWindow(client, SYSTEM, 1500, EXACT))
            self.expected.append([])
            self._do(k, "extend", tuple((7 * k + i) % 64 for i in range(4)))

    def run(self) -> list[threading.Thread]:
        """Start the clients."""
        threads = [threading.Thread(target=self._client, args=(c,), daemon=True) for c in range(self.clients)]
        for thread in threads:
            thread.start()
        return threads

    def _client(self, number: int) -> None:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=self.retries, timeout=120)
        mine = [k for k in range(self.count) if k % self.clients == number]
        for k in mine:
            self.windows[k] = RemoteWindow.attach(client, self.windows[k].id)
        draw = random.Random(f"{self.seed} {number}")
        while not self.ended.is_set():
            k = draw.choice(mine)
            there = self.expected[k]
            op = draw.choice(("append", "ask", "ask", "ask", "evict", "reorder"))
            if op == "append" and len(there) < 6:
                self._do(k, op, (draw.randrange(64),))
            elif op == "evict" and len(there) > 2:
                self._do(k, op, (draw.choice(there),))
            elif op == "reorder" and len(there) > 2:
                self._do(k, op, tuple(draw.sample(there, len(there))))
            elif there:
                self._do(k, "ask", (f"what is at {draw.choice(self.frames[draw.randrange(64)].marks):02d}?",))

    def _do(self, k: int, op: str, arguments: tuple[Any, ...]) -> None:
        window, there, begin = self.windows[k], self.expected[k], time.monotonic()
        done = Done(time.time(), 0.0, k, op, arguments)
        try:
            if op == "extend":
                done.result = window.extend([self.chunks[i] for i in arguments])
                there.extend(done.result)
            elif op == "append":
                done.result = window.append(self.chunks[arguments[0]])
                there.append(done.result)
            elif op == "evict":
                window.evict(arguments[0])
                there.remove(arguments[0])
            elif op == "reorder":
                window.reorder(list(arguments))
                there[:] = arguments
            else:
                answer = window.ask(arguments[0], 4)
                done.result, done.computed = answer.token_ids, answer.usage.computed_tokens
                done.prompt = answer.usage.prompt_tokens
        except Exception as error:  # what a client would see; the edit may have been made
            self.failed.append(f"{op}: {type(error).__name__}: {error}"[:300])
            there[:] = window.ids if op != "ask" else there
            done.op = "failed"
        done.seconds = time.monotonic() - begin
        self.done.append(done)


def replay(load: Load) -> dict[str, Any]:
    """The same edits and asks in one process: which answers differ, and which asks computed more there than here."""
    rows: Counter[str] = Counter()
    margins: list[float] = []
    with open_engine("tiny:vllm", dtype="float32", max_model_len=2048) as engine:
        windows = [Window(engine, SYSTEM, 1500, EXACT) for _ in load.windows]
        names: list[dict[str, str]] = [{} for _ in windows]
        broken: set[int] = set()
        for done in sorted(load.done, key=lambda d: d.at + d.seconds):
            window, name = windows[done.window], names[done.window]
            if done.op == "failed":
                broken.add(done.window)  # nobody knows whether it was done
            if done.window in broken:
                continue
            if done.op in ("append", "extend"):
                placements = window.extend([load.chunks[i] for i in done.arguments])
                name.update(zip([done.result] if done.op == "append" else done.result, placements, strict=True))
            elif done.op == "evict":
                window.evict(name[done.arguments[0]])
            elif done.op == "reorder":
                window.reorder([name[i] for i in done.arguments])
            else:
                answer = window.ask(done.arguments[0], 4, logprobs=2)
                rows["asks"] += 1
                rows["found"] += done.computed <= answer.usage.computed_tokens + 32  # vLLM's cache ends with a block
                if answer.token_ids != done.result:
                    rows["differ"] += 1
                    first, second = sorted(answer.first_token_logprobs.values(), reverse=True)[:2]
                    margins.append(first - second)
        for window in windows:
            window.close()
    return {**rows, "first_token_margins_of_those": sorted(margins), "windows_not_replayed": len(broken)}


@contextmanager
def running_fleet() -> Iterator[tuple[str, FleetArguments]]:
    """A Redis, and a fleet on it."""
    if shutil.which("redis-server") is None:
        sys.exit("a fleet needs a Redis; install redis-server")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = ["redis-server", "--port", str(REDIS), "--save", "", "--dir", folder]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(server.terminate)
        while True:
            try:
                redis.Redis(port=REDIS).ping()
                break
            except redis.ConnectionError:
                time.sleep(0.1)
        arguments = FleetArguments(
            model="tiny",
            vllm=VLLM,
            settings={"store": f"tiered:memory:,redis://127.0.0.1:{REDIS}/0"},
            replicas=2,
            cpus=0.5,
        )
        yield stack.enter_context(running(arguments, port=PORT)), arguments


def workers() -> list[psutil.Process]:
    """The processes of the replicas."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::ServeReplica:ctxwin:replica" in " ".join(process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def lost(load: Load) -> list[str]:
    """Windows that are not what was acknowledged."""
    client = OpenAI(base_url=f"{load.url}/v1", api_key="none", max_retries=8, timeout=120)
    losses = []
    for k, window in enumerate(load.windows):
        ids = list(RemoteWindow.attach(client, window.id).ids)
        if ids != load.expected[k]:
            losses.append(f"window {k}: {len(load.expected[k])} chunks acknowledged, {len(ids)} there")
    return losses


def waits(load: Load, moments: list[float], every: float) -> dict[str, Any]:
    """How long requests took after each moment, and elsewhere."""
    asks = [d for d in load.done if d.op == "ask"]
    calm = [d.seconds for d in asks if not any(m - 1 <= d.at <= m + every for m in moments)] or [0.0]
    worst = [max((d.seconds for d in load.done if m - 5 <= d.at <= m + every), default=0.0) for m in moments]
    return {
        "asks": len(asks),
        "edits": len(load.done) - len(asks),
        "ask_ms_p50_p99": [round(1e3 * float(np.quantile([d.seconds for d in asks], q))) for q in (0.5, 0.99)],
        "ask_ms_p50_away_from_kills": round(1e3 * float(np.quantile(calm, 0.5))),
        "longest_wait_s_by_kill": [round(w, 1) for w in worst],
        "computed_of_prompt": sum(d.computed for d in asks) / max(1, sum(d.prompt for d in asks)),
    }


Disturbance = Callable[[Load, FleetArguments], tuple[dict[str, Any], list[float], float]]
"""What happens to a fleet under load: its figures, its moments, and the seconds in which requests notice each."""


def measure(disturb: Disturbance, count: int, retries: int) -> dict[str, Any]:
    """A fleet under load that is disturbed; every edit is looked for in the end, every answer held against one process's."""
    with running_fleet() as (url, arguments):
        load = Load(url, count, retries)
        threads = load.run()
        figures, moments, every = disturb(load, arguments)
        load.ended.set()
        for thread in threads:
            thread.join(180)
        losses = lost(load)
    result = {**figures, **waits(load, moments, every), "failed": load.failed, "lost": losses}
    log(json.dumps(result))
    return {**result, "one_process": replay(load)}


def kill(minutes: float, every: float) -> Disturbance:
    """A replica killed every so many seconds."""

    def disturb(load: Load, _: FleetArguments) -> tuple[dict[str, Any], list[float], float]:
        kills, healthy, begin = list[float](), list[float](), time.monotonic()
        while time.monotonic() - begin < 60 * minutes:
            time.sleep(every)
            there = workers()
            if len(there) < 2:
                continue  # the last one that was killed is not replaced yet
            random.Random(len(kills)).choice(there).send_signal(signal.SIGKILL)
            kills.append(time.time())
            log(f"{time.monotonic() - begin:5.0f} s: killed one of {len(there)}; {len(load.done)} requests done")
            since = time.monotonic()
            while _ready() < 2 and time.monotonic() - since < 120:
                time.sleep(0.5)
            healthy.append(round(time.monotonic() - since, 1))
        return {"kills": len(kills), "seconds_until_two_replicas_answer": healthy}, kills, every

    return disturb


def restart(load: Load, arguments: FleetArguments) -> tuple[dict[str, Any], list[float], float]:
    """The fleet deployed anew."""
    from ray import serve

    pids_before = {p.pid for p in workers()}
    time.sleep(15)
    begin = time.time()
    changed = arguments.model_copy(update={"settings": {**arguments.settings, "max_waiting": 1000}})
    serve.run(fleet(changed), name=APPLICATION, route_prefix="/")
    took = time.time() - begin
    time.sleep(15)
    pids_after = {p.pid for p in workers()}
    return {"seconds": round(took, 1), "replicas_kept": len(pids_before & pids_after)}, [begin], took


def log(text: str) -> None:
    """Write progress, also where stderr is no terminal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _ready() -> int:
    """Return the number of replicas that answer."""
    from ray import serve

    try:
        states = serve.status().applications[APPLICATION].deployments["replica"].replica_states
    except (KeyError, CtxwinError):
        return 0
    return sum(n for state, n in states.items() if str(getattr(state, "value", state)) == "RUNNING")


def main() -> None:
    """Run one part and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("kill", "restart"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    given = parser.parse_args()
    disturb, retries = (kill(given.minutes, given.every), 8) if given.part == "kill" else (restart, 1)
    sys.stdout.write(json.dumps(measure(disturb, given.windows, retries), indent=1) + "\n")


if __name__ == "__main__":
    main()
