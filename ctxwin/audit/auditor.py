"""`Auditor`: the thread of an engine that audits answers while the engine is idle.

A window submits its answers (`WindowAudit.submit`); the auditor replays them later, or not at all: its queue is bounded, it
works only while the engine is otherwise idle and within its share of time, and it stops a replay as soon as a request
arrives. Engines of several tenants that share a model share the thread, never a replay or its evidence.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ctxwin.audit.evidence import EvidenceFile, Trial
from ctxwin.audit.harm import Floor, Part
from ctxwin.audit.options import Options
from ctxwin.audit.record import Decision
from ctxwin.audit.replay import EXACT, UNREPLAYABLE, Exchange, Finding, References, Replay, remembers, shadow
from ctxwin.audit.sampling import Sampler
from ctxwin.audit.strategies import STRATEGIES
from ctxwin.errors import AnswerStopped, UnsupportedModel
from ctxwin.hashing import digest
from ctxwin.store.lru import LRUCache
from ctxwin.window.idle_worker import POLL_S, IdleWorker, TimeAllowance
from ctxwin.window.lanes import choose
from ctxwin.window.protocols import ServedAnswer
from ctxwin.window.state import Conditioning

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.engines.segments import Segment
    from ctxwin.fidelity import Reference
    from ctxwin.window.choice import Choice
    from ctxwin.window.layout import Layout

log = logging.getLogger("ctxwin")
VARIABLE = "CTXWIN_AUDITS"
"""Environment variable; ``0``: nothing is audited in the background unless a `Fidelity` requests it by ``audit``."""
_MAX_INTERRUPTIONS = 3
_WINDOWS = 256
_DECIDED, _CHUNKS = 4096, 16_384
"""Windows of which is remembered whether trials follow them, and chunks that are remembered as computed."""
_HISTORY_DEPENDENT = ("survivor", "kept", "edited")
"""Strategies whose KV depends on how the window was served before, so that they are followed from the first answer on."""
_INTERRUPTED_SHARE, _PAUSE_S = 1 / 1000, 2.0
"""Share of the requests that may find a replay in progress, while answers wait to be audited; the pause beyond it."""


@dataclass
class Counts:
    """Totals of an auditor. The engine's own counters include its tokens, too.

    Attributes:
        audits: answers replayed.
        lost: scored answers among them that lost their value.
        undecided: scored answers about which exact answers disagree.
        texts: text among them.
        excess: sum of nats a token beyond the floor, over the text.
        trials: comparisons of strategies that are not promoted yet.
        stopped: replays interrupted by a request.
        dropped: answers that were never replayed.
        gone: answers whose KV was no longer in the store.
        tokens, seconds: of the engine.
    """

    audits: int = 0
    lost: int = 0
    undecided: int = 0
    texts: int = 0
    excess: float = 0.0
    trials: int = 0
    stopped: int = 0
    dropped: int = 0
    gone: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Job(ServedAnswer):
    """One answer to replay.

    Attributes:
        engine: of the answer.
        keys: store keys that each chunk was served from (`replay.keys_of`).
        exchange: question and answer.
        recent: earlier exchanges of the window, the latest first.
        computed: prompt tokens that exact serving computed for the layout.
        repeated: of these, tokens of chunks that had been computed before.
        is_trial_candidate: strategies are tried on it.
        is_audited: the answer itself is audited.
        done: called with the finding of an audit.
        interruptions: replays of it that a request interrupted; completed: strategies whose trials they completed.
    """

    engine: Engine
    keys: tuple[str, ...]
    exchange: Exchange
    recent: tuple[Exchange, ...]
    computed: int
    repeated: int
    is_trial_candidate: bool
    is_audited: bool
    done: Callable[[Finding], None]
    evidence: EvidenceFile | None
    forgettings: int
    interruptions: int = 0
    completed: set[str] = field(default_factory=set)


class Auditor(IdleWorker[Job]):
    """Audits the answers of one running model; see the module and `auditor_of`."""

    _name = "ctxwin-audits"

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.by_tenant: dict[str, Counts] = {}
        self._evidence: dict[tuple[str, str, Reference], EvidenceFile] = {}
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant, the least recently served first
        self._unable = False
        self._interruptions = 0.0
        self.sampler = Sampler(options.seed)
        self._allowance = TimeAllowance()
        self._shadows: LRUCache[tuple[str, dict[str, dict[str, Conditioning]]]] = LRUCache(_WINDOWS)
        self._chunks: LRUCache[None] = LRUCache(_CHUNKS)  # computed before, by tenant and chunk
        self._followed: LRUCache[bool] = LRUCache(_DECIDED)  # by window
        self._trial_tokens: dict[str, float] = {}  # that trials may still compute, by tenant

    @property
    def counts(self) -> Counts:
        """Totals over all tenants."""
        tenants = list(self.by_tenant.values())
        return Counts(**{f.name: sum(getattr(counts, f.name) for counts in tenants) for f in fields(Counts)})

    def counts_of(self, tenant: str) -> Counts:
        """Return the totals of one tenant, which the auditor keeps updating."""
        return self.by_tenant.setdefault(tenant, Counts())

    def evidence_of(self, engine: Engine, reference: Reference = "stricter") -> EvidenceFile:
        """Return the evidence of an engine's tenant for windows of ``reference``."""
        with self._wake:
            # One vLLM has several identities: with and without an adapter.
            key = engine.tenant, engine.spec.identity, reference
            if key not in self._evidence:
                self._evidence[key] = EvidenceFile.of(engine, reference, self.options)
            return self._evidence[key]

    def offer(self, job: Job) -> None:
        """Queue an answer to replay when the engine is idle."""
        if self._unable:
            return
        with self._wake:
            tenant = job.engine.tenant
            self._trial_tokens[tenant] = self._trial_tokens.get(tenant, 0.0) + self.options.share * job.repeated
            queue = self._waiting.setdefault(tenant, deque())
            queue.append(job)
            while len(queue) > self.options.queue:
                queue.popleft()
                self.counts_of(tenant).dropped += 1
            self._start()

    def count_repeated(self, tenant: str, computed: Sequence[Choice]) -> int:
        """Return the tokens of chunks that an answer computed though an earlier one had, in any window of the tenant."""
        keys = [(f"{tenant}/{choice.entry.chunk_id}", choice.entry.tokens) for choice in computed]
        with self._wake:
            repeated = sum(tokens for key, tokens in keys if key in self._chunks)
            for key, _ in keys:
                self._chunks.put(key, None, 1)
        return repeated

    def decisions(self, engine: Engine) -> tuple[Decision, ...]:
        """Return the decisions for an engine's tenant, oldest first."""
        return self.evidence_of(engine).record.decisions

    def _has_jobs(self) -> bool:
        return any(self._waiting.values())

    def _take(self) -> Job:
        tenant = next(t for t, queue in self._waiting.items() if queue)
        self._waiting.move_to_end(tenant)
        return self._waiting[tenant].popleft()

    def _perform(self, job: Job) -> None:
        try:
            self._wait_until_idle(job.engine)
            self._replay(job)
        except Exception:
            self.counts_of(job.engine.tenant).gone += 1
            log.exception("an audit of window %s failed; the window continues", job.window)

    def _wait_until_idle(self, engine: Engine) -> None:
        """Wait until the engine has been idle for a moment and audits are within their share of time.

        A request that finds a replay in progress waits for one of its steps. Only a small share of the requests may do so,
        which leaves the slowest hundredth unchanged; beyond that share replays pause.
        """
        last = math.inf
        while not self._holds:
            idle = engine.idle_s
            if idle < last:
                self._interruptions = max(0.0, self._interruptions - _INTERRUPTED_SHARE)
            if idle >= max(self.options.quiet_s, _PAUSE_S * (self._interruptions > 1)) and self._allowed_s(0.0) > 0:
                return
            last = idle
            time.sleep(POLL_S)

    def _allowed_s(self, spent: float) -> float:
        """Return the seconds that audits may still take after ``spent`` more."""
        seconds = self._allowance.add(-spent, self.options.share)
        return 1.0 if self.options.share >= 1 else seconds

    def _replay(self, job: Job) -> None:
        began = time.monotonic()
        replay = Replay(
            job.engine,
            lambda: job.engine.busy or self._holds > 0,
            lambda: job.forgettings == job.engine.repo.forgettings,
        )
        try:
            if job.is_audited:
                self._audit(replay, job)
                job = replace(job, is_audited=False)
            if job.evidence is not None and job.is_trial_candidate and self._follows(job):
                self._run_trials(replay, job, job.evidence)
        except AnswerStopped:
            self.counts_of(job.engine.tenant).stopped += 1
            self._interruptions += not self._holds
            interruptions = job.interruptions + (not self._holds)
            if interruptions < _MAX_INTERRUPTIONS:
                with self._wake:
                    self._waiting[job.engine.tenant].appendleft(replace(job, interruptions=interruptions))
            else:
                self.counts_of(job.engine.tenant).dropped += 1
        except UnsupportedModel as error:
            self._unable = True
            log.warning("answers are not audited: %s", error)
        except UNREPLAYABLE as error:
            self.counts_of(job.engine.tenant).gone += 1
            log.info("an answer of window %s is not audited: %s", job.window, error)
        finally:
            spent = time.monotonic() - began
            self._allowed_s(spent)
            self.counts_of(job.engine.tenant).tokens += replay.work.tokens
            self.counts_of(job.engine.tenant).seconds += spent

    def _follows(self, job: Job) -> bool:
        """Return True if trials follow a window: from its first answer, and until what they may compute is spent.

        A strategy whose KV depends on how the window was served before would be judged by less than it does if trials left
        answers out, so a window that is given up is not followed again.
        """
        if self.options.share >= 1:
            return True
        tenant, follows = job.engine.tenant, self._followed.get(job.window)
        allowed = self._trial_tokens.get(tenant, 0.0)
        if follows is None:
            follows = self._followed.get(job.parent or "") is not False  # a branch is followed as its parent
        if follows and allowed <= 0:
            log.debug(
                "no trials for window %s: they may compute %.0f %% of what reuse would have saved so far",
                job.window, 100 * self.options.share,
            )  # fmt: skip
        self._followed.put(job.window, follows and allowed > 0, 1)
        return follows and allowed > 0

    def _audit(self, replay: Replay, job: Job) -> None:
        replay.use_memos(job.memos)
        floor = Floor() if job.evidence is None else job.evidence.record.floor
        finding = replay.audit(job.state_after, job.fidelity, job.keys, job.exchange, floor)
        counts, harm = self.counts_of(job.engine.tenant), finding.harm
        counts.audits += 1
        if harm.kind == "text":
            counts.texts += 1
            counts.excess += max(0.0, harm.amount)
        else:
            counts.lost += harm.amount > 0
            counts.undecided += harm.undecided
        if job.evidence is not None and job.strategy is not None and finding.concerned:
            job.evidence.take([Trial(job.strategy, harm, finding.strict.kl, is_audit=True, unit=job.state.unit)])
        job.done(finding)

    def _run_trials(self, replay: Replay, job: Job, evidence: EvidenceFile) -> None:
        """Replay an exact answer, and recent questions, with every strategy that would have saved work."""
        trials: list[Trial] = []
        run, shadows = _TrialRun(replay, job, evidence, self.options), self._shadows_of(job)
        tokens_audited = replay.work.tokens
        question, unit = digest("asked", [p.chunk_id for p in job.state.placed], job.exchange.query), job.state.unit
        try:
            for name in evidence.candidates():
                layout = None if name in job.completed else run.build_layout(name, shadows.get(name, {}))
                if layout is None:
                    continue
                tokens_before = replay.work.tokens
                segments = replay.fill(layout)
                computed = replay.work.tokens - tokens_before + sum(c.recomputed_tokens for c in layout.choices)
                if (
                    any(c.lane == STRATEGIES[name].lane for c in layout.choices)
                    and evidence.accepts_question(question, unit)
                    and self.sampler.is_trial((evidence.record.binding, name), unit, question)
                ):
                    findings = run.score(layout, segments)
                    scored = [Trial(name, f.harm, f.strict.kl, unit=unit, question=question) for f in findings]
                    tokens = replay.work.tokens - tokens_before
                    scored[0] = replace(scored[0], computed=computed, exact_computed=job.computed, tokens=tokens)
                    trials += scored
                conditionings = {c.entry.id: c.conditioning if c.updates_entry else c.entry.kv for c in layout.choices}
                shadows[name] = {placement: kv for placement, kv in conditionings.items() if kv is not None}
                job.completed.add(name)
        finally:
            tenant = job.engine.tenant
            self._trial_tokens[tenant] = self._trial_tokens.get(tenant, 0.0) + tokens_audited - replay.work.tokens
            self.counts_of(tenant).trials += len(trials)
            evidence.take(trials)

    def _shadows_of(self, job: Job) -> dict[str, dict[str, Conditioning]]:
        """Return KV by strategy and placement, as a window served so would have it; a branch begins with its parent's.

        Behind another system prompt a window begins with none: what that leaves of its KV stands in its state.
        """
        system_prompt = job.state.system_prompt_key
        key, shadows = self._shadows.get(job.window) or ("", {})
        if key != system_prompt:
            key, inherited = self._shadows.get(job.parent or "") or ("", {})
            shadows = {name: dict(kv_by_id) for name, kv_by_id in inherited.items()} if key == system_prompt else {}
            self._shadows.put(job.window, (system_prompt, shadows), 1)
        return shadows


@dataclass
class _TrialRun:
    """Trials of strategies on one answer."""

    replay: Replay
    job: Job
    evidence: EvidenceFile
    options: Options

    def build_layout(self, name: str, conditionings: Mapping[str, Conditioning]) -> Layout | None:
        """Return the layout that a strategy would have served behind ``conditionings``, None where that is no trial."""
        strategy, job = STRATEGIES[name], self.job
        forbidden, is_stored = job.fidelity.advanced.forbid, job.engine.repo.contains
        if strategy.lane in forbidden or not self.evidence.accepts_trial(name, job.state.unit):
            return None
        fidelity = strategy.fidelity.with_advanced(forbid=(*strategy.fidelity.advanced.forbid, *forbidden))
        state, visible = shadow(job.state, conditionings)
        planned = choose(state, fidelity, lambda key: visible(key) and is_stored(key), engine=job.engine)
        # Before its first edit a window is served alike in lane ``edited``.
        followed = name in _HISTORY_DEPENDENT and (name != "edited" or conditionings)
        if not followed and all(c.lane != strategy.lane for c in planned):
            return None
        return self.replay.build_layout(state, fidelity, visible=visible)

    def score(self, layout: Layout, segments: Sequence[Segment]) -> list[Finding]:
        """Return what the answers over a layout lose."""
        reference = self.job.fidelity.advanced.reference if remembers(layout) else "window"
        floor, rows = self.evidence.record.floor, self.replay.score(segments, [r.exchange for r in self.references])
        pairs = zip(self.references, rows, strict=True)
        return [exact.compare(scores, reference, floor, partial(exact.value_over, segments)) for exact, scores in pairs]

    @cached_property
    def references(self) -> list[References]:
        """Exact answers of the same questions. On the first units also how far they are apart is measured."""
        exact = self.replay.fill(self.replay.build_layout(self.job.state_after, EXACT))
        exchanges = self._exchanges(exact)
        layouts = self.replay.exact_layouts(self.job.state_after, pieces="placed")
        references = [
            References(self.replay, exchange, layouts, {"placed": rows}, own=True)
            for exchange, rows in zip(exchanges, self.replay.score(exact, exchanges), strict=True)
        ]
        parts: tuple[tuple[Part, str], ...] = (("cut", "cut"), ("references", "stream"))
        for part, name in parts[: 2 if self.job.fidelity.advanced.reference == "stricter" else 1]:
            distance = references[0].distance(name) if self.evidence.lacks(part, self.job.state.unit) else None
            if distance is not None:
                self.evidence.measure(part, self.job.state.unit, *distance)
        return references

    def _exchanges(self, exact: Sequence[Segment]) -> list[Exchange]:
        """Return the question that was asked, and recent ones whose answer is unchanged.

        A question about an evicted chunk has no answer here that could be harmed: asked again, it is answered at random. Exact
        serving alone decides which questions are used, before any strategy is tried.
        """
        exchanges, limit = [self.job.exchange], self.options.questions
        for recent in self.job.recent[: 2 * (limit - 1)]:
            if len(exchanges) < limit and recent.query not in {e.query for e in exchanges}:
                repeated = self.replay.answer(exact, recent.query, recent.max_tokens)
                exchanges += [repeated] if repeated.ids == recent.ids else []
        return exchanges


def auditor_of(engine: Engine, options: Options | None = None) -> Auditor:
    """Return the auditor of an engine and of all that share its model. ``options`` replaces those in force.

    By default ``CTXWIN_AUDIT_SHARE`` and ``CTXWIN_AUDIT_RATE`` set ``share`` and ``rate`` of `Options`; raises ValueError if they
    are not numbers from 0 to 1.
    """
    auditor = Auditor.of(engine, lambda: Auditor(options or Options.from_environment()))
    if options is not None and auditor.options is not options:
        auditor.options, auditor.sampler = options, Sampler(options.seed)
        auditor._evidence.clear()
    return auditor


def enabled() -> bool:
    """Return True if strategies are tried in the background."""
    return os.environ.get(VARIABLE, "1") != "0"
