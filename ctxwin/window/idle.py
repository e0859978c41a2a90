"""Prefill while the engine idles: the KV that the next ask would compute is computed and stored ahead of it.

A window submits each version (`IdlePrefill.submit`). One thread per running model, the `Prefiller`, takes such a version once
the engine has been idle for a moment, and computes chunk by chunk what is missing, as long as its prefix is exact. It writes to
the store only: the ask finds the KV there by its provenance, so neither the window's state nor its writer is concerned.
A forward in progress is given up as soon as a request waits for the engine.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxwin.errors import AnswerStopped
from ctxwin.window.assembly import Assembly
from ctxwin.window.layout import Layout, Work
from ctxwin.window.state import State

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.fidelity import Fidelity

_QUIET_S, _LONGEST_QUIET_S = 0.05, 2.0
"""Seconds that an engine must be idle before a job begins: the first try, and after many interruptions."""
_POLL_S = 0.02
_SHARE = 0.5
"""Largest share of an engine's time, and of the tokens of a window's answers that may be computed ahead for nothing."""
_log = logging.getLogger("ctxwin")


@dataclass
class PrefillCounts:
    """Totals of the work ahead of a window's asks.

    Attributes:
        tokens: computed ahead.
        used: of these, tokens of chunks that the next answer was then served.
        missed: of these, tokens that no answer was served: the window was edited in another way, or closed.
        interrupted: forwards given up because a request waited or the window was edited; they are not in ``tokens``.
        failed: versions given up after an error, which is logged.
    """

    tokens: int = 0
    used: int = 0
    missed: int = 0
    interrupted: int = 0
    failed: int = 0


@dataclass(eq=False)
class _Job:
    """One version of a window to compute ahead.

    Attributes:
        quiet_s: seconds that the engine must have been idle.
        cancelled: give up the forward in progress; last: begin no further one.
        place: index of the chunk in progress; began: when its forward began.
    """

    window: IdlePrefill
    state: State
    fidelity: Fidelity
    quiet_s: float = _QUIET_S
    cancelled: bool = False
    last: bool = False
    place: int | None = None
    began: float = 0.0

    def stopped(self) -> bool:
        """Return True once the forward in progress is to be given up."""
        return self.cancelled or self.window.assembly.engine.busy

    def serves(self, state: State) -> bool:
        """Return True if the chunk in progress follows the same chunks in ``state``."""

        def prefix(of: State) -> list[tuple[str, bool]]:
            return [(p.id, p.conditioned) for p in of.placed[: (self.place or 0) + 1]]

        return self.place is not None and prefix(state) == prefix(self.state)

    def worth_joining(self) -> bool:
        """Return True if what was spent on the forward in progress is more than the request of its own that it takes."""
        overhead = self.window.assembly.prices.request_ms / 1e3
        return self.place is not None and time.monotonic() - self.began > overhead


@dataclass(eq=False)
class IdlePrefill:
    """Work ahead of one window's asks.

    Attributes:
        assembly: of the engine; apart from the window's own, which another thread uses.
        pending: tokens computed ahead that no answer has been asked since, by store key.
        reserved: tokens of the last question and its answer: a window without room for as many is about to slide.
    """

    assembly: Assembly
    counts: PrefillCounts = field(default_factory=PrefillCounts)
    pending: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    answered: int = 0

    def submit(self, state: State, fidelity: Fidelity) -> None:
        """Compute ``state`` ahead instead of an earlier version, unless it is about to slide or too much was for nothing."""
        unlikely = state.tokens + self.reserved > state.budget  # it is about to slide
        wasteful = self.counts.missed > state.budget + _SHARE * self.answered
        prefiller = prefiller_of(self.assembly.engine)
        if not state.placed or unlikely or wasteful:
            prefiller.cancel(self)
        else:
            prefiller.submit(_Job(self, state, fidelity))

    def give_way(self) -> None:
        """End the work on this window for an ask: wait for the forward in progress where that is cheaper than another one."""
        prefiller_of(self.assembly.engine).cancel(self, join=True)

    def served(self, layout: Layout, computed: int, reserved: int) -> tuple[int, int]:
        """Count an answer; return the tokens that were computed ahead and served to it, and those computed for nothing."""
        resident = {c.conditioning.span for c in layout.choices if not c.compute}
        pending, self.pending = self.pending, {}
        tokens_by_key = list(pending.items())
        used = sum(tokens for key, tokens in tokens_by_key if key in resident)
        missed = sum(tokens for key, tokens in tokens_by_key if key not in resident)
        self.counts.used += used
        self.counts.missed += missed
        self.answered += used + computed
        self.reserved = reserved
        return used, missed

    def close(self) -> None:
        """End the work on this window, and count what was for nothing. No thread runs for it afterwards."""
        prefiller_of(self.assembly.engine).cancel(self, wait=True)
        self.counts.missed += self.pending_tokens
        self.pending = {}

    @property
    def pending_tokens(self) -> int:
        """Tokens computed ahead since the last answer."""
        return sum(list(self.pending.values()))


class Prefiller:
    """The thread that computes ahead on one running model, while there is something to compute."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[IdlePrefill, _Job] = OrderedDict()
        self._current: _Job | None = None
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._holds = 0
        self._budget_s, self._clock = 1.0, time.monotonic()

    def submit(self, job: _Job) -> None:
        """Queue a version of a window in place of an earlier one. A forward that this version needs, too, goes on."""
        with self._wake:
            current = self._current
            if current is not None and current.window is job.window:
                current.last = True
                current.cancelled = current.cancelled or not current.serves(job.state)
            self._jobs[job.window] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ctxwin-prefill", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def cancel(self, window: IdlePrefill, *, join: bool = False, wait: bool = False) -> None:
        """Drop a window's job, and give up its forward in progress.

        Args:
            join: wait for the forward in progress to end where that is cheaper than to begin it again.
            wait: until the forward has been given up, and the thread has ended if nothing else is queued.
        """
        with self._wake:
            self._jobs.pop(window, None)
            current = self._current
            if current is not None and current.window is window:
                current.last = True
                joined = join and current.worth_joining()
                current.cancelled = current.cancelled or not joined
                if joined or wait:
                    self._wake.wait_for(lambda: self._current is not current)
            self._wake.notify_all()
            thread = self._thread
            if wait and thread is not None:
                self._wake.wait_for(lambda: self._thread is not thread or self._jobs or self._current is not None)
                thread = thread if self._thread is not thread else None
        if wait and thread is not None:
            thread.join()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued. Returns False after ``timeout`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs and self._current is None, timeout)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Suspend all jobs inside the block, which begins once the forward in progress has been given up."""
        with self._wake:
            self._holds += 1
            if self._current is not None:
                self._current.cancelled = True
            self._wake.wait_for(lambda: self._current is None)
        try:
            yield
        finally:
            with self._wake:
                self._holds -= 1
                self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._current = None
                self._wake.notify_all()
                while self._current is None:
                    if not self._jobs:
                        self._thread = None
                        self._wake.notify_all()
                        return
                    window, job = next(iter(self._jobs.items()))
                    if self._holds or not self._idle(job):
                        self._jobs.move_to_end(window)
                        self._wake.wait(_POLL_S)
                    else:
                        self._current = self._jobs.pop(window)
            began = time.monotonic()
            try:
                self._work(job)
            except AnswerStopped:
                window.counts.interrupted += 1
                self._retry(job)
            except Exception as error:
                window.counts.failed += 1
                _log.warning("computing ahead of a window's next ask failed, the window continues: %s", error)
            self._budget_s -= time.monotonic() - began

    def _idle(self, job: _Job) -> bool:
        """Return True if a job may begin. An engine that cannot be asked fails in the job, where that is counted."""
        try:
            return job.window.assembly.engine.idle_s >= job.quiet_s and self._allowance() > 0
        except Exception:
            return True

    def _retry(self, job: _Job) -> None:
        """Queue a job again that a request has interrupted, behind a longer pause each time."""
        with self._wake:
            if not job.last and not job.cancelled:
                retried = _Job(job.window, job.state, job.fidelity, min(2 * job.quiet_s, _LONGEST_QUIET_S))
                self._jobs.setdefault(job.window, retried)

    def _allowance(self) -> float:
        """Return the seconds that may still be spent: they accrue at `_SHARE`, up to one."""
        now = time.monotonic()
        self._budget_s = min(1.0, self._budget_s + (now - self._clock) * _SHARE)
        self._clock = now
        return self._budget_s

    def _work(self, job: _Job) -> None:
        window, assembly = job.window, job.window.assembly
        work = Work(background=True, stopped=job.stopped)
        tokens = 0
        try:
            layout = assembly.build_layout(job.state, job.fidelity, work)
            formed = [c.conditioning.span for c in layout.choices if c.form_canonical]
            if formed:
                window.pending[formed[0]] = tokens = work.tokens
            for i, choice in enumerate(layout.choices):
                if not choice.conditioning.exact or job.last:
                    break
                if choice.compute:
                    if job.stopped():
                        raise AnswerStopped("the engine is wanted for other work")
                    job.began, job.place = time.monotonic(), i
                    layout = assembly.compute_chunk(job.state, layout, i, work)
                    window.pending[choice.conditioning.span] = work.tokens - tokens
                    tokens = work.tokens
        finally:
            window.counts.tokens += work.tokens
            window.counts.missed += work.tokens - tokens  # in front of a forward that was given up


_prefillers: weakref.WeakKeyDictionary[Any, Prefiller] = weakref.WeakKeyDictionary()
_opening = threading.Lock()


def prefiller_of(engine: Engine) -> Prefiller:
    """Return the prefiller of an engine and of all that share its model."""
    with _opening:
        return _prefillers.setdefault(engine.shared, Prefiller())


@atexit.register
def _stop_all() -> None:
    """Stop every prefiller: a thread that runs a model while the interpreter shuts down would crash it."""
    for prefiller in list(_prefillers.values()):
        with prefiller._wake:
            prefiller._holds += 1
            if prefiller._current is not None:
                prefiller._current.cancelled = True
            prefiller._wake.wait_for(lambda prefiller=prefiller: prefiller._current is None, _LONGEST_QUIET_S)  # type: ignore[misc]
