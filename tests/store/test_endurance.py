"""Writers that are killed anywhere, and faults everywhere: nothing wrong is served, nothing is left behind."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ctxwin.store.base import Store
from ctxwin.store.disk import DiskStore
from store.redis_server import Server

pytestmark = pytest.mark.slow

WRITERS = 500
OPERATIONS = 100_000
FAULTS = 0.01
SECRETS = {"plain": None, "sealed": b"a secret that all of them share"}
LIMIT = 2_000_000
KEYS = [f"span/{i}" for i in range(60)]


def value(key: str, version: int) -> bytes:
    """What only this key and version have."""
    seed = hashlib.sha256(f"{key} {version}".encode()).digest()
    return f"{key} {version} ".encode() + seed * (1 + seed[0] * 8)


def is_right(key: str, found: bytes | None) -> bool:
    if found is None:
        return True
    named, version, _ = found.split(b" ", 2)
    return named.decode() == key and found == value(key, int(version))


def write_until_killed(store: Store, seed: int) -> None:
    own = random.Random(seed)
    while True:
        key = own.choice(KEYS)
        kind = own.random()
        if kind < 0.6:
            store.put(key, value(key, own.randrange(10)))
        elif kind < 0.8:
            assert is_right(key, store.get(key))
        elif kind < 0.95:
            store.delete(key)
        else:
            store.verify() if own.random() < 0.1 else store.lease(key)


def killed(opened: Callable[[], Store], seeds: Sequence[int], after: float) -> None:
    """Processes that write at once, and die without any cleanup."""
    children = []
    for seed in seeds:
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(opened(), seed)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(7)  # only a failure ends it by itself
        children.append(child)
    time.sleep(after)
    for child in children:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"a writer of {seeds} failed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        yield server


@pytest.mark.parametrize("secret", SECRETS)
def test_killed_writers_leave_nothing_wrong_on_disk(folder: Path, secret: str) -> None:
    def opened() -> DiskStore:
        return DiskStore(folder, max_bytes=LIMIT, secret=SECRETS[secret])

    own = random.Random(1)
    for i in range(WRITERS // 5):
        killed(opened, [i], own.uniform(0.0, 0.08))
        killed(opened, range(10_000 + 4 * i, 10_004 + 4 * i), own.uniform(0.0, 0.15))
        with closing(opened()) as store:
            assert all(is_right(key, store.get(key)) for key in KEYS)
            assert store.stats().corrupt == 0
            assert store.failures == 0
    with closing(opened()) as store:
        good, corrupt = store.verify()
        assert corrupt == 0
        assert good == store.stats().items > 10
        store.gc(0)
        files = [path for path in (folder / "blobs").rglob("*") if path.is_file()]
        assert len(files) == good
        assert sum(path.stat().st_size for path in files) == store.stats().bytes <= LIMIT
        assert [*(folder / "tmp").iterdir()] == [*folder.glob("*.damaged-*")] == []


@pytest.mark.parametrize("secret", SECRETS)
def test_killed_writers_leave_nothing_wrong_in_redis(server: Server, secret: str) -> None:
    from ctxwin.store.redis import RedisStore

    def opened() -> RedisStore:
        return RedisStore(server.url, max_bytes=LIMIT, secret=SECRETS[secret])

    own = random.Random(2)
    for i in range(WRITERS):
        killed(opened, [i], own.uniform(0.0, 0.05))
        if i % 25 == 0:
            with closing(opened()) as store:
                assert all(is_right(key, store.get(key)) for key in KEYS)
                assert store.stats().corrupt == 0
    with closing(opened()) as store:
        good, corrupt = store.verify()
        assert corrupt == 0
        assert good == store.stats().items > 10
        assert store.stats().bytes <= LIMIT


class Faults:
    """Calls of the operating system that fail now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def sometimes(self, real: Callable[..., Any], kind: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.random.random() < FAULTS:
                self.count += 1
                raise OSError(kind, os.strerror(kind))
            return real(*args, **options)

        return call


@pytest.mark.parametrize("secret", SECRETS)
def test_faults_of_a_disk_serve_nothing_wrong(folder: Path, secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, own = Faults(3), random.Random(4)
    store = DiskStore(folder, max_bytes=LIMIT, secret=SECRETS[secret])
    held: dict[str, set[bytes | None]] = {}
    damaged = 0
    for name, kind in (
        ("fsync", errno.EIO),
        ("replace", errno.ENOSPC),
        ("fdopen", errno.EMFILE),
        ("utime", errno.EROFS),
    ):
        monkeypatch.setattr(os, name, faults.sometimes(getattr(os, name), kind))
    for step in range(OPERATIONS):
        key = own.choice(KEYS)
        what = own.random()
        before = held.setdefault(key, {None})
        if what < 0.3:
            new = value(key, own.randrange(10))
            # A put that is refused may have left the older value, or nothing.
            held[key] = {new, None} if store.put(key, new) else before | {None}
        elif what < 0.36:
            if store.delete(key):
                held[key] = {None}
        elif what < 0.36 + FAULTS:  # a bit turns, a tail is lost, a file goes
            row = store._row(key)
            if row is not None and (path := folder / row.file).is_file():
                damaged += 1
                raw = path.read_bytes()
                at = own.randrange(len(raw))
                harm = own.randrange(3)
                if harm == 2:
                    path.unlink()
                else:
                    path.write_bytes(raw[:at] + (bytes([raw[at] ^ 1]) + raw[at + 1 :] if harm else b""))
        elif what < 0.3705 and step % 10 == 0:
            store.close()
            monkeypatch.undo()
            store = DiskStore(folder, max_bytes=LIMIT, secret=SECRETS[secret])
            for name, kind in (("fsync", errno.EIO), ("replace", errno.ENOSPC), ("fdopen", errno.EMFILE)):
                monkeypatch.setattr(os, name, faults.sometimes(getattr(os, name), kind))
        else:
            found = store.get(key)
            assert found in before | {None}, (step, key)
    monkeypatch.undo()
    assert faults.count > 500
    assert damaged > 200
    store.verify()
    good, corrupt = store.verify()
    assert corrupt == 0
    store.gc(0)
    files = [path for path in (folder / "blobs").rglob("*") if path.is_file()]
    assert len(files) == good == store.stats().items
    assert store.stats().bytes <= LIMIT
    assert [*(folder / "tmp").iterdir()] == []


def test_faults_of_redis_serve_nothing_wrong(server: Server) -> None:
    import redis

    from ctxwin.store.redis import RedisStore

    own = random.Random(5)
    store = RedisStore(server.url, max_bytes=LIMIT, secret=SECRETS["sealed"])
    damaged = 0
    with closing(redis.Redis(port=server.port)) as client:
        held: dict[str, bytes | None] = {}
        for step in range(OPERATIONS):
            key = own.choice(KEYS)
            what = own.random()
            if what < 0.3:
                new = value(key, own.randrange(10))
                if store.put(key, new):
                    held[key] = new
            elif what < 0.36:
                store.delete(key)
                held[key] = None
            elif what < 0.36 + FAULTS:
                raw = client.get(store._values + key)
                if raw:
                    damaged += 1
                    at = own.randrange(len(raw))
                    client.setrange(store._values + key, at, bytes([raw[at] ^ 1]))
            else:
                found = store.get(key)
                assert found in (held.get(key), None), (step, key)
    assert damaged > 200
    store.verify()
    assert store.verify() == (store.stats().items, 0)
    store.close()
