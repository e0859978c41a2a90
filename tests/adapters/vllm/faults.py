"""Faults for tests of the vLLM engine, and what may be left of it: nothing.

Faults strike between an engine and vLLM: in the connector's write where vLLM runs in this process, in the files that are
handed over where it runs in processes of its own.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ctxwin_vllm import requests
from ctxwin_vllm.lifecycle.folders import shared_memory
from ctxwin_vllm.transport import LocalTransport, SharedMemoryTransport, base
from waiting import wait_until

KINDS = {LocalTransport: ("refused", "torn"), SharedMemoryTransport: ("gone", "cut", "turned")}
"""What can happen to a load. In process: the write raises, before or after it has written garbage. Elsewhere: a file that
the job names is not there, ends in the middle, or has a bit turned."""


class Faults:
    """Strikes the loads of one engine while it is entered.

    Args:
        engine: a `VLLMEngine`; its views share what is struck.
        choose: called in the thread of each request that loads something, before it is handed over; returns the kind
            of fault, or "" for none.

    Attributes:
        struck: loads that failed because of it, by kind. One that vLLM's prefix cache made needless does not count.
    """

    def __init__(self, engine: Any, choose: Callable[[], str]) -> None:
        self.transport: Any = engine._core.transport
        self.kinds = KINDS[type(self.transport)]
        self.struck: Counter[str] = Counter()
        self._choose = choose
        self._doomed: dict[str, str] = {}
        self._lock = threading.Lock()
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Faults:
        transport, add, collect, remove = (
            self.transport,
            self.transport.add,
            self.transport.collect,
            self.transport.remove,
        )

        def handed_over(transfer: Any) -> str:
            kind = self._choose() if transfer.loads else ""
            handle: str = add(transfer)
            if kind:
                assert kind in self.kinds
                with self._lock:
                    self._doomed[handle] = kind
                if isinstance(transport, SharedMemoryTransport):
                    _damage(transport.path, handle, kind)
            return handle

        def collected(handle: str, transfer: Any, finished: bool) -> None:
            collect(handle, transfer, finished)
            kind = self._doomed.get(handle)
            if kind and transfer.error is not None:
                with self._lock:
                    self.struck[kind] += 1

        def removed(handle: str) -> None:
            remove(handle)
            if self._doomed.pop(handle, None) and isinstance(transport, SharedMemoryTransport):
                (transport.path / f"bad-{handle}").unlink(missing_ok=True)

        self._patch(transport, "add", handed_over)
        self._patch(transport, "collect", collected)
        self._patch(transport, "remove", removed)
        if isinstance(transport, LocalTransport):
            self._patch(base, "write", self._write(base.write))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patches.close()

    def _patch(self, target: Any, name: str, value: Any) -> None:
        self._patches.enter_context(mock.patch.object(target, name, value))

    def _write(self, real: Any) -> Any:
        def write(paged: Any, parts: Any, kv: Any, load: Any, heads: slice | None = None) -> int:
            kind = self._doomed.get(load.handle)
            if kind is None:
                written: int = real(paged, parts, kv, load, heads)
                return written
            if kind == "torn":
                blocks = list(load.blocks[load.begin // paged.block_size : -(-load.end // paged.block_size)])
                for layer in paged.layers[1:]:
                    layer.kv_cache[blocks] = 1e4
            raise OSError(f"a {kind} page")

        return write


def _damage(folder: Path, handle: str, kind: str) -> None:
    """Points the last span of a job at a damaged copy of its file; vLLM's prefix cache may hold what the first ones bring."""
    path, bad = folder / f"job-{handle}.json", folder / f"bad-{handle}"
    job = json.loads(path.read_bytes())
    blob = bytearray((folder / job["loads"][-1]["span"][0]).read_bytes())
    if kind == "cut":
        bad.write_bytes(blob[: len(blob) // 2])
    elif kind == "turned":
        blob[len(blob) * 2 // 3] ^= 1
        bad.write_bytes(blob)
    job["loads"][-1]["span"][0] = bad.name
    path.write_text(json.dumps(job))


class Seeded:
    """A share of all loads, drawn from a generator of each thread's own, which `seed` starts."""

    def __init__(self, share: float, kinds: tuple[str, ...]) -> None:
        self.share, self.kinds = share, kinds
        self._local = threading.local()

    def seed(self, seed: str) -> None:
        self._local.random = random.Random(seed)

    def __call__(self) -> str:
        draw = getattr(self._local, "random", None)  # none in the thread of a stream
        if draw is None:
            return ""
        return draw.choice(self.kinds) if draw.random() < self.share else ""


class GaveUpError(Exception):
    """A caller did not wait for an answer."""


class Impatient:
    """While it is entered, threads that set `patience` take a request back when an output is that late (seconds)."""

    def __init__(self) -> None:
        self.patience = threading.local()
        self._patch = mock.patch.object(requests, "_next", self._next)
        self._real = requests._next

    def _next(self, driver: Any, outputs: Any, forced: Any) -> Any:
        seconds = getattr(self.patience, "seconds", None)
        if seconds is None:
            return self._real(driver, outputs, forced)
        try:
            return outputs.get(timeout=seconds)
        except queue.Empty:
            raise GaveUpError from None

    def __enter__(self) -> Impatient:
        self._patch.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.stop()


def endless(engine: Any) -> None:
    """From now on no generated token ends an answer of this view."""
    engine.encoder.checkpoint = replace(engine.encoder.checkpoint, eos=frozenset())


def free_blocks(engine: Any) -> bool:
    """Whether no request holds a block of the paged cache; empties the prefix cache if so."""
    freed: bool = engine._core.driver.reset_prefix_cache()
    return freed


def assert_released(engine: Any, *stores: Any) -> None:
    """Nothing is left of any request: no transfer, no block of the paged cache, no file, no lease."""
    transport = engine._core.transport
    assert len(transport) == 0
    until = time.monotonic() + 20  # vLLM frees the blocks of an aborted request in its next step
    while not free_blocks(engine):
        assert time.monotonic() < until, "blocks of the paged cache are still held"
        time.sleep(0.05)
    if isinstance(transport, SharedMemoryTransport):
        assert wait_until(lambda: not files(transport.path), 5), files(transport.path)
    for store in (engine.store, *stores):
        assert store.stats().leased == 0


def files(folder: Path) -> list[str]:
    """What a transport's folder holds of single requests; spans, patches and notes of workers' copies stay for later ones."""
    kept = ("span-", "kept-", "patch-", "spec.json", "segments.json", "lock", "embed")
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(kept))


def folders(pid: int) -> list[str]:
    """Folders in shared memory that belong to a process."""
    return sorted(p.name for p in Path(shared_memory()).glob(f"ctxwin-{pid}-*"))


def mapped(pids: Sequence[int]) -> set[str]:
    """Files in shared memory that processes have mapped, by name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
    return {name for name in found if not name.endswith("(deleted)")}


def left(names: set[str]) -> list[str]:
    """Those of them that are still there."""
    return sorted(name for name in names if Path("/dev/shm", name).exists())


def descendants(pid: int) -> list[int]:
    """Processes started by a process, and by those, without zombies and Python's resource trackers."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and b"resource_tracker" not in (folder / "cmdline").read_bytes():
                    children.setdefault(int(fields[1]), []).append(int(folder.name))

    def below(parent: int) -> Iterator[int]:
        for child in children.get(parent, ()):
            yield child
            yield from below(child)

    return list(below(pid))


def cores(pid: int) -> list[int]:
    """Processes of vLLM's engines that a process started; forked ones may lack their titles."""
    parents = {
        child: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] for child in descendants(pid)
    }
    return [child for child, parent in parents.items() if parent == str(pid)]


def running(pids: list[int]) -> dict[int, str]:
    """Names of those that still run."""
    alive = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if rest.split()[0] != "Z":
                alive[pid] = name
    return alive
