"""Harm of an answer: the loss beyond the differences that exact answers have among themselves.

Two exact computations of one prompt round differently where the prefill is cut differently, so an answer is not harmed because
its text differs:

- **scored** answers have a value by their form (`value_of`). Harm is a lost value: all valid exact references give one value,
  and the answer has another. Where the references disagree, exactness itself decides nothing: the answer is undecided.
- **text**, which is everything else, loses nats a token: the greater of KL(exact || served) and of the log-probability that the
  exact answer's tokens lose. Harm is the excess over the `Floor`: the same measure between exact answers.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt

Kind = Literal["scored", "text"]
Part = Literal["cut", "references"]
Value = tuple[str, str]
CAP = 0.25
"""Excess of a window, in nats a token, from which on it counts as harmed entirely. Bounds on a mean need bounded units, and a
smaller cap takes fewer of them; blind reuse of a released model exceeds by 0.19 on average."""
FLOOR_UNITS = 16
"""Units on which each part of a floor is measured."""
SHORT_ANSWER = 4
"""Maximum words of an answer that is scored by exact match."""
_LONGEST_NUMBER = 28
"""Digits that `Decimal` keeps."""
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>|```(?:json)?\s(.*?)```", re.DOTALL)
_PREAMBLE = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:)\s*:?\s*", re.IGNORECASE)
_CHOICE = re.compile(r"\(?([A-Za-z])(?:[.:]?|\)(?:\s.*)?)", re.DOTALL)
_WORD = re.compile(r"[^\W_]+(?:['.,-][^\W_]+)*")


def value_of(text: str, *, complete: bool = True) -> Value | None:
    """Return the value of an answer that can be scored by form, so that spellings of one value are equal; None: open text.

    In this order: JSON and tool calls, a number, the letter of a choice, at most `SHORT_ANSWER` words.

    Args:
        complete: the answer was not cut off; otherwise only JSON has a value.
    """
    text = text.rpartition("</think>")[2].strip()
    blocks = [call or fenced for call, fenced in _BLOCK.findall(text)]
    parsed = [_parse_json(block) for block in blocks or [text]]
    if all(value is not None for value in parsed):
        return "json", "\n".join(map(str, parsed))
    text = _PREAMBLE.sub("", text, count=1) if _PREAMBLE.match(text) else text
    if not complete or not text or text[0] in "{[<":
        return None
    with contextlib.suppress(ArithmeticError):  # of what is no number
        if len(text) <= _LONGEST_NUMBER:
            return "number", str(Decimal(text.rstrip(".").strip("$€£% ").replace(",", "")).normalize() + 0)
    if match := _CHOICE.fullmatch(text):
        return "choice", match[1].upper()
    words = [word.casefold() for word in _WORD.findall(text)]
    if not 1 <= len(words) <= SHORT_ANSWER:
        return None
    return "words", " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def _parse_json(text: str) -> str | None:
    """Return a JSON object or array in one spelling."""

    def number(digits: str) -> float:
        value = float(digits)
        return int(value) if value.is_integer() else value

    try:
        value = json.loads(text, parse_float=number)
        return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else None
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class Harm:
    """Harm of one answer.

    Attributes:
        amount: of ``scored`` answers 1 for a lost value, else 0; of ``text`` nats a token beyond the floor, negative below it.
        undecided: the exact references disagree about the value; ``amount`` is then 0.
    """

    kind: Kind
    amount: float
    undecided: bool = False

    @property
    def share(self) -> float:
        """The harm as a number in [0, 1]."""
        return share_of(self.kind, self.amount)

    def __str__(self) -> str:
        if self.kind == "text":
            return f"{self.amount:+.3g} nats a token beyond the floor"
        if self.undecided:
            return "exact answers disagree about its value"
        return "its value lost" if self.amount else "its value kept"


def share_of(kind: Kind, amount: float) -> float:
    """Return a mean amount of harm as a number in [0, 1]; the excess of text is truncated to [0, `CAP`]."""
    return min(1.0, max(0.0, amount / (CAP if kind == "text" else 1.0)))


class Difference(BaseModel):
    """Differences between two exact ways to compute the same answers.

    Attributes:
        units: on which it was measured, as in `Evidence.past`.
        nats: sum over the units of nats a token.
        scored, disagreed: units whose answer was scored, and those in which the values differ.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    units: tuple[str, ...] = ()
    nats: float = 0.0
    scored: NonNegativeInt = 0
    disagreed: NonNegativeInt = 0

    @property
    def mean(self) -> float:
        """Mean nats a token; 0 before it was measured."""
        return self.nats / len(self.units) if self.units else 0.0

    def lacks(self, unit: str) -> bool:
        """Return True if the difference is to be measured on a unit."""
        return len(self.units) < FLOOR_UNITS and unit not in self.units

    def extended(self, unit: str, nats: float, disagrees: bool | None) -> Difference:
        """Return it with one more unit; ``disagrees``: None if its answer is not scored."""
        if not self.lacks(unit):
            return self
        return Difference(
            units=(*self.units, unit),
            nats=self.nats + nats,
            scored=self.scored + (disagrees is not None),
            disagreed=self.disagreed + bool(disagrees),
        )

    def __str__(self) -> str:
        values = f", {self.disagreed} of {self.scored} values differ" if self.scored else ""
        return f"{self.mean:.2g} nats a token{values} ({len(self.units)} windows)" if self.units else "not measured"


class Floor(BaseModel):
    """Worth of exactness on one engine: how far exact answers are apart, measured on its own windows.

    Attributes:
        cut: the same prompt served from KV and computed in one forward without any.
        references: a re-prefill of the placed chunks, and one of all chunks seen lately, where some have left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cut: Difference = Difference()
    references: Difference = Difference()

    def nats(self, *, remembers: bool) -> float:
        """Return the floor of text; ``remembers``: of KV that may remember chunks that have left."""
        return max(self.cut.mean, self.references.mean if remembers else 0.0)

    def __str__(self) -> str:
        return f"exact answers differ: {self.cut} by the cut of the prefill; {self.references} by what has left"
