"""`Record`: the file of a ledger, with its evidence and decisions.

Format 1 counted questions without regard to their windows. Their dependence is no longer known, so all trials of a strategy in
such a file form one unit; a strategy promoted on them is on trial again, its attempts stay spent, and a decision records that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from ctxwin.audit.confidence import upper_bound
from ctxwin.fidelity import Reference
from ctxwin.profiles import model_digest, profiles_folder

log = logging.getLogger("ctxwin")
SUFFIX = ".trust.json"
UNIT_PARTS = 840
"""Resolution of a unit's harm: every mean of up to eight harms of 0 or 1 is a multiple of 1/840."""
Model = TypeVar("Model", bound=BaseModel)
Parts = Annotated[int, Field(ge=0, le=UNIT_PARTS)]
Verb = Literal["promoted", "demoted", "rejected", "withdrawn"]


class Evidence(BaseModel):
    """Evidence on one strategy.

    Attributes:
        trials: comparisons with the exact answer in this attempt: one question after one layout in which the strategy's lane
            served something.
        harms: sum of the harms of these trials.
        harms_window, harms_stream: answers that differ from a re-prefill of the placed chunks, and of all chunks seen.
        kl_sum, kl_max: of KL(exact || strategy) per token along the exact answer, in nats.
        computed, exact_computed: prompt tokens that the strategy, and exact serving, computed for the layouts of these trials.
        units: number of units by mean harm, in parts of `UNIT_PARTS`.
        open: trials and sum of harms of the units that do not count yet, in the order of their first trial.
        past: units that count, or that an earlier attempt has used, the oldest first.
        wealth: of `confidence.Change`, over units, and after a promotion over audited answers.
        attempt: number of earlier attempts, all given up.
        promoted: windows are served so.
        since: date of the last decision.
        served, audited, harmed: answers served so since the promotion, the audited ones among them, and the sum of their harms.
        pause: replays to wait before the next attempt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    trials: NonNegativeInt = 0
    harms: NonNegativeFloat = 0.0
    harms_window: NonNegativeInt = 0
    harms_stream: NonNegativeInt = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    computed: NonNegativeInt = 0
    exact_computed: NonNegativeInt = 0
    units: dict[Parts, NonNegativeInt] = Field(default_factory=dict)
    open: dict[str, tuple[PositiveInt, NonNegativeFloat]] = Field(default_factory=dict)
    past: tuple[str, ...] = ()
    wealth: tuple[float, ...] = ()
    attempt: NonNegativeInt = 0
    promoted: bool = False
    since: str = ""
    served: NonNegativeInt = 0
    audited: NonNegativeInt = 0
    harmed: NonNegativeFloat = 0.0
    pause: NonNegativeInt = 0

    @property
    def begun(self) -> int:
        """Number of units tried in this attempt."""
        return sum(self.units.values()) + len(self.open)

    def harm_counts(self) -> dict[float, int]:
        """Return the number of units by harm."""
        return {parts / UNIT_PARTS: count for parts, count in self.units.items()}

    def upper(self, error: float) -> float:
        """Return the largest mean harm of a unit that is not refuted."""
        return upper_bound(self.harm_counts(), error)


class Decision(BaseModel):
    """Promotion or end of a strategy, with its date and evidence.

    Attributes:
        way: name of the strategy.
        what: ``promoted``; ``demoted``: no longer promoted; ``rejected``: did harm too often on trial; ``withdrawn``: was
            promoted by a rule that is no longer valid.
        units: units of the trials that counted.
        upper: bound on a unit's mean harm at that time.
        served, audited, harmed: answers served so until then, the audited ones among them, and the sum of their harms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    way: str
    what: Verb
    trials: int
    harms: float
    units: int = 0
    upper: float
    served: int = 0
    audited: int = 0
    harmed: float = 0.0

    def __str__(self) -> str:
        if self.what == "withdrawn":
            return (
                f"{self.way} withdrawn: it was promoted on {self.trials} answers of unknown windows, which count as one"
            )
        within = f" in {self.units} windows" if self.units else ""
        counts = f"{self.harms:g} of {self.trials} audited answers changed{within}"
        text = f"{self.way} {self.what}: {counts} (at most {self.upper:.2%})"
        if self.what != "demoted":
            return text
        share = f", {self.harmed:g} of {self.audited} audited ones changed" if self.audited else ""
        return f"{text}; {self.served} answers were served so meanwhile{share}"


class Record(BaseModel):
    """All evidence on one model as one engine serves it to one tenant; see `ctxwin.audit.evidence`.

    Attributes:
        binding: digest of weights, config, engine, precision, tenant and reference.
        weights: `ctxwin.profiles.model_digest`.
        model, engine, dtype: for display.
        budget, level: of the last decisions.
        ways: evidence by strategy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    binding: str
    weights: str
    model: str
    engine: str
    dtype: str
    tenant: str = ""
    reference: Reference = "stricter"
    budget: float = Field(default=0.01, gt=0, lt=1)
    level: float = Field(default=0.95, gt=0, lt=1)
    ways: dict[str, Evidence] = Field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record from its file, of this format or the previous one.

        Unreadable entries are omitted with a warning. Raises ValueError if nothing can be read.
        """
        data = pydantic_core.from_json(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError(f"it must be a JSON object, got {type(data).__name__}")
        if data.get("format") == 1:
            data = _from_format_1(data)
        ways, decisions = data.get("ways") or {}, data.get("decisions") or []
        if not isinstance(ways, dict) or not isinstance(decisions, list):
            raise ValueError("its ways must be an object and its decisions a list")
        readable = {name: e for name, entry in ways.items() if (e := _entry(Evidence, entry, f"{path}: way {name}"))}
        lines = [_entry(Decision, line, f"{path}: decision {i}") for i, line in enumerate(decisions)]
        return cls.model_validate({**data, "ways": readable, "decisions": [line for line in lines if line is not None]})


def _entry(kind: type[Model], data: object, where: str) -> Model | None:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        log.warning("%s is left out (%s)", where, " ".join(str(error).split())[:200])
        return None


def _from_format_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record of format 1 to this format; see the module."""
    ways: dict[str, Any] = {}
    withdrawals: list[Decision] = []
    for name, old in dict(data.get("ways") or {}).items():
        try:
            trials, harms = int(old["trials"]), int(old["harms"])
            units = {math.ceil(UNIT_PARTS * harms / trials): 1} if 0 <= harms <= trials and trials else {}
            ways[name] = {**old, "units": units, "wealth": ()}
            if old["promoted"]:
                ways[name] |= {"promoted": False, "since": _today(), "audited": 0, "harmed": 0}
                withdrawals.append(
                    Decision(date=_today(), way=name, what="withdrawn", trials=trials, harms=harms, upper=1.0)
                )
                log.warning("%s: %s", data.get("model"), withdrawals[-1])
        except (KeyError, TypeError, ValueError):
            ways[name] = old  # not readable in any format
    decisions = [*(data.get("decisions") or []), *(decision.model_dump() for decision in withdrawals)]
    return {**data, "format": 2, "ways": ways, "decisions": decisions}


def _today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def records(model: str | None = None) -> list[Record]:
    """Return the records of a model (default: of all), newest decision first. Raises ValueError for an unknown model.

    Unreadable files are skipped with a warning.
    """
    weights = None if model is None else model_digest(model)
    matches = []
    try:
        paths = sorted(profiles_folder().glob(f"*{SUFFIX}"))
    except RuntimeError:
        return []
    for path in paths:
        try:
            record = Record.read(path)
        except (OSError, ValueError) as error:
            log.warning("%s is not used (%s)", path, " ".join(str(error).split())[:200])
            continue
        if weights in (None, record.weights):
            matches.append(record)
    return sorted(matches, key=lambda r: r.decisions[-1].date if r.decisions else "", reverse=True)
