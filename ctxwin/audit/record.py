"""`Record`: the content of an `EvidenceFile`."""

import logging
import math
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar, cast

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt

from ctxwin.audit.confidence import ChangeDetector, upper_bound
from ctxwin.audit.harm import CAP, Floor, Kind
from ctxwin.fidelity import Reference
from ctxwin.profiles import model_digest, profiles_folder
from ctxwin.validation import validate

log = logging.getLogger("ctxwin")
SUFFIX = ".trust.json"
UNIT_PARTS = 840
"""Resolution of a unit's harm: every mean of up to eight harms of 0 or 1 is a multiple of 1/840."""
Model = TypeVar("Model", bound=BaseModel)
Pending = tuple[NonNegativeInt, NonNegativeFloat, NonNegativeInt, float]
Parts = Annotated[int, Field(ge=0, le=UNIT_PARTS)]
Verdict = Literal["promoted", "demoted", "rejected", "stopped", "resumed"]


class Tally(BaseModel):
    """Evidence on one kind of answer (`ctxwin.audit.harm`).

    Attributes:
        answers: trials of this attempt: one question after one layout in which the strategy's lane served something.
        harm: sum over them: values lost, or nats a token beyond the floor.
        undecided: answers about whose value the exact references disagree.
        units: number of units by mean harm, in parts of `UNIT_PARTS`.
        wealth: of `confidence.ChangeDetector`, over units, and after a promotion over audited answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    answers: NonNegativeInt = 0
    harm: float = 0.0
    undecided: NonNegativeInt = 0
    units: dict[Parts, NonNegativeInt] = Field(default_factory=dict)
    wealth: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean harm of an answer."""
        return self.harm / self.answers if self.answers else 0.0

    def harm_counts(self) -> dict[float, int]:
        """Return the number of units by harm."""
        return {parts / UNIT_PARTS: count for parts, count in self.units.items()}

    def with_unit(self, share: float, limit: float) -> Self:
        """Return it with one more unit of this harm, from 0 to 1; ``limit``: the largest acceptable mean."""
        parts = math.ceil(share * UNIT_PARTS - 1e-9)  # rounded up, so never more favourable
        change = ChangeDetector(limit, self.wealth)
        change.take(share)
        units = {**self.units, parts: self.units.get(parts, 0) + 1}
        return self.model_copy(update={"units": units, "wealth": change.wealth})

    def upper(self, error: float) -> float:
        """Return the largest mean harm of a unit that is not refuted, from 0 to 1."""
        return upper_bound(self.harm_counts(), error)


class Evidence(BaseModel):
    """Evidence on one strategy.

    Attributes:
        scored, text: by kind of answer.
        kl_sum, kl_max: of KL(exact || strategy) per token along the exact answer, in nats.
        computed, exact_computed: prompt tokens that the strategy, and exact serving, computed for the layouts of these trials.
        tokens: prompt tokens that the trials themselves computed, since they began or were resumed.
        open: for each unit that does not count yet, in the order of their first trial: answers and sum of harms, scored and text.
        past: units that count, or that an earlier attempt has used, the oldest first.
        attempt: number of earlier attempts, all given up.
        promoted: windows are served so.
        stopped: the mix of answers and the settings (`EvidenceFile.circumstances`) under which trials stopped, or "".
        since: date of the last decision.
        served, audited, harmed: answers served so since the promotion, the audited ones among them, and the sum of their harms.
        pause: replays to wait before the next attempt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scored: Tally = Tally()
    text: Tally = Tally()
    kl_sum: float = 0.0
    kl_max: float = 0.0
    computed: NonNegativeInt = 0
    exact_computed: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    open: dict[str, Pending] = Field(default_factory=dict)
    past: tuple[str, ...] = ()
    attempt: NonNegativeInt = 0
    promoted: bool = False
    stopped: str = ""
    since: str = ""
    served: NonNegativeInt = 0
    audited: NonNegativeInt = 0
    harmed: NonNegativeFloat = 0.0
    pause: NonNegativeInt = 0

    @property
    def trials(self) -> int:
        """Number of trials of this attempt."""
        return self.scored.answers + self.text.answers

    @property
    def units(self) -> int:
        """Number of units that count."""
        return max(sum(tally.units.values()) for tally in (self.scored, self.text))

    @property
    def begun(self) -> int:
        """Number of units tried in this attempt."""
        return self.units + len(self.open)

    def tallies(self) -> dict[Kind, Tally]:
        """Return the tallies of the kinds of answers that have occurred."""
        kinds: dict[Kind, Tally] = {"scored": self.scored, "text": self.text}
        return {kind: tally for kind, tally in kinds.items() if tally.answers}


class Decision(BaseModel):
    """Promotion or end of a strategy, with its date and evidence.

    Attributes:
        strategy: its name, ``way`` in files and JSON.
        verdict: ``what`` in files and JSON. ``promoted``; ``demoted``: no longer promoted; ``rejected``: did harm too often
            on trial; ``stopped``: cannot be promoted at a reasonable cost, so trials ended; ``resumed``: they go on, as the
            mix of answers or the settings have changed.
        trials, harms, units: scored answers on trial, the values lost among them, and the units that counted.
        upper: bound on a unit's mean share of lost values at that time.
        texts, excess, text_units, excess_upper: the same of text: answers, their mean nats a token beyond the floor, units, and
            the bound on the mean of a unit.
        floor: `Floor.nats` at that time.
        tokens: prompt tokens computed by the trials.
        served, audited, harmed: answers served so until then, the audited ones among them, and the sum of their harms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    date: str
    strategy: str = Field(alias="way")
    verdict: Verdict = Field(alias="what")
    trials: int
    harms: float
    units: int = 0
    upper: float
    texts: int = 0
    excess: float = 0.0
    text_units: int = 0
    excess_upper: float = CAP
    floor: float = 0.0
    tokens: int = 0
    served: int = 0
    audited: int = 0
    harmed: float = 0.0

    def __str__(self) -> str:
        parts = []
        if self.trials or not self.texts:
            within = f" in {self.units} windows" if self.units else ""
            parts.append(f"{self.harms:g} of {self.trials} scored answers lost{within} (at most {self.upper:.2%})")
        if self.texts:
            within = f" in {self.text_units} windows" if self.text_units else ""
            parts.append(
                f"text {self.excess:+.2g} nats a token beyond the floor of {self.floor:.2g}, {self.texts} answers{within} "
                f"(at most {self.excess_upper:.2g})"
            )
        if self.verdict == "stopped":
            parts.append(f"a promotion would take too long; trials computed {self.tokens:,} tokens")
        if self.verdict == "demoted":
            share = f", {self.harmed:g} of {self.audited} audited ones harmed" if self.audited else ""
            parts.append(f"{self.served} answers were served so meanwhile{share}")
        return f"{self.strategy} {self.verdict}: {'; '.join(parts)}"


class Record(BaseModel):
    """All evidence on one model as one engine serves it to one tenant; see `ctxwin.audit.evidence`.

    Attributes:
        binding: digest of weights, config, engine, precision, tenant and reference.
        weights: `ctxwin.profiles.model_digest`.
        model, engine, dtype: for display.
        budget, excess_budget, level: of the last decisions (`ctxwin.audit.Options`).
        floor: differences of exact answers.
        strategies: evidence by strategy, ``ways`` in files and JSON.
        questions: the unit that was tried on a question over its chunks, by their digest, ``asked`` in files; the newest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    format: Literal[3] = 3
    binding: str
    weights: str
    model: str
    engine: str
    dtype: str
    tenant: str = ""
    reference: Reference = "stricter"
    budget: float = Field(default=0.01, gt=0, lt=1)
    excess_budget: float = Field(default=0.01, gt=0, lt=CAP)
    level: float = Field(default=0.95, gt=0, lt=1)
    floor: Floor = Floor()
    strategies: dict[str, Evidence] = Field(default_factory=dict, alias="ways")
    decisions: tuple[Decision, ...] = ()
    questions: dict[str, str] = Field(default_factory=dict, alias="asked")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record from its file.

        Unreadable entries are omitted with a warning. Raises ValueError if nothing can be read.
        """
        data = pydantic_core.from_json(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError(f"it must be a JSON object, got {type(data).__name__}")
        ways, decisions = data.get("ways") or {}, data.get("decisions") or []
        if not isinstance(ways, dict) or not isinstance(decisions, list):
            raise ValueError("its ways must be an object and its decisions a list")
        readable = {n: e for n, entry in ways.items() if (e := _entry(Evidence, entry, f"{path}: strategy {n}"))}
        lines = [_entry(Decision, line, f"{path}: decision {i}") for i, line in enumerate(decisions)]
        fields = {**data, "ways": readable, "decisions": [line for line in lines if line is not None]}
        return cast("Self", validate(cls.model_validate, fields, ""))


def _entry(kind: type[Model], data: object, where: str) -> Model | None:
    try:
        return cast("Model", validate(kind.model_validate, data, ""))
    except ValueError as error:
        log.warning("%s is left out (%s)", where, error)
        return None


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
            log.warning("%s is not used (%s)", path, error)
            continue
        if weights in (None, record.weights):
            matches.append(record)
    return sorted(matches, key=lambda r: r.decisions[-1].date if r.decisions else "", reverse=True)
