"""`Auditor`: the one thread of an engine that audits answers while nobody waits.

A window hands over what it answered (`WindowTrust.answered`); the auditor replays it later, or not at all: its queue is bounded,
it works only while the engine has nothing else to do and within its share of time, and it ends a replay the moment a request
arrives. Engines of several tenants that share a model share the thread, never a replay or a ledger.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ctxwin.errors import AnswerStopped, UnsupportedModel
from ctxwin.trust.evidence import WAYS, Decision, Ledger, Trial
from ctxwin.trust.replay import EXACT, GONE, Exchange, Finding, Replay, both_needed, deciding, diverge, shadow
from ctxwin.window.lanes import Before, choose
from ctxwin.window.state import Conditioning, State

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine
    from ctxwin.fidelity import Fidelity, Reference

log = logging.getLogger("ctxwin")
VARIABLE = "CTXWIN_AUDITS"
"""Set to ``0``, nothing is audited in the background unless a `Fidelity` asks for it by ``audit``."""
_TRIES = 3
_WINDOWS = 256
_LINGER_S = 2.0
_EVOLVE = ("survivor", "kept")
"""Ways whose KV depends on how the window was served before, so that they are followed from the first answer on."""
_POLL_S = 0.02
"""Each look at an engine that serves costs a request beside it half a millisecond of processor time."""
_MEETINGS, _PAUSE_S = 1 / 1000, 2.0
"""Of the requests that come while answers wait to be audited, the share that may find a replay under way; a pause."""
_FORGETTING = threading.Lock()
_forgets: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Options:
    """How an engine's windows earn trust.

    Attributes:
        budget: largest share of harmed answers for a way to be promoted.
        level: of the anytime-valid bound on it.
        rate: share of the answers of promoted ways that go on being audited; all of them for a while after one that was harmed.
        questions: most questions put to each replayed layout while ways are tried: 1 is the one that was asked, more are recent
            ones of the same window, too, whose exact answer is still what it was. Each is a trial of its own. More is sooner
            and kinder than real asks are: what has an answer that left cannot be harmed (`evals/studies/trust.py` measures it).
        share: most of the engine's time that audits may take, over minutes.
        quiet_s: seconds that the engine must have been idle before an audit begins: between requests that come one behind the
            other nothing does.
        queue: most answers of a tenant that wait to be audited; the oldest are dropped.
    """

    budget: float = 0.01
    level: float = 0.95
    rate: float = 0.02
    questions: int = 2
    share: float = 0.25
    quiet_s: float = 0.05
    queue: int = 8

    def __post_init__(self) -> None:
        for name in ("budget", "level"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("rate", "share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.quiet_s < math.inf:
            raise ValueError(f"quiet_s must be >= 0 and finite, got {self.quiet_s}")
        for name in ("questions", "queue"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an int >= 1, got {getattr(self, name)!r}")


@dataclass
class Counts:
    """What an auditor did. Tokens went through forwards of the engine, whose own counters have them, too.

    Attributes:
        audits: answers replayed; harmed: of those served approximately, answers that a re-prefill would have given otherwise.
        trials: comparisons of ways that are not promoted yet.
        stopped: replays that gave way to a request; dropped: answers that were never replayed; gone: their KV had left.
        tokens, seconds: of the engine.
    """

    audits: int = 0
    harmed: int = 0
    trials: int = 0
    stopped: int = 0
    dropped: int = 0
    gone: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """One answer to replay.

    Attributes:
        engine, window: whose it is.
        before, after: the window's state when it was asked, and once what was learnt was settled.
        earlier: how its chunks were served before.
        fidelity: it was served with; way: the promoted one it stands for, if any.
        keys: what each chunk was served from (`replay.keys_of`).
        exchange: question and answer; recent: earlier ones of the window, the latest first.
        computed: prompt tokens that exact serving computed for the layout.
        trying: whether ways are tried on it; auditing: whether the answer itself is audited.
        done: told what an audit found.
    """

    engine: Engine
    window: str
    parent: str | None
    before: State
    after: State
    earlier: OrderedDict[str, Before]
    fidelity: Fidelity
    way: str | None
    keys: tuple[str, ...]
    exchange: Exchange
    recent: tuple[Exchange, ...]
    computed: int
    trying: bool
    auditing: bool
    done: Callable[[Finding], None]
    ledger: Ledger | None
    forgets: int
    tries: int = 0


class Auditor:
    """See the module. One for each running model: `auditor_of`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.by_tenant: dict[str, Counts] = {}
        self._ledgers: dict[tuple[str, str, Reference], Ledger] = {}
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant, who was served longest ago first
        self._wake = threading.Condition()
        self._running = self._working = False
        self._unable = False
        self._held = 0
        self._met = 0.0
        self._shares: dict[tuple[str, float], float] = {}
        self._budget_s, self._clock = 1.0, time.monotonic()
        self._shadows: OrderedDict[str, dict[str, dict[str, Conditioning]]] = OrderedDict()

    @property
    def counts(self) -> Counts:
        """What was done for all tenants together."""
        every = list(self.by_tenant.values())
        return Counts(**{f.name: sum(getattr(one, f.name) for one in every) for f in fields(Counts)})

    def counted(self, tenant: str) -> Counts:
        """What was done for one tenant; grows."""
        return self.by_tenant.setdefault(tenant, Counts())

    def due(self, tenant: str, rate: float) -> bool:
        """Whether an answer is to be audited where this share of them is, over all windows of a tenant."""
        with self._wake:
            share = self._shares.get((tenant, rate), 0.0) + rate
            due = share >= 1 - 1e-9
            self._shares[tenant, rate] = share - due
            return due

    def ledger(self, engine: Engine, reference: Reference = "stricter") -> Ledger:
        """The evidence of an engine's tenant, as windows of ``reference`` count it: ``stricter`` and ``window`` are one."""
        by = "stricter" if reference == "window" else reference
        with self._wake:
            key = engine.tenant, engine.spec.identity, by  # of one vLLM, with and without an adapter
            if key not in self._ledgers:
                options = self.options
                self._ledgers[key] = Ledger.of(engine, by, budget=options.budget, level=options.level)
            return self._ledgers[key]

    def offer(self, job: Job) -> None:
        """Takes an answer to replay when there is time."""
        if self._unable:
            return
        with self._wake:
            queue = self._waiting.setdefault(job.engine.tenant, deque())
            queue.append(job)
            while len(queue) > self.options.queue:
                queue.popleft()
                self.counted(job.engine.tenant).dropped += 1
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="ctxwin-audits", daemon=True).start()
            self._wake.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is left to replay; False after ``timeout`` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._working and not any(self._waiting.values()), timeout)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing is replayed inside it, from the moment that what is under way has given way."""
        with self._wake:
            self._held += 1
            self._wake.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with self._wake:
                self._held -= 1
                self._wake.notify_all()

    def decisions(self, engine: Engine) -> tuple[Decision, ...]:
        """What was decided for an engine's tenant, oldest first."""
        return self.ledger(engine).record.decisions

    def _run(self) -> None:
        while True:
            with self._wake:
                self._working = False
                self._wake.notify_all()
                if not self._wake.wait_for(lambda: not self._held and any(self._waiting.values()), _LINGER_S):
                    if self._held:
                        continue
                    self._running = False
                    return
                tenant = next(t for t, queue in self._waiting.items() if queue)
                self._waiting.move_to_end(tenant)
                job = self._waiting[tenant].popleft()
                self._working = True
            try:
                self._idle(job.engine)
                self._replay(job)
            except Exception:
                self.counted(job.engine.tenant).gone += 1
                log.exception("an audit of window %s failed; the window goes on", job.window)

    def _idle(self, engine: Engine) -> None:
        """Waits until nobody has waited for the engine for a moment, and audits are within their share of time.

        A request that finds a replay under way waits for a step of it, so of those that come only a few may: that they leave
        the slowest hundredth as it is. Behind these it takes a pause.
        """
        last = math.inf
        while not self._held:
            idle = engine.idle_s
            if idle < last:
                self._met = max(0.0, self._met - _MEETINGS)
            if idle >= max(self.options.quiet_s, _PAUSE_S * (self._met > 1)) and self._allowance() > 0:
                return
            last = idle
            time.sleep(_POLL_S)

    def _allowance(self) -> float:
        """Seconds that audits may still take: they add up at the stated share, a second at most of what was not used."""
        if self.options.share >= 1:
            return 1.0
        now = time.monotonic()
        self._budget_s = min(1.0, self._budget_s + (now - self._clock) * self.options.share)
        self._clock = now
        return self._budget_s

    def _replay(self, job: Job) -> None:
        began = time.monotonic()
        replay = Replay(
            job.engine, lambda: job.engine.busy or self._held > 0, lambda: job.forgets == forgets(job.engine)
        )
        try:
            if job.auditing:
                self._audit(replay, job)
            if job.ledger is not None and job.trying:
                self._try(replay, job, job.ledger)
        except AnswerStopped:
            self.counted(job.engine.tenant).stopped += 1
            self._met += not self._held
            if job.tries + 1 < _TRIES or self._held:
                with self._wake:
                    self._waiting[job.engine.tenant].appendleft(replace(job, tries=job.tries + (not self._held)))
            else:
                self.counted(job.engine.tenant).dropped += 1
        except UnsupportedModel as error:
            self._unable = True
            log.warning("answers are not audited: %s", error)
        except GONE as error:
            self.counted(job.engine.tenant).gone += 1
            log.info("an answer of window %s is not audited: %s", job.window, error)
        finally:
            spent = time.monotonic() - began
            self._budget_s -= spent
            self.counted(job.engine.tenant).tokens += replay.work.tokens
            self.counted(job.engine.tenant).seconds += spent

    def _audit(self, replay: Replay, job: Job) -> None:
        replay.earlier(job.earlier)
        found = replay.audit(job.after, job.fidelity, job.keys, job.exchange)
        self.counted(job.engine.tenant).audits += 1
        self.counted(job.engine.tenant).harmed += found.strict.changed
        if job.ledger is not None and job.way is not None and found.concerned:
            stream = None if found.stream is None else found.stream.changed
            job.ledger.take(
                [Trial(job.way, found.strict.changed, found.strict.kl, found.window.changed, stream, served=True)]
            )
        job.done(found)

    def _try(self, replay: Replay, job: Job, ledger: Ledger) -> None:
        """Replays an exact answer, and recent questions, through every way that would have saved work."""
        trials: list[Trial] = []
        exchanges: list[Exchange] = []
        exact: tuple[Any, ...] = ()
        shadows, held = self._shadows_of(job), job.engine.repo.contains
        try:
            for name in ledger.tried():
                way = WAYS[name]
                fidelity = way.fidelity.model_copy(update={"forbid": (*way.fidelity.forbid, *job.fidelity.forbid)})
                if way.lane in job.fidelity.forbid:
                    continue
                state, shown = shadow(job.before, shadows.setdefault(name, {}))
                planned = choose(state, fidelity, lambda key, shown=shown: shown(key) and held(key))  # type: ignore[misc]
                if name not in _EVOLVE and all(c.lane != way.lane for c in planned):
                    continue
                laid = replay.laid(state, fidelity, shown=shown)
                before = replay.work.tokens
                segments = replay.filled(laid)
                computed = replay.work.tokens - before + sum(choice.again for choice in laid.choices)
                known = {c.placed.id: c.served if c.settles else c.placed.kv for c in laid.choices}
                shadows[name] = {placement: kv for placement, kv in known.items() if kv is not None}
                if all(c.lane != way.lane for c in laid.choices):
                    continue
                if not exchanges:
                    exact = replay.filled(replay.laid(job.after, EXACT))
                    exchanges = self._exchanges(replay, job, exact)
                    references = replay.scored(exact, exchanges)
                    seen = None
                scored, reference = replay.scored(segments, exchanges), job.fidelity.reference
                windows = [diverge(references[i], scored[i], e.ended) for i, e in enumerate(exchanges)]
                streams = None
                if way.lane == "survivor" and any(both_needed(window, reference) for window in windows):
                    seen = seen or replay.streamed(job.after)
                    streams = replay.scored(seen, exchanges) if seen else None
                for i, exchange in enumerate(exchanges):
                    window = windows[i]
                    stream = None if streams is None else diverge(streams[i], scored[i], exchange.ended)
                    strict = deciding(window, stream, reference)
                    trials.append(
                        Trial(
                            name,
                            strict.changed,
                            strict.kl,
                            window.changed,
                            None if stream is None else stream.changed,
                            computed if not i else 0,
                            job.computed if not i else 0,
                        )
                    )
        finally:
            self.counted(job.engine.tenant).trials += len(trials)
            ledger.take(trials)

    def _exchanges(self, replay: Replay, job: Job, exact: tuple[Any, ...]) -> list[Exchange]:
        """The question that was asked, and recent ones that still have the answer that they had.

        One about something that has left has no answer here that could be harmed: asked again, it is answered at random. Which
        are taken is decided by exact serving alone, before any way is tried.
        """
        made, most = [job.exchange], self.options.questions
        for recent in job.recent[: 2 * (most - 1)]:
            if len(made) < most and recent.query not in {e.query for e in made}:
                again = replay.answered(exact, recent.query, recent.max_tokens)
                made += [again] if again.ids == recent.ids else []
        return made

    def _shadows_of(self, job: Job) -> dict[str, dict[str, Conditioning]]:
        """KV by way and placement, as a window served that way would have it; a branch begins with its parent's."""
        if job.window not in self._shadows:
            inherited = self._shadows.get(job.parent or "", {})
            self._shadows[job.window] = {name: dict(known) for name, known in inherited.items()}
        self._shadows.move_to_end(job.window)
        while len(self._shadows) > _WINDOWS:
            self._shadows.popitem(last=False)
        return self._shadows[job.window]


_auditors: weakref.WeakKeyDictionary[Any, Auditor] = weakref.WeakKeyDictionary()
_opening = threading.Lock()


def auditor_of(engine: Engine, options: Options | None = None) -> Auditor:
    """The auditor of an engine and of all that share its model. ``options`` replaces those in force.

    Without any, ``CTXWIN_AUDIT_SHARE`` and ``CTXWIN_AUDIT_RATE`` say what `Options` calls so; ValueError where they do not.
    """
    with _opening:
        found = _auditors.get(engine.shared)
        if found is None:
            found = _auditors[engine.shared] = Auditor(options or _from_environment())
        elif options is not None:
            found.options = options
            found._ledgers.clear()
        return found


def _from_environment() -> Options:
    given: dict[str, Any] = {}
    for name, variable in (("share", "CTXWIN_AUDIT_SHARE"), ("rate", "CTXWIN_AUDIT_RATE")):
        if text := os.environ.get(variable):
            try:
                given[name] = float(text)
                Options(**given)
            except ValueError:
                raise ValueError(f"{variable} must be a number from 0 to 1, got {text!r}") from None
    return Options(**given)


@atexit.register
def _rest() -> None:
    """A thread that runs a model while the interpreter goes down would crash it."""
    for auditor in list(_auditors.values()):
        with auditor._wake:
            auditor._held += 1
            auditor._wake.wait_for(lambda one=auditor: not one._working, _LINGER_S)  # type: ignore[misc]


def forgets(engine: Engine) -> int:
    """How often content was forgotten in the store of an engine; what was begun before must not be stored any more."""
    with _FORGETTING:
        return _forgets.get(engine.repo, 0)


def forgot(engine: Engine) -> None:
    """Content is about to be forgotten: nothing that was handed over before is replayed, or stored, any more."""
    with _FORGETTING:
        _forgets[engine.repo] = _forgets.get(engine.repo, 0) + 1


def enabled() -> bool:
    """Whether ways are tried in the background."""
    return os.environ.get(VARIABLE, "1") != "0"
