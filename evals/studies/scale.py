"""Routing, ownership and take-overs in a large fleet, simulated: what a decision, a window and the loss of replicas cost.

``python -m evals.studies.scale``: the shipped router, registries, windows and fencing, with engines that compute nothing, a
network without delay, and a store in memory that counts what a server would be asked (``--redis URL`` measures on a real one
what each call costs). Fronts know only what they sent. Half-way a tenth of the replicas is lost at once: most are killed, the
others are cut off, which one front notices after the other, and go on beside their successors.

Every answer is checked: it has all edits that were acknowledged before it was asked for. Same seed, same counts.
"""

import argparse
import heapq
import json
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ctxwin import Chunk, Fidelity, Window
from ctxwin.engines.base import Engine
from ctxwin.errors import StaleOwner
from ctxwin.hashing import digest
from ctxwin.progress import progress
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from ctxwin.window.state import State
from ctxwin_evals.console import print_json
from ctxwin_ray.hints import Hint, Places, window_prefix
from ctxwin_server.protocol.limits import Limits
from ctxwin_server.registry.windows import OpenWindows, WindowRegistry

from .unmoved import LANES, SimulatedEngine, unmoved

LOST, CUT_OFF = 0.1, 0.1
"""Replicas that are lost, and those of them that go on behind the fronts' backs."""
HOT_WINDOW, HOT_CHUNK, EDITS = 0.005, 0.05, 0.5
"""Shares of the asks: of one window, about one chunk, and with an edit in front."""
SLOTS, ANSWER_S, ONGOING = 8, 0.2, 1024
"""Answers at once, mean seconds of one, and requests in hand, of a replica."""
TURN_S, OPEN, CHUNKS = 4.0, 128, 4
"""Seconds between asks of a window in use; open windows of a replica; chunks of a window."""
NOTICED_S, RETRY_S = 5.0, 0.5
"""Until the last front knows of a replica that was cut off, and until a client sends a failed request again."""


class Records(MemoryStore):
    """The records of windows: fenced as in every store (`Store.commit`); counts calls, and the bytes of records, by second."""

    shared = True

    def __init__(self) -> None:
        super().__init__(1 << 40)
        self.now = 0.0
        self.calls: dict[str, Counter[int]] = {}

    def _note(self, call: str, by: int = 1) -> None:
        self.calls.setdefault(call, Counter())[int(self.now)] += by

    def token(self, key: str) -> int:
        self._note("token")
        return super().token(key)

    def claim(self, key: str) -> tuple[int, bytes] | None:
        claimed = super().claim(key)
        self._note("claim")
        self._note("bytes read", len(claimed[1]) if claimed else 0)
        return claimed

    def commit(self, key: str, value: bytes, token: int) -> bool:
        self._note("commit")
        self._note("bytes written", len(value))
        self._note("token", -1)  # the one inside
        return super().commit(key, value, token)

    def lease(self, key: str) -> bool:
        self._note("lease")
        return super().lease(key)


@dataclass(eq=False)
class Ask:
    """A client's request; ``window`` is -1 for a chat about the hot chunk, ``least`` the version that was acknowledged before."""

    window: int
    edits: bool
    began: float
    least: int = 0
    front: int = 0


@dataclass(eq=False)
class Replica:
    """A replica: its registry, what waits, and what it answers."""

    name: str
    registry: WindowRegistry
    waiting: deque[Ask] = field(default_factory=deque)
    busy: int = 0
    state: str = "up"


class Front:
    """One front's view: the replicas it believes in, and its own requests at each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.running: Counter[str] = Counter()
        self.looks = 0
        self.places = Places(names)

    def look(self, name: str) -> int:
        """Return its ongoing requests at a replica."""
        self.looks += 1
        return self.running[name]

    def drop(self, name: str) -> None:
        """Drop a replica that is lost."""
        if name in self.places.replicas:
            self.places = Places(replica for replica in self.places.replicas if replica != name)


class Fleet:
    """The simulation. See the module."""

    def __init__(self, replicas: int, windows: int, asks: int, seconds: float, seed: int, open_windows: int) -> None:
        random.seed(seed)  # the router draws as well
        self.rng, self.rate, self.seconds = random.Random(seed), asks, seconds
        self.records = Records()
        repo = SpanRepository(MemoryStore(), "simulated")
        names = [f"replica-{i}" for i in range(replicas)]
        self.engines = [SimulatedEngine(repo, window_prefix(name)) for name in names]
        limits = Limits(max_windows_total=open_windows)

        def registry(engine: Engine) -> WindowRegistry:
            return WindowRegistry(engine, open_windows, limits, OpenWindows(open_windows), records=self.records)

        self.replicas = {n: Replica(n, registry(e)) for n, e in zip(names, self.engines, strict=True)}
        self.writer = WindowRegistry(self.engines[0], 1, limits, OpenWindows(1), records=self.records)
        self.fronts = [Front(names) for _ in range(max(2, replicas // 64))]
        with Window(self.engines[0], "You watch a camera.", 4096, Fidelity("exact")) as window:
            window.extend([Chunk.text(f"chunk {i} of a window at the start") for i in range(CHUNKS)])
            self.first: State = window.snapshot()
        self.active = min(windows, max(1, round(asks * TURN_S)))
        self.stored: set[int] = set()
        self._store(0)
        record = self.records.read(f"window/{self.window_id(0)}")
        for number in range(self.active, windows):  # nobody asks for these
            self.records.put(f"window/{self.window_id(number)}", bytes(8) + (record or b""))
        self.acknowledged: dict[int, int] = {}
        self.owner: dict[int, str] = {}
        self.orphans: set[int] = set()
        self.events: list[tuple[float, int, str, Any]] = []
        self.serial = 0
        self.counts: Counter[str] = Counter()
        self.micros: list[float] = []
        self.looks: list[int] = []
        self.served: dict[str, Counter[str]] = {k: Counter() for k in ("before", "after", "hot chunk")}
        self.waits: dict[str, list[float]] = {
            k: [] for k in ("before", "after", "hot window", "hot chunk", "until served again", "first ask of these")
        }

    def window_id(self, number: int) -> str:
        """Return the id of a window, which one of the replicas opened some time ago."""
        return f"{self.engines[number % len(self.engines)].window_prefix}{number:012x}"

    def _store(self, number: int) -> None:
        self.stored.add(number)
        self.writer.add(Window.restore(self.engines[0], self.first.replace(window=self.window_id(number))))

    def later(self, seconds: float, kind: str, subject: Any) -> None:
        """Schedule an event."""
        self.serial += 1
        heapq.heappush(self.events, (self.records.now + seconds, self.serial, kind, subject))

    def run(self, advance: Any) -> None:
        """Simulate until every ask is answered."""
        total = round(self.rate * self.seconds)
        for _ in range(total):
            self.later(self.rng.uniform(0, self.seconds), "arrive", None)
        self.later(self.seconds / 2, "lose", None)
        while self.events:
            self.records.now, _, kind, subject = heapq.heappop(self.events)
            getattr(self, f"_{kind}")(subject)
            if kind == "arrive":
                advance(1)
        if self.counts["answered"] != total:
            raise AssertionError(f"{total} asks must be answered, got {self.counts['answered']}")

    def _arrive(self, _: None) -> None:
        share = self.rng.random()
        if share < HOT_CHUNK:
            number = -1
        elif share < HOT_CHUNK + HOT_WINDOW:
            number = 0
        else:
            number = self.rng.randrange(self.active)
        if number >= 0 and number not in self.stored:
            self._store(number)
        ask = Ask(number, number >= 0 and self.rng.random() < EDITS, self.records.now)
        ask.least = self.acknowledged.get(number, 0)
        self._send(ask)

    def _send(self, ask: Ask) -> None:
        ask.front = self.rng.randrange(len(self.fronts))
        front = self.fronts[ask.front]
        hint = Hint(window=self.window_id(ask.window)) if ask.window >= 0 else Hint(chunks=frozenset({"a" * 64}))
        looks, begin = front.looks, time.perf_counter()
        order = front.places.order(hint, front.look)
        self.micros.append(1e6 * (time.perf_counter() - begin))
        self.looks.append(front.looks - looks)
        for name in order:
            replica = self.replicas[name]
            if replica.state == "killed":
                front.drop(name)
                self.counts["sent to a replica that was killed"] += 1
                break
            if replica.busy + len(replica.waiting) < ONGOING:
                front.running[name] += 1
                replica.waiting.append(ask)
                return self._work(replica)
        else:
            self.counts["refused by all that were tried"] += 1
        return self.later(RETRY_S, "send", ask)

    def _work(self, replica: Replica) -> None:
        while replica.waiting and replica.busy < SLOTS and replica.state != "killed":
            ask = replica.waiting.popleft()
            replica.busy += 1
            use: AbstractContextManager[Window] | None = None
            window: Window | None = None
            if ask.window >= 0:
                use = replica.registry.using(self.window_id(ask.window))
                window = use.__enter__()
                if self.owner.get(ask.window, replica.name) != replica.name:
                    self.counts["moves"] += 1
                self.owner[ask.window] = replica.name
            self.later(self.rng.expovariate(1 / ANSWER_S), "finish", (replica, ask, use, window))

    def _finish(self, subject: tuple[Replica, Ask, AbstractContextManager[Window] | None, Window | None]) -> None:
        replica, ask, use, window = subject
        if replica.state == "killed":
            return
        replica.busy -= 1
        self.fronts[ask.front].running[replica.name] -= 1
        try:
            if use is not None and window is not None:
                if ask.edits:
                    window.append(Chunk.text(f"chunk {self.serial} of a window while in use"))
                    window.evict(window.ids[0])
                use.__exit__(None, None, None)
                if window.version < ask.least:
                    raise AssertionError(f"an answer must have version {ask.least}, got {window.version}")
                if ask.edits and window.version <= self.acknowledged.get(ask.window, 0):
                    raise AssertionError(f"version {window.version} of window {ask.window} was acknowledged twice")
                if ask.edits:
                    self.acknowledged[ask.window] = window.version
        except StaleOwner:
            self.counts["fenced"] += 1
            self._send(ask)
        else:
            self._note(replica, ask)
        self._work(replica)

    def _note(self, replica: Replica, ask: Ask) -> None:
        self.counts["answered"] += 1
        when = "before" if ask.began < self.seconds / 2 else "after"
        hot = {-1: "hot chunk", 0: "hot window"}.get(ask.window)
        self.waits[hot or when].append(self.records.now - ask.began)
        self.served["hot chunk" if ask.window < 0 else when][replica.name] += 1
        if ask.window in self.orphans:
            self.orphans.remove(ask.window)
            self.waits["until served again"].append(self.records.now - self.seconds / 2)
            self.waits["first ask of these"].append(self.records.now - ask.began)

    def _lose(self, _: None) -> None:
        names = self.rng.sample(sorted(self.replicas), round(LOST * len(self.replicas)))
        self.counts["replicas lost"] = len(names)
        for i, name in enumerate(names):
            replica = self.replicas[name]
            if i < max(1, CUT_OFF * len(names)):
                replica.state = "cut off"
                for front in self.fronts:
                    self.later(self.rng.uniform(0, NOTICED_S), "notice", (front, name))
                continue
            replica.state = "killed"
            self.orphans |= {number for number, owner in self.owner.items() if owner == name}
        killed = [replica for replica in self.replicas.values() if replica.state == "killed"]
        in_hand = [e[3][1] for e in self.events if e[2] == "finish" and e[3][0].state == "killed"]
        for ask in (*in_hand, *(ask for replica in killed for ask in replica.waiting)):
            self.later(RETRY_S, "send", ask)
        self.counts["windows of killed replicas"] = len(self.orphans)

    def _notice(self, subject: tuple[Front, str]) -> None:
        subject[0].drop(subject[1])

    def result(self) -> dict[str, Any]:
        """Return the figures."""
        half = self.seconds / 2
        tracemalloc.start()
        begin = time.perf_counter()
        places = Places(self.replicas)
        seconds, memory = time.perf_counter() - begin, tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        stats = self.records.stats()
        registries = [replica.registry for replica in self.replicas.values()]

        def calls(seconds: Counter[int]) -> list[int]:
            early = [n for second, n in seconds.items() if half / 2 <= second < half - 1]
            return [round(float(np.mean(early or [0]))), max(n for second, n in seconds.items() if second >= half)]

        return {
            **self.counts,
            "decision": {
                "microseconds_p50_p99": _quantiles(self.micros),
                "most_replicas_looked_at": max(self.looks),
                "milliseconds_to_place_all_replicas": round(1e3 * seconds, 1),
                "bytes_a_replica": round(memory / len(places.replicas)),
            },
            "record_bytes": round(stats.bytes / stats.items),
            "open_windows": sum(map(len, registries)),
            "opened_from_the_store": sum(registry.taken_over for registry in registries),
            "largest_to_mean": {k: _largest(v) for k, v in self.served.items()},
            "replicas_that_served_the_hot_chunk": len(self.served["hot chunk"]),
            "seconds_p50_p99_most": {k: _quantiles(v) for k, v in self.waits.items()},
            "windows_of_killed_replicas_not_asked_for_again": len(self.orphans),
            "calls_a_second_before_and_most_after": {k: calls(v) for k, v in self.records.calls.items()},
        }


def simulate(
    replicas: int, windows: int, asks: int, seconds: float, seed: int, open_windows: int = OPEN
) -> dict[str, Any]:
    """Simulate a fleet and return its figures; raise AssertionError where an answer misses an acknowledged edit."""
    begin = time.perf_counter()
    fleet = Fleet(replicas, windows, asks, seconds, seed, open_windows)
    with progress("asks", round(asks * seconds)) as advance:
        fleet.run(advance)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    setup = {"replicas": replicas, "windows": windows, "asks_a_second": asks, "simulated_s": seconds, "seed": seed}
    return {**setup, **fleet.result(), "wall_s": round(time.perf_counter() - begin), "peak_mib": round(used)}


def measure(url: str, record_bytes: int, count: int = 2000) -> dict[str, Any]:
    """Measure each call on a real Redis: milliseconds, its processor's microseconds, commands, and bytes in and out."""
    import redis

    from ctxwin.store import open_store

    tenant = digest(url, time.time())
    with closing(open_store(url, tenant=tenant)) as store, closing(redis.Redis.from_url(url)) as client:
        figures: dict[str, Any] = {}

        @contextmanager
        def counted(call: str) -> Iterator[None]:
            start, begin = client.info("everything"), time.perf_counter()
            yield
            seconds, after = time.perf_counter() - begin, client.info("everything")
            spent = sum(after[name] - start[name] for name in ("used_cpu_sys", "used_cpu_user"))
            figures[call] = {
                "ms": round(1e3 * seconds / count, 3),
                "server_us": round(1e6 * spent / count, 1),
                "bytes_in": (after["total_net_input_bytes"] - start["total_net_input_bytes"]) // count,
                "bytes_out": (after["total_net_output_bytes"] - start["total_net_output_bytes"]) // count,
                "memory": (after["used_memory"] - start["used_memory"]) // count,
            }

        keys, value = [f"window/{i:020x}" for i in range(count)], b"x" * record_bytes
        calls: dict[str, Any] = {
            "commit": lambda key: store.commit(key, value, 1), "token": store.token, "lease": store.lease,
            "claim": store.claim,
        }  # fmt: skip
        for name, call in calls.items():
            with counted(name):
                for key in keys:
                    call(key)
        for key in keys:
            store.delete(key)
    return figures


def _largest(counts: Counter[str]) -> float:
    return round(max(counts.values()) / float(np.mean(list(counts.values()))), 2) if counts else 0.0


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(float(np.quantile(values, q)), 2) for q in (0.5, 0.99, 1)] if values else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=1_000_000)
    parser.add_argument("--asks", type=int, default=10_000, help="a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated")
    parser.add_argument("--open", type=int, default=OPEN, help="most open windows of a replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--redis", default="", help="measure what each call costs on this server, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--unmoved", type=int, nargs="*", help="measure windows of so many chunks instead")
    options = parser.parse_args(arguments)
    if options.unmoved:
        return print_json({n: {lane: unmoved(n, lane) for lane in LANES} for n in options.unmoved})
    result = simulate(options.replicas, options.windows, options.asks, options.seconds, options.seed, options.open)
    if options.redis:
        result["redis"] = measure(options.redis, result["record_bytes"])
    if options.json:
        return print_json(result)
    for name, value in result.items():
        sys.stdout.write(f"{name.replace('_', ' ')}: {json.dumps(value)}\n")
    return None


if __name__ == "__main__":
    main()
