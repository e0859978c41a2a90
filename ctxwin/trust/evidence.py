"""`Ledger`: what audits have found of each way to serve, and what follows from it.

One file for each model, engine, precision and tenant, in the folder of the user's own profiles (`ctxwin.profiles`). It holds
counts and dates and nothing of any question, answer or chunk. Processes that share the folder add to one record: each reads it,
adds and replaces it under a lock. Evidence of one tenant admits nothing for another: questions differ, and who asks easy ones
on purpose must not decide how others are served.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from ctxwin.fidelity import LANES, Fidelity, Lane, Reference
from ctxwin.files import atomic_write
from ctxwin.hashing import digest
from ctxwin.profiles import model_digest, profiles_folder
from ctxwin.trust.confidence import Change, upper_bound

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

log = logging.getLogger("ctxwin")
SUFFIX = ".trust.json"
REREAD_S = 1.0
"""How often a process looks for what others have found."""
DECISIONS = 100
"""Most decisions that a record keeps, the newest."""
PAUSE = 200
"""Audits after which a way that did harm is tried again."""
SUSPICION = 2.0
"""`confidence.Change.mean` from which on a way is suspected: about ten audits without harm behind one with."""
_SPENT = 0.8
"""Of the chance of error that is left, the part that each attempt of a way takes: all attempts together stay under the whole."""


@dataclass(frozen=True)
class Way:
    """A way to serve that may be promoted: a fidelity, tried as a whole.

    Attributes:
        lane: the lane that makes it a trial of it.
        remembers: whether it is for those alone who want what has left to be remembered (``reference="nearer"``).
    """

    lane: Lane
    fidelity: Fidelity
    remembers: bool = False


def _with(*lanes: Lane) -> Fidelity:
    """Exact lanes and these. Survivors of slides only: those that lost something from their midst do more harm
    (`evals/studies/trust.py`), and are few."""
    forbidden = tuple(lane for lane in LANES if lane not in {"computed", "formed", "resident", *lanes})
    return Fidelity("patched", orbit="orbit" in lanes, survivors="slid", forbid=forbidden)


WAYS: dict[str, Way] = {
    "survivor": Way("survivor", _with("survivor")),
    "patched": Way("patched", _with("survivor", "patched")),
    "orbit": Way("orbit", _with("survivor", "patched", "orbit")),
    "kept": Way("survivor", _with("survivor").model_copy(update={"survivors": "keep"}), remembers=True),
    "partial": Way("partial", _with("partial").model_copy(update={"recompute": 32})),
    "blind": Way("canonical", Fidelity("blind")),
}
"""What is tried, by name."""


class Evidence(BaseModel):
    """Of one way to serve.

    Attributes:
        trials: comparisons with the exact answer since the attempt began: one question behind one layout in which the way's
            lane served something; harms: of these, answers that it changes.
        harms_window, harms_stream: of the harms, those against a re-prefill of what is placed, and of what was seen.
        kl_sum, kl_max: of KL(exact || way) a token along the exact answer, in nats.
        computed, exact_computed: prompt tokens that the way, and exact serving, computed for the layouts of these trials.
        wealth: of `confidence.Change`.
        attempt: how many times it was given up before.
        promoted: whether windows are served so; since: date of the last decision.
        served, audited, harmed: answers served so since it was promoted, and how many of them were audited and found harmed.
        pause: audits to wait before it is tried again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    trials: int = Field(default=0, ge=0)
    harms: int = Field(default=0, ge=0)
    harms_window: int = Field(default=0, ge=0)
    harms_stream: int = Field(default=0, ge=0)
    kl_sum: float = 0.0
    kl_max: float = 0.0
    computed: int = 0
    exact_computed: int = 0
    wealth: tuple[float, ...] = ()
    attempt: int = Field(default=0, ge=0)
    promoted: bool = False
    since: str = ""
    served: int = Field(default=0, ge=0)
    audited: int = Field(default=0, ge=0)
    harmed: int = Field(default=0, ge=0)
    pause: int = 0

    def level(self, overall: float) -> float:
        """Of this attempt's bound, so that all attempts together keep ``overall``."""
        return 1 - (1 - overall) * _SPENT * (1 - _SPENT) ** self.attempt

    def upper(self, overall: float) -> float:
        """Largest share of harmed answers that is not refuted."""
        return upper_bound(self.harms, self.trials, self.level(overall))


class Decision(BaseModel):
    """A way that was promoted or given up, when, and on what evidence.

    Attributes:
        what: ``promoted``; ``demoted``: it was promoted; ``rejected``: it never was, and did harm too often.
        upper: bound on the share of harmed answers at that time.
        served, audited, harmed: answers served so until then, and what audits of them found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    way: str
    what: Literal["promoted", "demoted", "rejected"]
    trials: int
    harms: int
    upper: float
    served: int = 0
    audited: int = 0
    harmed: int = 0

    def __str__(self) -> str:
        said = (
            f"{self.way} {self.what}: {self.harms} of {self.trials} audited answers changed (at most {self.upper:.2%})"
        )
        if self.what != "demoted":
            return said
        share = f", {self.harmed} of {self.audited} audited ones changed" if self.audited else ""
        return f"{said}; {self.served} answers were served so meanwhile{share}"


class Record(BaseModel):
    """All evidence of one model as one engine serves it to one tenant; see the module.

    Attributes:
        binding: what it is bound to: weights and config, engine, precision, tenant, reference.
        weights: `ctxwin.profiles.model_digest`; model, engine, dtype: for people.
        budget, level: what the last decisions were made by.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    binding: str
    weights: str
    model: str
    engine: str
    dtype: str
    tenant: str = ""
    reference: Reference = "stricter"
    budget: float = 0.01
    level: float = 0.95
    ways: dict[str, Evidence] = Field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True)
class Trial:
    """What one comparison found.

    Attributes:
        way: a name of `WAYS`.
        changed: whether it changes the exact answer, by the reference that decides; kl: mean KL a token, in nats.
        window, stream: the same by each reference; None where it was not taken.
        computed, exact_computed: prompt tokens, where the layout's first trial says so.
        served: whether it is of an answer that was served so.
    """

    way: str
    changed: bool
    kl: float
    window: bool | None = None
    stream: bool | None = None
    computed: int = 0
    exact_computed: int = 0
    served: bool = False


class Ledger:
    """The record of one engine and tenant, in memory and on disk. Thread-safe.

    Args:
        record: what it begins with, where there is no file yet; its ``binding`` names the file.
        folder: where the file lies; None keeps it in memory.
        budget: largest share of harmed answers; level: of the bound on it.
    """

    def __init__(self, record: Record, folder: Path | None, *, budget: float = 0.01, level: float = 0.95) -> None:
        self._path = None if folder is None else folder / f"{record.binding[:32]}{SUFFIX}"
        self._budget, self._level = budget, level
        self._lock = threading.RLock()
        self._record = record
        self._looked = -REREAD_S
        self._stamp: tuple[int, int] | None = None
        self._served: dict[str, int] = {}  # not yet in the record
        self._failed = False

    @classmethod
    def of(
        cls, engine: Engine, reference: Reference = "stricter", *, budget: float = 0.01, level: float = 0.95
    ) -> Ledger:
        """The ledger of an engine and its tenant. Cost: a digest of the weights, once a process."""
        spec = engine.spec
        folder: Path | None = None
        weights = ""
        try:
            weights, folder = model_digest(spec.model), profiles_folder()
        except (OSError, RuntimeError, ValueError) as error:
            log.info("what audits of %s find is kept in memory only: %s", spec.model, error)
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
        return cls(record, folder, budget=budget, level=level)

    @property
    def record(self) -> Record:
        """What is known now, by other processes, too."""
        with self._lock:
            if time.monotonic() - self._looked >= REREAD_S:
                self._reread()
            return self._record

    def promoted(self) -> str | None:
        """The way to serve: of those promoted, the one that computed least; None for exact."""
        found = {name: e for name, e in self.record.ways.items() if e.promoted and name in WAYS}
        return min(found, key=lambda name: found[name].computed / max(1, found[name].exact_computed), default=None)

    def tried(self) -> list[str]:
        """The ways that are worth a trial now."""
        ways, remember = self.record.ways, self._record.reference == "nearer"
        known = [name for name, way in WAYS.items() if remember or not way.remembers]
        return [n for n in known if not (e := ways.get(n, Evidence())).promoted and not e.pause]

    def suspected(self, way: str) -> bool:
        """Whether a promoted way was found harmful lately, so that every answer is worth an audit until that is settled."""
        found = self._record.ways.get(way, Evidence())
        return found.promoted and Change(self._budget, found.wealth).mean >= SUSPICION

    def answered(self, way: str) -> None:
        """Counts an answer that was served so; it enters the record with the next trial."""
        with self._lock:
            self._served[way] = self._served.get(way, 0) + 1

    def take(self, trials: Iterable[Trial]) -> list[Decision]:
        """Adds the trials of one replay; returns what was decided by them. Cost: a small file is written.

        A replay without any brings the ways that were given up nearer to their next attempt, too.
        """
        trials = list(trials)
        if not trials and not any(e.pause for e in self._record.ways.values()):
            return []
        with self._lock, self._alone():
            self._reread()
            ways, made = dict(self._record.ways), []
            for name, count in self._served.items():
                old = ways.get(name, Evidence())
                ways[name] = old.model_copy(update={"served": old.served + count})
            self._served.clear()
            done: set[str] = set()  # given up: the rest of one replay is no evidence of the next attempt
            for trial in (t for t in trials if t.way not in done):
                ways[trial.way], decision = self._taken(ways.get(trial.way, Evidence()), trial)
                if decision is not None:
                    made.append(decision)
                    done |= {trial.way} if decision.what != "promoted" else set()
            tested = {trial.way for trial in trials}
            for name, old in ways.items():
                if old.pause and name not in tested:
                    ways[name] = old.model_copy(update={"pause": old.pause - 1})
            update = {
                "ways": ways,
                "decisions": (*self._record.decisions, *made)[-DECISIONS:],
                "budget": self._budget,
                "level": self._level,
            }
            self._record = self._record.model_copy(update=update)
            self._write()
        for decision in made:
            (log.warning if decision.what == "demoted" else log.info)("%s: %s", self._record.model, decision)
        return made

    def _taken(self, old: Evidence, trial: Trial) -> tuple[Evidence, Decision | None]:
        change = Change(self._budget, old.wealth)
        alarmed = change.take(trial.changed)
        new = old.model_copy(
            update={
                "trials": old.trials + 1,
                "harms": old.harms + trial.changed,
                "harms_window": old.harms_window + bool(trial.window),
                "harms_stream": old.harms_stream + bool(trial.stream),
                "kl_sum": old.kl_sum + trial.kl,
                "kl_max": max(old.kl_max, trial.kl),
                "computed": old.computed + trial.computed,
                "exact_computed": old.exact_computed + trial.exact_computed,
                "wealth": change.wealth,
                "audited": old.audited + (trial.served and old.promoted),
                "harmed": old.harmed + (trial.served and old.promoted and trial.changed),
            }
        )
        upper, now = new.upper(self._level), datetime.now(UTC).isoformat(timespec="seconds")

        def decided(what: Literal["promoted", "demoted", "rejected"]) -> Decision:
            counts = {"served": new.served, "audited": new.audited, "harmed": new.harmed} if old.promoted else {}
            return Decision(
                date=now, way=trial.way, what=what, trials=new.trials, harms=new.harms, upper=upper, **counts
            )

        if alarmed:
            # The world is another one than that of the trials so far: they count no more.
            fresh = Evidence(attempt=old.attempt + 1, since=now, pause=PAUSE)
            return fresh, decided("demoted" if old.promoted else "rejected")
        if not old.promoted and upper <= self._budget:
            return new.model_copy(update={"promoted": True, "since": now, "served": 0}), decided("promoted")
        return new, None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes from changing the file meanwhile."""
        if self._path is None or self._failed:
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
        if self._path is None or self._failed:
            return
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp == self._stamp:
                return
            found = Record.model_validate_json(self._path.read_bytes())
            if found.binding != self._record.binding:
                raise ValueError("it is bound to another model, engine or tenant")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s is not used (%s); evidence begins anew", self._path, " ".join(str(error).split())[:200])
            return
        self._record, self._stamp = found, stamp

    def _write(self) -> None:
        if self._path is None or self._failed:
            return
        try:
            atomic_write(self._path, self._record.model_dump_json(indent=1).encode() + b"\n")
            stat = self._path.stat()
            self._stamp = (stat.st_mtime_ns, stat.st_ino)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        log.warning("what audits find cannot be written to %s (%s); it is kept in memory", self._path, error)


def records(model: str | None = None) -> list[Record]:
    """What is known of a model (of all by default), newest decision first. Raises ValueError for a model that is not there.

    A file that cannot be read is passed over with a warning.
    """
    weights = None if model is None else model_digest(model)
    found = []
    try:
        paths = sorted(profiles_folder().glob(f"*{SUFFIX}"))
    except RuntimeError:
        return []
    for path in paths:
        try:
            record = Record.model_validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("%s is not used (%s)", path, " ".join(str(error).split())[:200])
            continue
        if weights in (None, record.weights):
            found.append(record)
    return sorted(found, key=lambda r: r.decisions[-1].date if r.decisions else "", reverse=True)
