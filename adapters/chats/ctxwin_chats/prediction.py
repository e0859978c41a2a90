"""Prediction of a chat's next request: a client that has dropped its oldest screenshot will drop the next one, too.

`Histories` holds each request against the one before it. What its client has dropped, or replaced by a placeholder, is expected
to happen next to what stands at the same place among its kind (the first picture, the second turn of the user), once there are as
many of that kind as there were before, or at once where it happens with every request. The history without it is how the next
prompt begins, which `ctxwin_chats.prefill` computes while the engine idles. A wrong prediction costs time of an idle
engine, and never changes an answer.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from operator import ne
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from ctxwin.hashing import digest
from ctxwin_chats.continuation import CUTS, KEYED, Continuation, Lost, Part, continue_history, is_cleared, turns_field
from ctxwin_chats.records import Record, Records
from ctxwin_chats.shared_records import SavedRecords

_TRUSTED = 2
"""Right predictions in a row from which on those of a conversation are computed again, behind a wrong one."""
_NOT_AHEAD = ("stream", "stream_options", "background", "store")
"""Fields of a request that do not stand in its prompt, and would have its answer streamed or kept."""
Place = tuple[int, str, int]
"""Depth and kind of a part, and its number among the parts of a history that share both."""


@dataclass(eq=False)
class Prediction:
    """The prompt that the next request of a conversation is expected to begin with.

    Attributes:
        body: a request with that prompt, of ``size`` bytes; empty where it is not to be computed, or has been.
        leaves: digests of the innermost parts of its turns.
        fresh: index of the first of them that the last prompt did not have there.
        prompt: ids of the last prompt, once known.
        reached: tokens of its own prompt that have been computed or were there.
        tokens: computed for it; seconds: that this took.
        cancelled: begin no further forward for it.
    """

    body: dict[str, Any]
    size: int
    leaves: tuple[str, ...]
    fresh: int
    prompt: Sequence[int] = ()
    reached: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cancelled: bool = False

    def fits(self, leaves: Sequence[str]) -> bool:
        """Return True if more than half of what it has anew stands in a request with these parts, where it was expected."""
        return 2 * (common_prefix(self.leaves, leaves) - self.fresh) > len(self.leaves) - self.fresh


@dataclass(frozen=True)
class Foresight:
    """Predictions that one request ends and begins.

    Attributes:
        current: the prediction of this request; hit: it was right.
        next: the prediction of the next one.
    """

    current: Prediction | None = None
    hit: bool = False
    next: Prediction | None = None


_Replacements = Annotated[
    Mapping[Place, Part | None],
    PlainSerializer(lambda replacements: [*replacements.items()]),
    BeforeValidator(lambda pairs: {tuple(place): part for place, part in pairs}),
]


@dataclass(frozen=True)
class Habit:
    """The last change of a client to its history, and how often it makes one.

    Attributes:
        replacements: the part that then stood there instead, or None for nothing, by place.
        count: parts of these kinds that there were before.
        period: requests since the time before that; 0 where there was none.
        since: requests since.
    """

    replacements: _Replacements
    count: int
    period: int = 0
    since: int = 0

    @classmethod
    def after(cls, previous: Habit | None, turns: Sequence[Part], lost: Sequence[Lost]) -> Habit | None:
        """Return the habit once a history has lost some of its parts, or none; ``previous``: the habit until then."""
        if not lost:
            return previous and replace(previous, since=previous.since + 1)
        places = {id(part): place for part, place in _with_places(turns)}
        replacements = {places[id(part)]: new for part, new in lost}
        return cls(replacements, _count(turns, replacements), 0 if previous is None else previous.since + 1)

    def is_due(self, turns: Sequence[Part]) -> bool:
        """Return True if it is expected to happen to a history with the next request."""
        return self.period == 1 or _count(turns, self.replacements) >= self.count


@dataclass(eq=False, kw_only=True)
class History(Record):
    """The turns of a conversation's last request, in outline; ``right``: right predictions in a row."""

    turns: tuple[Part, ...]
    habit: Habit | None = None
    prediction: Prediction | None = None
    right: int = _TRUSTED


class Histories(Records[History]):
    """The last requests of one tenant's conversations.

    Args:
        most, ttl: see `Records`.
        missed: called with a prediction whose conversation was forgotten before it went on.
    """

    def __init__(self, most: int, ttl: float, missed: Callable[[Prediction], None]) -> None:
        super().__init__(most, ttl)
        self._missed = missed

    def saved(self) -> list[SavedRecords[Any]]:
        """Return what a conversation's record has of its last request; what was computed ahead is of this process alone."""
        saved = SavedRecords.of("histories", self, History)

        def pack(record: History) -> Any:
            ahead = record.prediction and Prediction({}, 0, record.prediction.leaves, record.prediction.fresh)
            return saved.pack(replace(record, prediction=ahead))

        return [replace(saved, pack=pack)]

    def follow(
        self, data: Mapping[str, Any], turns: Any, name: str, room: int | None = None, record_name: str = ""
    ) -> Foresight:
        """Note a request, and hold it against its prediction.

        Args:
            data: its body as served.
            turns: its turns as the client sent them.
            name: the client's name of the conversation; "" for none.
            record_name: see `Record`.
            room: pictures that the client may drop on its next turn before the prompt follows; None: it follows at once.

        Cost: linear in the request.
        """
        if not isinstance(turns, list) or any(data.get(cut) is not None for cut in CUTS):
            return Foresight()
        field = turns_field(data)
        parts = [Part.read(turn) for turn in turns]
        sent = tuple(part.outline() for part in parts)
        key = digest("sent", field, name, json.dumps([data.get(keyed) for keyed in KEYED]))
        old, continuation = self._continued(key, sent)
        current, hit, right, prediction, habit = None, False, _TRUSTED, None, None
        if old is not None and continuation is not None:
            if [turn.digest for turn in old.turns] == [turn.digest for turn in sent]:  # the same request again
                return Foresight()
            current, right = old.prediction, old.right
            if current is not None:
                current.cancelled, hit = True, current.fits(_leaves(sent))
                right = right + 1 if hit else 0
            pictures = sum(leaf.kind == "picture" for part in continuation.drops for leaf in part.leaves())
            habit = Habit.after(old.habit, old.turns, continuation.lost)
            if habit is not None and habit.is_due(sent) and (room is None or pictures > room):
                change = _Change.repeated(habit, sent, turns)
                if change is not None:
                    size = sum(part.size for part in parts)
                    prediction = change.predict(data, size, computed=right >= _TRUSTED)
        size = sum(part.size for part in sent)
        record = History(
            key=key, name=name, size=size, turns=sent, habit=habit, prediction=prediction, right=right,
            record_name=record_name,
        )  # fmt: skip
        self.keep(old, record)
        return Foresight(current, hit, prediction)

    def forgotten(self, record: History) -> None:
        if record.prediction is not None:
            record.prediction.cancelled = True
            self._missed(record.prediction)

    def _continued(self, key: str, sent: tuple[Part, ...]) -> tuple[History | None, Continuation | None]:
        """Return the conversation that reaches furthest into a request, and how; of equals the one used last."""
        furthest: tuple[History | None, Continuation | None] = None, None
        for record in self.find(key):
            one = continue_history(record.turns, sent)
            if one is not None and (furthest[1] is None or one.new >= furthest[1].new):
                furthest = record, one
        return furthest


@dataclass
class _Change:
    """Changes of parts of a request.

    Attributes:
        sent: its turns, in outline; values: JSON of each part, by identity.
        replacements: the part to stand there instead, or None for nothing, by identity.
    """

    sent: Sequence[Part]
    values: dict[int, Any]
    replacements: dict[int, Part | None]

    @classmethod
    def repeated(cls, habit: Habit, sent: Sequence[Part], turns: Sequence[Any]) -> _Change | None:
        """Return the change of ``sent`` by a habit; None where nothing in it shows what is to stand instead of a part."""
        valued = list(_valued(sent, turns))
        by_digest = {part.digest: part for part, _ in valued}
        replacements = {
            id(part): habit.replacements[place] for part, place in _with_places(sent) if place in habit.replacements
        }
        if any(new is not None and new.digest not in by_digest for new in replacements.values()):
            return None
        substitutes = {part: new and by_digest[new.digest] for part, new in replacements.items()}
        return cls(sent, {id(part): value for part, value in valued}, substitutes)

    def predict(self, data: Mapping[str, Any], size: int, *, computed: bool) -> Prediction | None:
        """Return the prediction of the request behind a body of ``size`` bytes; None where nothing new is in it.

        ``computed``: it is to be computed, and gets a body of its own, which what is done to ``data`` does not reach.
        """
        leaves: list[str] = []
        turns = self._apply(self.sent, leaves)
        fresh = common_prefix(leaves, _leaves(self.sent))
        if fresh == len(leaves):
            return None
        body = {field: value for field, value in data.items() if field not in _NOT_AHEAD} | {turns_field(data): turns}
        return Prediction(copy.deepcopy(body) if computed else {}, size, tuple(leaves), fresh)

    def _apply(self, parts: Sequence[Part], leaves: list[str]) -> list[Any]:
        values = []
        for part in parts:
            value = self.values[id(part)]
            if id(part) not in self.replacements:
                if part.parts and not part.is_text:
                    value = {**value, part.field: self._apply(part.parts, leaves)}
                else:
                    leaves += _leaves([part])
                values.append(value)
            elif (new := self.replacements[id(part)]) is not None:
                instead = self.values[id(new)]
                # A result keeps its own head, which names its call.
                values.append({**value, part.field: instead[new.field]} if part.kind == "result" else instead)
                leaves += _leaves([new])
        return values


def _with_places(parts: Sequence[Part]) -> Iterator[tuple[Part, Place]]:
    """Yield all parts with their places."""
    numbers: Counter[tuple[int, str]] = Counter()

    def visit(parts: Sequence[Part], depth: int) -> Iterator[tuple[Part, Place]]:
        for part in parts:
            kind = "cleared" if part.kind == "result" and is_cleared(part) else part.kind
            yield part, (depth, kind, numbers[depth, kind])
            numbers[depth, kind] += 1
            yield from visit(part.parts, depth + 1)

    return visit(parts, 0)


def _count(parts: Sequence[Part], places: Iterable[Place]) -> int:
    """Return how many parts there are of the depths and kinds of some places."""
    kinds = {place[:2] for place in places}
    return sum(place[:2] in kinds for _, place in _with_places(parts))


def _valued(parts: Sequence[Part], values: Sequence[Any]) -> Iterator[tuple[Part, Any]]:
    """Yield all parts with their JSON."""
    for part, value in zip(parts, values, strict=True):
        yield part, value
        if part.field:
            yield from _valued(part.parts, [value[part.field]] if part.is_text else value[part.field])


def _leaves(parts: Sequence[Part]) -> list[str]:
    return [leaf.digest for part in parts for leaf in part.leaves()]


def common_prefix(one: Sequence[Any], other: Sequence[object], key: Callable[[Any], object] | None = None) -> int:
    """Return the length of the longest prefix that two sequences share; ``key``: of the first one's items."""
    differ = map(ne, one if key is None else map(key, one), other)
    return next(compress(count(), differ), min(len(one), len(other)))
