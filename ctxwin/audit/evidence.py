"""`EvidenceFile`: the evidence of audits on each strategy, and the decisions that follow from it.

One file for each model, engine, precision and tenant, in the folder of the user's own profiles (`ctxwin.profiles`). It holds
counts and dates, nothing of any question, answer or chunk. Processes that share the folder add to one record: each reads it,
adds to it and replaces it under a lock. Evidence of one tenant admits nothing for another: questions differ, and a tenant that
asks easy ones on purpose must not decide how others are served.

**Units.** Questions of one window share its pictures, order and history, so that often all are harmed or none. One observation
is therefore a window, including its forks and all windows restored from a snapshot of it (`State.unit`): one conversation, one
thread of a graph. Its harm is the mean over its trials, apart for scored answers and for text (`ctxwin.audit.harm`), each a
number in [0, 1]: the share of values lost, and the mean excess over the floor as a part of `CAP`, truncated. A strategy is
promoted once every kind of answer that has occurred is shown to be within its budget. Each kind alone must pass at the full
level, so the probability of a promotion against either budget is not larger (an intersection-union test).

**When a unit counts.** Units are numbered in the order of their first trial and enter the evidence in that order: each once it
has `UNIT_TRIALS` trials, or once `BEHIND` others have begun after it; its later trials are no evidence. It does not matter
whether a window was closed, as nobody notices when a process dies. A unit's harm is thus fixed by a rule that depends
on counts of trials and on the beginning of other windows, never on a harm; a strategy on trial serves no answers, so its harms
cannot influence these either. No unit is delayed until it looks better or omitted because it looks bad. The wealth of
`ctxwin.audit.confidence` over units in this order is a supermartingale while a unit's expected harm, given those before, is at
least the budget, and a promotion is a stopping time of it. The floor that a unit's excess is taken over was measured on earlier
units or on its own exact answers, so it does not depend on the strategy.

**The probability of error** (1 - ``level``) is divided among strategies and, for each, attempts (`ctxwin.audit.strategies`);
both shares sum to at most 1, so that the probability that any promotion of a record is wrong is at most that.

A promoted strategy is monitored answer by answer instead (`confidence.ChangeDetector`): demoting it requires speed, not proof.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin.audit.confidence import ChangeDetector, is_below, units_needed
from ctxwin.audit.harm import CAP, Difference, Harm, Kind, Part, share_of
from ctxwin.audit.options import Options
from ctxwin.audit.record import SUFFIX, Decision, Evidence, Pending, Record, Tally, Verdict
from ctxwin.audit.strategies import STRATEGIES, error_of
from ctxwin.fidelity import Lane, Reference
from ctxwin.files import atomic_write
from ctxwin.hashing import digest
from ctxwin.profiles import model_digest, profiles_folder

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

log = logging.getLogger("ctxwin")
_RETRY_S = 60.0
REREAD_S = 1.0
"""Seconds between reads of the record of other processes."""
QUESTIONS = 1024
"""Maximum questions that a record keeps, the newest."""
DECISIONS = 100
"""Maximum decisions that a record keeps, the newest."""
PAUSE, PAUSE_DOUBLINGS = 200, 6
"""Replays after which a strategy that did harm is tried again, and how often that doubles from one attempt to the next."""
RECENT_KINDS, FEW_KINDS = 64, 16
"""Answers by which the mix of kinds is known, and the fewest that tell it."""
UNIT_TRIALS = 8
"""Maximum trials of one unit that count: steps of 1/8 distinguish a rare harm from a frequent one well enough."""
BEHIND = 16
"""Number of later units after which a unit counts with the trials it has."""
DEFAULTS = Options()
PAST = 2048
"""Units that a record remembers of each strategy so that none counts twice: several times those of a promotion."""


@dataclass(frozen=True)
class Trial:
    """One comparison with the exact answer.

    Attributes:
        strategy: a name of `STRATEGIES`.
        harm: of the answer.
        kl: mean KL per token, in nats.
        computed, exact_computed: prompt tokens, of the layout's first trial only.
        tokens: prompt tokens that the trial itself computed.
        is_audit: the answer was served by the (promoted) strategy.
        unit: the independent unit that it belongs to (`State.unit`); trials without one form one unit.
        question: digest of the question over its chunks, where no other unit is to be tried on it.
    """

    strategy: str
    harm: Harm
    kl: float = 0.0
    computed: int = 0
    exact_computed: int = 0
    tokens: int = 0
    is_audit: bool = False
    unit: str = ""
    question: str = ""


class EvidenceFile:
    """The record of one engine and tenant, in memory and on disk. Thread-safe.

    Args:
        record: initial record if there is no file yet; its ``binding`` names the file.
        folder: folder of the file; None keeps the record in memory.
        options: budgets, level and limit of what is decided.
    """

    def __init__(self, record: Record, folder: Path | None, options: Options = DEFAULTS) -> None:
        self._path = None if folder is None else folder / f"{record.binding[:32]}{SUFFIX}"
        self._options = options
        self._limits: dict[Kind, float] = {"scored": options.budget, "text": options.excess_budget / CAP}
        self._kinds: deque[Kind] = deque(maxlen=RECENT_KINDS)
        self._lock = threading.RLock()
        self._record = record
        self._looked = -REREAD_S
        self._stamp: tuple[int, int] | None = None
        self._refused: tuple[int, int] | None = None  # that of a file which could not be read
        self._served: dict[str, int] = {}  # not yet in the record
        self._retry, self._unsaved = 0.0, False  # when the file is written again after a failure; whether one is behind

    @classmethod
    def of(cls, engine: Engine, reference: Reference, options: Options) -> EvidenceFile:
        """Return the evidence of an engine and its tenant. Cost: a digest of the weights, once per process."""
        spec = engine.spec
        folder: Path | None = None
        weights = ""
        try:
            weights, folder = model_digest(spec.model), profiles_folder()
        except (OSError, RuntimeError, ValueError) as error:
            log.info("evidence on %s is kept in memory only: %s", spec.model, error)
        tenant = digest("tenant", engine.tenant)[:16] if engine.tenant else ""
        by = () if reference == "stricter" else (reference,)
        binding = digest("trust", spec.identity, spec.name, spec.kv.dtype, engine.tenant, *by)
        record = Record(
            binding=binding,
            weights=weights or spec.identity,
            model=str(spec.model),
            engine=spec.name,
            dtype=spec.kv.dtype,
            tenant=tenant,
            reference=reference,
        )
        return cls(record, folder, options)

    @property
    def record(self) -> Record:
        """Current record, with the evidence of other processes."""
        with self._lock:
            if time.monotonic() - self._looked >= REREAD_S:
                self._reread()
            return self._record

    def promoted(self, forbidden: Collection[Lane] = ()) -> str | None:
        """Return the promoted strategy that computed least of those whose lane is not ``forbidden``; None for exact."""
        allowed = {name for name, strategy in STRATEGIES.items() if strategy.lane not in forbidden}
        promoted = {name: e for name, e in self.record.strategies.items() if e.promoted and name in allowed}
        return min(promoted, key=lambda n: promoted[n].computed / max(1, promoted[n].exact_computed), default=None)

    def candidates(self) -> list[str]:
        """Return the strategies to try now."""
        evidence, remember = self.record.strategies, self._record.reference == "nearer"
        eligible = [name for name, strategy in STRATEGIES.items() if remember or not strategy.remembers]
        return [n for n in eligible if not ((e := evidence.get(n, Evidence())).promoted or e.pause or e.stopped)]

    def is_suspected(self, strategy: str) -> bool:
        """Return True if a promoted strategy did harm lately, so that every answer is audited until that is decided."""
        evidence = self._evidence(strategy)
        changes = [ChangeDetector(self._limits[kind], tally.wealth) for kind, tally in evidence.tallies().items()]
        return evidence.promoted and any(change.suspicious for change in changes)

    def units_needed(self, strategy: str) -> int:
        """Return the number of further units that promote a strategy if none of them is harmed."""
        evidence = self._evidence(strategy)
        error = error_of(strategy, evidence.attempt, self._options.level)
        tallies = evidence.tallies() or {"scored": evidence.scored}
        return max(units_needed(self._limits[kind], error, t.harm_counts()) for kind, t in tallies.items())

    def since(self, strategy: str) -> str:
        """Return the date of the last decision on a strategy."""
        return self._evidence(strategy).since

    def accepts_trial(self, strategy: str, unit: str) -> bool:
        """Return True if one more trial of a unit is evidence on a strategy that is not promoted."""
        return _accepts(self._evidence(strategy), unit)

    def accepts_question(self, question: str, unit: str) -> bool:
        """Return True unless another unit was tried on ``question``, the digest of one over its chunks, in any process."""
        return self.record.questions.get(_short(question), _short(unit)) == _short(unit)

    def count_kind(self, kind: Kind) -> None:
        """Count an answer of the windows that earn trust, for the mix of kinds."""
        self._kinds.append(kind)

    def circumstances(self, before: str = "") -> str:
        """Return the mix of answers and the settings, as text: where they change, stopped trials are resumed.

        ``before``: earlier ones, whose mix holds until enough answers were seen in this process.
        """
        kinds = list(self._kinds)
        share = kinds.count("text") / max(1, len(kinds))
        mix = "text" if share > 0.8 else "mixed" if share > 0.2 else "scored"
        mix = before.partition(",")[0] or mix if len(kinds) < FEW_KINDS else mix
        own = self._options
        limits = f"{own.budget:g} lost, {own.excess_budget:g} nats, level {own.level:g}"
        return f"{mix}, {limits}, {own.token_limit} tokens"

    def lacks(self, part: Part, unit: str) -> bool:
        """Return True if a part of the floor is to be measured on a unit."""
        difference: Difference = getattr(self.record.floor, part)
        return difference.lacks(_short(unit))

    def measure(self, part: Part, unit: str, nats: float, disagrees: bool | None) -> None:
        """Add a unit to a part of the floor; ``disagrees``: None if its answer is not scored. Cost: a small file is written."""
        with self._lock, self._file_lock():
            self._reread()
            floor = self._record.floor
            extended = getattr(floor, part).extended(_short(unit), nats, disagrees)
            self._record = self._record.model_copy(update={"floor": floor.model_copy(update={part: extended})})
            self._write()

    def count_answer(self, strategy: str) -> None:
        """Count an answer served by a strategy; it enters the record with the next trial."""
        with self._lock:
            self._served[strategy] = self._served.get(strategy, 0) + 1

    def _evidence(self, strategy: str) -> Evidence:
        return self._record.strategies.get(strategy, Evidence())

    def take(self, trials: Iterable[Trial]) -> list[Decision]:
        """Add the trials of one replay; return the decisions that follow. Cost: a small file is written.

        Every replay, also one without trials, shortens the pause of strategies that were given up.
        """
        trials = list(trials)
        if not trials and not any(e.pause or e.stopped for e in self.record.strategies.values()):
            return []
        with self._lock, self._file_lock():
            self._reread()
            strategies, decisions = dict(self._record.strategies), []
            for name, count in self._served.items():
                old = strategies.get(name, Evidence())
                strategies[name] = old.model_copy(update={"served": old.served + count})
            self._served.clear()
            for name, old in strategies.items():
                if name in STRATEGIES and old.stopped and old.stopped != self.circumstances(old.stopped):
                    strategies[name] = old.model_copy(update={"stopped": "", "tokens": 0, "since": _now()})
                    decisions.append(self._decision(name, "resumed", old))
            done: set[str] = set()  # given up: further trials of this replay are no evidence of the next attempt
            for trial in (t for t in trials if t.strategy not in done):
                old = strategies.get(trial.strategy, Evidence())
                if trial.is_audit != old.promoted or old.stopped:
                    continue  # promoted, given up or stopped meanwhile: the answer belongs to the other phase
                add = self._add_audit if old.promoted else self._add_trial
                strategies[trial.strategy], decision = add(old, trial)
                if decision is not None:
                    decisions.append(decision)
                    done |= {trial.strategy} if decision.verdict in ("rejected", "demoted") else set()
            tested = {trial.strategy for trial in trials}
            questions = {_short(trial.question): _short(trial.unit) for trial in trials if trial.question}
            questions = self._record.questions | questions | self._record.questions  # the first unit keeps its question
            for name, old in strategies.items():
                if old.pause and name not in tested:
                    strategies[name] = old.model_copy(update={"pause": old.pause - 1})
            update = {
                "strategies": strategies,
                "questions": dict([*questions.items()][-QUESTIONS:]),
                "decisions": (*self._record.decisions, *decisions)[-DECISIONS:],
                **{name: getattr(self._options, name) for name in ("budget", "excess_budget", "level")},
            }
            self._record = self._record.model_copy(update=update)
            self._write()
        for decision in decisions:
            level = logging.WARNING if decision.verdict in ("demoted", "stopped") else logging.INFO
            log.log(level, "%s: %s", self._record.model, decision)
        return decisions

    def _add_trial(self, old: Evidence, trial: Trial) -> tuple[Evidence, Decision | None]:
        """Return the evidence on a strategy that is not promoted, with one more trial, and a decision if it makes one."""
        if not _accepts(old, trial.unit):
            return old, None
        name = _short(trial.unit)
        new = _with_counts(old, trial)
        tallies: dict[Kind, Tally] = {"scored": new.scored, "text": new.text}
        waiting, past = dict(old.open), [*old.past]
        waiting[name] = _with_answer(waiting.get(name, _NO_ANSWERS), trial.harm)
        while waiting and (_answers(waiting[first := next(iter(waiting))]) >= UNIT_TRIALS or len(waiting) > BEHIND):
            for kind, share in _shares(waiting.pop(first)).items():
                tallies[kind] = tallies[kind].with_unit(share, self._limits[kind])
            past.append(first)
        new = new.model_copy(
            update={"scored": tallies["scored"], "text": tallies["text"], "open": waiting, "past": tuple(past[-PAST:])}
        )
        for kind, tally in tallies.items():  # giving up requires no proof, so incomplete units count, too
            change = ChangeDetector(self._limits[kind], tally.wealth)
            for shares in map(_shares, waiting.values()):
                if kind in shares:
                    change.take(shares[kind])
            if change.alarmed:
                return self._next_attempt(new), self._decision(trial.strategy, "rejected", new)
        if len(past) == len(old.past):
            return new, None
        error = error_of(trial.strategy, new.attempt, self._options.level)
        harms = {kind: tally.harm_counts() for kind, tally in new.tallies().items()}
        if all(is_below(counts, self._limits[kind], error) for kind, counts in harms.items()):
            promotion = {"promoted": True, "since": _now(), "served": 0, "audited": 0, "harmed": 0.0}
            at_rest: dict[str, Tally] = {
                kind: tally.model_copy(update={"wealth": ()}) for kind, tally in tallies.items()
            }
            return new.model_copy(update={**promotion, **at_rest}), self._decision(trial.strategy, "promoted", new)
        needed = max(units_needed(self._limits[kind], error, counts) for kind, counts in harms.items())
        if new.tokens * (1 + needed / new.begun) > self._options.token_limit:
            stop = {"stopped": self.circumstances(), "since": _now()}
            return new.model_copy(update=stop), self._decision(trial.strategy, "stopped", new)
        return new, None

    def _add_audit(self, old: Evidence, trial: Trial) -> tuple[Evidence, Decision | None]:
        """Return the evidence on a promoted strategy, with one more audit of an answer, and a decision if it makes one."""
        kind = trial.harm.kind
        tally: Tally = getattr(old, kind)
        change = ChangeDetector(self._limits[kind], tally.wealth)
        alarmed = change.take(trial.harm.share)
        counts = {"audited": old.audited + 1, "harmed": old.harmed + trial.harm.share}
        new = old.model_copy(update={**counts, kind: tally.model_copy(update={"wealth": change.wealth})})
        return (self._next_attempt(new), self._decision(trial.strategy, "demoted", new)) if alarmed else (new, None)

    def _next_attempt(self, old: Evidence) -> Evidence:
        """Return the evidence to begin the next attempt with: past trials no longer count."""
        past = (*old.past, *old.open)[-PAST:]
        pause = PAUSE * 2 ** min(old.attempt, PAUSE_DOUBLINGS)
        return Evidence(attempt=old.attempt + 1, since=_now(), pause=pause, past=past)

    def _decision(self, strategy: str, verdict: Verdict, evidence: Evidence) -> Decision:
        fields = ("served", "audited", "harmed") if verdict == "demoted" else ()
        error = error_of(strategy, evidence.attempt, self._options.level)
        return Decision(
            date=_now(),
            strategy=strategy,
            verdict=verdict,
            trials=evidence.scored.answers,
            harms=evidence.scored.harm,
            units=sum(evidence.scored.units.values()),
            upper=evidence.scored.upper(error),
            texts=evidence.text.answers,
            excess=evidence.text.mean,
            text_units=sum(evidence.text.units.values()),
            excess_upper=CAP * evidence.text.upper(error),
            floor=self._record.floor.nats(remembers=STRATEGIES[strategy].lane == "survivor"),
            tokens=evidence.tokens,
            **{name: getattr(evidence, name) for name in fields},
        )

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Keep other processes from changing the file inside the block."""
        if self._path is None or time.monotonic() < self._retry:
            yield
            return
        import fcntl

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_suffix(".lock").open("ab")
        except OSError as error:
            self._give_up(error)
            yield
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _reread(self) -> None:
        self._looked = time.monotonic()
        if self._path is None:  # what others found counts also while nothing can be written
            return
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp in (self._stamp, self._refused):
                return
            record = Record.read(self._path)
            if record.binding != self._record.binding:
                raise ValueError("it is bound to another model, engine or tenant")
        except FileNotFoundError:
            return
        except OSError as error:  # it may hold evidence, and must not be written over
            self._give_up(error)
            return
        except ValueError as error:
            self._refused = stamp
            log.warning("%s is not used (%s); evidence starts at zero", self._path, " ".join(str(error).split())[:200])
            return
        if self._unsaved:  # what was given up here must not serve again
            own = {name: e for name, e in self._record.strategies.items() if not e.promoted}
            given_up = {name: own[name] for name, e in record.strategies.items() if e.promoted and name in own}
            record = record.model_copy(update={"strategies": record.strategies | given_up})
        self._record, self._stamp = record, stamp

    def _write(self) -> None:
        if self._path is None or time.monotonic() < self._retry:
            return
        try:
            atomic_write(self._path, self._record.model_dump_json(indent=1, by_alias=True).encode() + b"\n")
            stat = self._path.stat()
            self._stamp, self._unsaved = (stat.st_mtime_ns, stat.st_ino), False
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._retry, self._unsaved = time.monotonic() + _RETRY_S, True
        log.warning("evidence cannot be written to %s (%s); it is kept in memory for now", self._path, error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _short(unit: str) -> str:
    """Return a unit's name in a record, which distinguishes units and reveals nothing of them."""
    return digest("unit", unit)[:10]


_NO_ANSWERS: Pending = (0, 0.0, 0, 0.0)


def _answers(unit: Pending) -> int:
    return unit[0] + unit[2]


def _accepts(evidence: Evidence, unit: str) -> bool:
    name = _short(unit)
    return name not in evidence.past and _answers(evidence.open.get(name, _NO_ANSWERS)) < UNIT_TRIALS


def _with_answer(unit: Pending, harm: Harm) -> Pending:
    scored, lost, texts, excess = unit
    if harm.kind == "scored":
        return scored + 1, lost + harm.amount, texts, excess
    return scored, lost, texts + 1, excess + harm.amount


def _shares(unit: Pending) -> dict[Kind, float]:
    """Return the harm of a unit by the kinds of its answers: the mean of each, as a number in [0, 1]."""
    scored, lost, texts, excess = unit
    means: dict[Kind, tuple[float, int]] = {"scored": (lost, scored), "text": (excess, texts)}
    return {kind: share_of(kind, total / count) for kind, (total, count) in means.items() if count}


def _with_counts(old: Evidence, trial: Trial) -> Evidence:
    kind = trial.harm.kind
    tally: Tally = getattr(old, kind)
    counts = {
        "answers": tally.answers + 1,
        "harm": tally.harm + trial.harm.amount,
        "undecided": tally.undecided + trial.harm.undecided,
    }
    return old.model_copy(
        update={
            kind: tally.model_copy(update=counts),
            "kl_sum": old.kl_sum + trial.kl,
            "kl_max": max(old.kl_max, trial.kl),
            "computed": old.computed + trial.computed,
            "exact_computed": old.exact_computed + trial.exact_computed,
            "tokens": old.tokens + trial.tokens,
        }
    )
