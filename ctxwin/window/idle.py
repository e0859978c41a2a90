"""Prefill while the engine idles: the KV that the next ask would compute is computed and stored ahead of it.

A window submits each version (`IdlePrefill.submit`); an exact window that is expected to slide before its next question
(`ctxwin.window.prediction`) submits what will be left of it. One thread per running model, the `Prefiller`, takes such a version
once the engine has been idle for a moment, and computes chunk by chunk what is missing, as long as its prefix is exact. It writes
to the store only: the ask finds the KV there by its provenance, so neither the window's state nor its writer is concerned, and a
wrong prediction costs tokens and never an answer.
A window that corrects survivors (`Fidelity.forms_removals`) submits what a slide will leave, too, of which removal patches are
stored: what survives lacks them of a re-prefill of what is left (Kamera, section 5, "Sliding-window survival"; eq. 2). As it
stands, its patches are formed anew where their antecedents have changed (appendix D, "The cheapest correct refresh").
A forward in progress is given up as soon as a request waits for the engine.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from ctxwin.errors import AnswerStopped
from ctxwin.fidelity import Fidelity
from ctxwin.window import edits
from ctxwin.window.assembly import Assembly
from ctxwin.window.choice import Choice
from ctxwin.window.idle_worker import IDLE_SHARE, IdleWorker, TimeAllowance
from ctxwin.window.in_place import compute_chunk
from ctxwin.window.lanes import choose
from ctxwin.window.layout import Layout, Work
from ctxwin.window.prediction import SlidePredictor, follows, survivors
from ctxwin.window.recurrent import preceding_states
from ctxwin.window.state import Conditioning, State, patch_key

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.kv.layout import SpanKV

_QUIET_S, _LONGEST_QUIET_S = 0.05, 2.0
"""Seconds that an engine must be idle before a job begins: the first try, and after many interruptions."""
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
        hits: asks of a window that had lost the very chunks that were predicted, where KV was computed ahead for that.
        misses: asks of such a window that had lost others, or none.
    """

    tokens: int = 0
    used: int = 0
    missed: int = 0
    interrupted: int = 0
    failed: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def predictions(self) -> int:
        """Slides that were predicted, the one that is still open apart."""
        return self.hits + self.misses


@dataclass(eq=False)
class _Job:
    """One version of a window to compute ahead.

    Attributes:
        quiet_s: seconds that the engine must have been idle.
        expected: True for a version that is only expected, False for the window as it stands.
        cancelled: give up the forward in progress; last: begin no further one.
        place: index of the chunk in progress; began: when its forward began.
        noted: tokens that are in ``window.pending``.
    """

    window: IdlePrefill
    state: State
    fidelity: Fidelity
    expected: bool = False
    quiet_s: float = _QUIET_S
    cancelled: bool = False
    last: bool = False
    place: int | None = None
    began: float = 0.0
    noted: int = 0

    def stopped(self) -> bool:
        """Return True once the forward in progress is to be given up."""
        return self.cancelled or self.window.assembly.engine.busy

    def begin(self, place: int) -> None:
        """Begin the forward of a chunk. Raises AnswerStopped where it is to be given up."""
        if self.stopped():
            raise AnswerStopped("the engine is wanted for other work")
        self.began, self.place = time.monotonic(), place

    def note_computed(self, key: str, work: Work) -> None:
        """Count the tokens that were computed since the last call for KV that is now stored."""
        pending = self.window.pending
        pending[key] = pending.get(key, 0) + work.tokens - self.noted  # what was forgotten may be formed a second time
        self.noted = work.tokens
        if self.expected and not self.cancelled:
            self.window.slid = survivors(self.state, ())

    def serves(self, state: State) -> bool:
        """Return True if the chunk in progress follows the same chunks in ``state``."""
        return self.place is not None and follows(state, survivors(self.state, ())[: self.place + 1])

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
        answered: tokens of chunks and questions that answers computed, or found computed ahead.
        slid: chunks of the expected version for which KV was computed since the last answer.
        spent_s: seconds of work since the last answer.
        spans: exact KV of that version by store key, until all removal patches that need it are formed.
    """

    assembly: Assembly
    counts: PrefillCounts = field(default_factory=PrefillCounts)
    pending: dict[str, int] = field(default_factory=dict)
    reserved: int = 0
    answered: int = 0
    predictor: SlidePredictor = field(default_factory=SlidePredictor)
    slid: Sequence[tuple[str, bool]] = ()
    spent_s: float = 0.0
    spans: dict[str, SpanKV] = field(default_factory=dict)

    def submit(self, state: State, fidelity: Fidelity, *, answered: bool = False) -> None:
        """Compute ``state`` ahead instead of an earlier version, or what a slide is expected to leave of it, unless too much was
        for nothing. ``answered``: True right behind an answer of it, when there is nothing to compute but for a slide."""
        self.predictor.exact = fidelity.mode == "exact"
        slides = self.predictor.exact or fidelity.forms_removals  # else survivors may be served as they are
        if answered and slides:
            self.predictor.begin(state)
        self.predictor.note_lazy(state)
        leaving = self.predictor.leaving(state) if slides else []
        unlikely = state.tokens + self.reserved > state.budget  # it is about to slide, none knows how
        wasteful = self.counts.missed + self.pending_tokens > state.budget + IDLE_SHARE * self.answered
        prefiller = prefiller_of(self.assembly.engine)
        if wasteful or len(leaving) == len(state.placed) or (not leaving and (unlikely or answered)):
            prefiller.cancel(self)
        elif leaving:
            expected, _ = edits.apply_if_broken(state, edits.evict(state, leaving))
            prefiller.submit(_Job(self, expected, fidelity, expected=True))
        else:
            prefiller.submit(_Job(self, state, fidelity))

    def give_way(self, state: State) -> None:
        """End the work on this window for an ask of ``state``: wait for the forward in progress where that serves it, and is
        cheaper than another one."""
        prefiller_of(self.assembly.engine).cancel(self, join=state)

    def served(self, state: State, layout: Layout, computed: int, reserved: int) -> tuple[int, int]:
        """Count an answer of ``state``; return the tokens that were computed ahead and served to it, and those computed for
        nothing. What was computed for a slide is not, as long as there was no edit."""
        loaded = [c.conditioning for c in layout.choices if not c.compute]
        resident = {key for conditioning in loaded for key in (conditioning.span, conditioning.patch)}
        pending, self.pending, self.spans = self.pending, {}, {}
        tokens_by_key = list(pending.items())
        used = sum(tokens for key, tokens in tokens_by_key if key in resident)
        others = {key: tokens for key, tokens in tokens_by_key if key not in resident}
        if self.predictor.unchanged(state):
            self.pending, others = others, {}
        else:
            self._judge(state)
        missed = sum(others.values())
        self.counts.used += used
        self.counts.missed += missed
        self.answered += used + computed
        self.reserved = reserved
        self.predictor.end(state, reserved)
        if used:  # what was served would have taken that time anyway
            engine = self.assembly.engine
            prefiller_of(engine).refund(engine.tenant, self.spent_s * used / (used + missed))
        self.spent_s = 0.0
        return used, missed

    def _judge(self, state: State | None) -> None:
        """Count the open prediction, if there is one, as a hit where ``state`` begins with what it left."""
        if self.slid:
            hit = state is not None and follows(state, self.slid)
            self.counts.hits += hit
            self.counts.misses += not hit
        self.slid = ()

    def forget(self) -> None:
        """Drop predictions and KV that may contain a forgotten chunk."""
        self.predictor.forget()
        self.assembly.forget()
        self.spans = {}

    def close(self) -> None:
        """End the work on this window, and count what was for nothing. No thread runs for it afterwards."""
        prefiller_of(self.assembly.engine).cancel(self, wait=True)
        self._judge(None)
        self.counts.missed += self.pending_tokens
        self.pending, self.spans = {}, {}

    @property
    def pending_tokens(self) -> int:
        """Tokens computed ahead since the last answer."""
        return sum(list(self.pending.values()))


class Prefiller(IdleWorker[_Job]):
    """Computes ahead on one running model. Each tenant has an allowance of its own."""

    _name = "ctxwin-prefill"

    def __init__(self) -> None:
        super().__init__()
        self._jobs: OrderedDict[IdlePrefill, _Job] = OrderedDict()
        self._allowances: defaultdict[str, TimeAllowance] = defaultdict(TimeAllowance)

    def submit(self, job: _Job) -> None:
        """Queue a version of a window in place of an earlier one. A forward that this version needs, too, goes on."""
        with self._wake:
            current = self._current
            if current is not None and current.window is job.window:
                current.last = True
                current.cancelled = current.cancelled or not current.serves(job.state)
            self._jobs[job.window] = job
            self._start()

    def refund(self, tenant: str, seconds: float) -> None:
        """Give a tenant time back that was not spent for nothing."""
        with self._wake:
            self._allowances[tenant].add(seconds)

    def cancel(self, window: IdlePrefill, *, join: State | None = None, wait: bool = False) -> None:
        """Drop a window's job, and give up its forward in progress.

        Args:
            join: wait for the forward in progress to end where this state needs it, and that is cheaper than to begin it again.
            wait: until the forward has been given up, and the thread has ended if nothing else is queued.
        """
        with self._wake:
            self._jobs.pop(window, None)
            current = self._current
            if current is not None and current.window is window:
                current.last = True
                joined = join is not None and current.serves(join) and current.worth_joining()
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

    def _give_up(self, job: _Job) -> None:
        job.cancelled = True

    def _has_jobs(self) -> bool:
        return bool(self._jobs)

    def _take(self) -> _Job | None:
        job = next(filter(self._may_begin, self._jobs.values()), None)  # the oldest: its window is asked first
        return None if job is None else self._jobs.pop(job.window)

    def _perform(self, job: _Job) -> None:
        window, work = job.window, Work(background=True, stopped=job.stopped)
        began = time.monotonic()
        try:
            _compute(job, work)
        except AnswerStopped:
            window.counts.interrupted += 1
            with self._wake:
                if not job.last and not job.cancelled:  # again, behind a longer pause each time
                    again = replace(job, quiet_s=min(2 * job.quiet_s, _LONGEST_QUIET_S), place=None, noted=0)
                    self._jobs.setdefault(window, again)
        except Exception as error:
            window.counts.failed += 1
            _log.warning("computing ahead of a window's next ask failed, the window continues: %s", error)
        took = time.monotonic() - began
        with self._wake:
            self._allowances[window.assembly.engine.tenant].add(-took)
            window.spent_s += took
            window.counts.tokens += work.tokens
            window.counts.missed += work.tokens - job.noted  # in front of a forward that was given up

    def _may_begin(self, job: _Job) -> bool:
        """Return True if a job may begin. An engine that cannot be asked fails in the job, where that is counted."""
        try:
            engine = job.window.assembly.engine
            return engine.idle_s >= job.quiet_s and self._allowances[engine.tenant].add(0) > 0
        except Exception:
            return True


def _compute(job: _Job, work: Work) -> None:
    """Compute what a version of a window lacks, chunk by chunk."""
    assembly = job.window.assembly
    if job.fidelity.forms_removals and _form_removals(job, work):
        return
    layout = assembly.build_layout(job.state, job.fidelity, work)
    formed = [c.conditioning.span for c in layout.choices if c.form_canonical]
    if formed:
        job.note_computed(formed[0], work)
    for i, choice in enumerate(layout.choices):
        if not choice.conditioning.exact or job.last:
            break
        if choice.compute:
            job.begin(i)
            layout = compute_chunk(assembly, job.state, layout, i, work)
            job.note_computed(choice.conditioning.span, work)


def _form_removals(job: _Job, work: Work) -> bool:
    """Compute a version exactly, and form the removal patches that serve it. Exact KV is stored where no patch is smaller.

    Returns False where no patch is missing. Of a version that is only expected nothing is computed but for patches.
    """
    window, assembly, fidelity = job.window, job.window.assembly, job.fidelity
    choices = choose(job.state, fidelity, cache(assembly.has), assembly.prices, assembly.memo.memos, assembly.engine)
    needed = {i: c.conditioning for i, c in enumerate(choices) if c.compute and not _has_patch(assembly, c, fidelity)}
    removals = [i for i, here in needed.items() if here.base is not None]
    if not removals:
        return job.expected
    last = removals[-1] if job.expected else max(needed)
    layout = assembly.build_layout(job.state, Fidelity("exact"), work)
    keys = enumerate((choice.conditioning.span for choice in layout.choices), start=1)
    computed = {i: window.spans[key] for i, key in keys if key in window.spans}
    layout = replace(layout, ahead={**computed, **layout.ahead})
    for i, choice in enumerate(layout.choices[: last + 1]):
        if not choice.conditioning.exact or job.last:
            return True
        job.begin(i)
        if choice.compute:
            layout = compute_chunk(assembly, job.state, layout, i, work, store=False)
        span = layout.segments[i + 1].span
        assert span is not None, "an exact prefix has KV"
        window.spans[choice.conditioning.span] = span
        if i in needed:
            job.note_computed(_form_removal(assembly, layout, i, needed[i], fidelity), work)
    window.spans = {}
    return True


def _has_patch(assembly: Assembly, choice: Choice, fidelity: Fidelity) -> bool:
    """Return True if the removal patch of a chunk is stored: then it is computed because that takes less time."""
    here = choice.conditioning
    return here.base is not None and assembly.has(patch_key(here.provenance, here.base, fidelity.patch_name))


def _form_removal(assembly: Assembly, layout: Layout, index: int, here: Conditioning, fidelity: Fidelity) -> str:
    """Store the exact KV of a chunk as its next ask would, as ``here``; return the store key."""
    segment, key = layout.segments[index + 1], None
    assert segment.span is not None, "it is computed"
    if here.base is not None and here.antecedents:
        front = preceding_states(layout, {}, index) if assembly.engine.spec.kv.recurrent else None
        absorbed = layout.absorbed(index)
        key = assembly.form(segment.span, here.base, here.provenance, segment.encoded, fidelity, absorbed, front)
    if key is None:
        key = layout.choices[index].conditioning.span
        assembly.put_chunk(layout, index, segment.span, layout.choices[index].conditioning)
    return key


def prefiller_of(engine: Engine) -> Prefiller:
    """Return the prefiller of an engine and of all that share its model."""
    return Prefiller.of(engine, Prefiller)
