"""Requests that end the engine: those that ran when it died are then tried alone, and refused if it dies again."""

import asyncio
import fcntl
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctxwin.errors import EngineFailed
from ctxwin.files import atomic_write
from ctxwin_client.errors import Quarantined, TooManyRequests

QUARANTINE_S = 3600.0
"""Seconds for which a request that ended the engine is refused, and one that may have done so is suspected."""
_ALONE_S, _WAIT_S = 60.0, 30.0
"""Seconds that a suspect has the engine to itself, and that it waits for that."""
_PAUSE_S = 0.05
_MOST = 1024


@dataclass(frozen=True)
class _Suspect:
    """A request that ran when the engine died; ``guilty`` once it did so twice and was alone the second time."""

    deaths: int
    until: float
    guilty: bool


class Quarantine:
    """Keeps a request that ends the engine from ending it again and again. Thread-safe.

    Every request that runs when the engine dies is a suspect. Its next try runs alone; others wait, for a minute at most. If it
    succeeds, or runs for that minute, it is cleared; if the engine dies again, nothing else can have ended it, and the
    request is refused from then on. So a bystander of any number of deaths is served, and nothing is refused forever.

    Args:
        journal: file that outlives the process; None remembers nothing over a restart. It holds digests, no content. Processes
            may share one: what one of them suspects the others do from their next request on.
        died: whether the engine has ended by itself; an attribute, too.
        clock: seconds since the epoch, as the journal has them; tests replace it, and ``elapsed``, which times waits.
    """

    def __init__(
        self,
        journal: Path | None = None,
        died: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self.died = died
        self._clock, self._elapsed = clock, elapsed
        self._running: Counter[str] = Counter()
        self._alone: tuple[str, float] | None = None  # the running suspect, and its start
        self._next: tuple[str, float] | None = None  # the suspect that waits, and when it last tried
        self._recorded = False
        self._lock = threading.Lock()
        self._suspects: dict[str, _Suspect] = {}
        self._read = 0
        self._follow()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Register the request ``name`` (a digest) as running in the engine within the block. Blocks while it has to wait.

        Raises:
            Quarantined: it ended the engine twice. EngineFailed: the engine has ended. TooManyRequests: a suspect found
                no moment to run alone.
        """
        since = self._elapsed()
        while not self._enter(name, since):
            time.sleep(_PAUSE_S)
        with self._count(name):
            yield

    @asynccontextmanager
    async def running_async(self, name: str) -> AsyncIterator[None]:
        """Do as `running`, on an event loop."""
        since = self._elapsed()
        while not self._enter(name, since):
            await asyncio.sleep(_PAUSE_S)
        with self._count(name):
            yield

    def _enter(self, name: str, since: float) -> bool:
        """Return whether the request may run now, and count it if so."""
        with self._lock:
            self._follow()
            now = self._elapsed()
            suspect = self._suspects.get(name)
            # A clock that was set back would refuse it for as long as it was set back.
            if suspect is not None and not 0 < suspect.until - self._clock() <= 2 * QUARANTINE_S:
                suspect = None
                self._clear(name)
            if suspect is not None and suspect.guilty:
                until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(suspect.until))
                raise Quarantined(
                    f"this request ran alone when the engine died, after {suspect.deaths - 1} earlier death(s) in which it "
                    f"ran as well; it is refused until {until}"
                )
            if self.died():
                raise EngineFailed("the engine has ended and is started again; try again in a minute")
            if self._alone is not None and now - self._alone[1] > _ALONE_S:
                self._clear(self._alone[0])
                self._alone = None
            waiting = self._next is not None and self._next[0] != name and now - self._next[1] < 1.0
            if self._alone is not None or waiting or (suspect is not None and self._running.total()):
                if suspect is not None and now - since > _WAIT_S:
                    raise TooManyRequests(
                        "the engine died while this request ran, so it is tried alone, and others have run for "
                        f"{_WAIT_S:g} s; try again later"
                    )
                if suspect is not None and not waiting:
                    self._next = name, now
                return False
            self._running[name] += 1
            if suspect is not None:
                self._alone, self._next = (name, now), None
            return True

    @contextmanager
    def _count(self, name: str) -> Iterator[None]:
        done = False
        try:
            yield
            done = True
        finally:
            with self._lock:
                if self.died():
                    self._record()  # and it stays among the running ones
                else:
                    self._running[name] -= 1
                    self._running += Counter()  # drops what is at zero
                    if self._alone is not None and self._alone[0] == name:
                        self._alone = None
                        if done:
                            self._clear(name)

    def _record(self) -> None:
        """Make every running request a suspect. None is removed once the engine is dead, so the first to notice sees all."""
        if self._recorded:
            return
        self._recorded = True
        alone, until = self._running.total() == 1, self._clock() + QUARANTINE_S
        with self._changing():
            for name in self._running:
                previous = self._suspects.pop(name, None)
                deaths = 1 + (previous.deaths if previous else 0)
                self._suspects[name] = _Suspect(deaths, until, guilty=alone and deaths > 1)
            for name in list(self._suspects)[:-_MOST]:
                del self._suspects[name]

    def _clear(self, name: str) -> None:
        if name in self._suspects:
            with self._changing():
                self._suspects.pop(name, None)

    def _follow(self) -> None:
        """Read the journal if it has changed. Cost otherwise: reading the file's time."""
        if self._journal is None or not self._journal.exists():
            return
        written = self._journal.stat().st_mtime_ns
        if written != self._read:
            records = json.loads(self._journal.read_bytes())
            self._suspects, self._read = {name: _Suspect(**record) for name, record in records.items()}, written

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the journal against other processes within the block, and write the suspects after it."""
        if self._journal is None:
            yield
            return
        with self._journal.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._follow()
            yield
            records = {name: asdict(suspect) for name, suspect in self._suspects.items()}
            atomic_write(self._journal, json.dumps(records).encode())
            self._read = self._journal.stat().st_mtime_ns


def died_by_itself(engine: Any, stopping: threading.Event) -> Callable[[], bool]:
    """Return a function that returns True once ``engine`` has ended before it was told to stop."""
    return lambda: engine.errored and not stopping.is_set()
