"""Prediction of what leaves a window before its next question, from what left before the last ones.

A turn is what happens between two answers. Each turn every rule says which chunks leave, and a rule is trusted while it was
right of late (`_Score`). Rules read states only: they ask no policy that could have side effects, and change nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from ctxwin.errors import BudgetExceeded
from ctxwin.window import edits
from ctxwin.window.defaults import LeastRecentlyRead
from ctxwin.window.placed_list import difference
from ctxwin.window.protocols import Eviction, Ranking
from ctxwin.window.state import Placed, State

_TURNS = 5
"""Turns from which the size of the next one is told."""
_WEIGHT, _TRUSTED = 0.4, 0.55
"""Weight of the last turn in a rule's score, and the least score that is trusted: a rule that was always right may be wrong once,
and one that was wrong must be right twice."""

_VIEW = attrgetter("id", "conditioned")


@dataclass
class _Score:
    """Mean of a rule's rightness over its turns, the last ones counting most. One in which nothing left, as it said, is none."""

    value: float = 0.5

    def add(self, predicted: Sequence[Placed], departed: bool, *, right: bool) -> None:
        if predicted or departed:
            self.value += _WEIGHT * (right - self.value)


Rule = Callable[["SlidePredictor", State, int], list[Placed]]
"""(predictor, state, tokens that are still to arrive) -> what leaves the state."""


def _by_budget(turns: SlidePredictor, state: State, expected: int) -> list[Placed]:
    """The window makes room by its own eviction for as much as arrived in the last turns."""
    try:
        reserved, tail, ranked = turns.reserved + expected, edits.free_tail(state), turns.ranked(state)
        return edits.leaving_for_budget(state, ranked, reserved, mark=turns.mark, tail=tail, exact=turns.exact)
    except BudgetExceeded:
        return []


def _by_count(turns: SlidePredictor, state: State, expected: int) -> list[Placed]:
    """As many leave as before the last question, in the order of the eviction."""
    count = len(turns.places) - len(turns.changes(state)[0])
    leaving = edits.free_tail(state)[: max(0, count)]
    stay = [p.id for p in (*leaving, *edits.pending_evictions(state))]
    others = edits.free_in_order(state, turns.ranked(state), stay)
    return leaving + list(islice(others, max(0, count - len(leaving))))


def _by_place(turns: SlidePredictor, state: State, expected: int) -> list[Placed]:
    """Chunks leave from the same places as before the last question."""
    base = turns.base.placed if turns.base is not None else ()
    return state.placed.having({base[i].id for i in turns.places if i < len(base)})


_RULES: tuple[Rule, ...] = (_by_budget, _by_count, _by_place)


@dataclass
class SlidePredictor:
    """Prediction of one window's turns from its last ones. An edit costs what has changed since the last answer, and the order
    of the eviction; a question O(n log n) for n placed chunks.

    Attributes:
        base: the state behind the last answer; None before the first.
        reserved: tokens that the window keeps free when it makes room, or that its last question and answer took.
        mark: tokens that it falls to.
        eviction: what leaves first.
        places: where the chunks stood that left in the last turn, by index.
        exact: False for a window that corrects survivors by removal patches.
    """

    base: State | None = None
    reserved: int = 0
    mark: int | None = None
    eviction: Eviction = field(default_factory=LeastRecentlyRead)
    places: tuple[int, ...] = ()
    exact: bool = True
    _noted: bool = False
    _lazy: set[str] = field(default_factory=set)  # chunks that an edit of this turn has leave with the next break
    _arrivals: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_TURNS))
    _early: dict[Rule, list[Placed]] = field(default_factory=dict)
    _scores: dict[tuple[Rule, bool], _Score] = field(
        default_factory=lambda: {(rule, late): _Score() for rule in _RULES for late in (False, True)}
    )

    def __post_init__(self) -> None:
        # A window that fills up is expected to make room as its eviction says, from the first time on.
        self._scores[_by_budget, False].value = self._scores[_by_budget, True].value = _TRUSTED

    def note_room(self, reserved: int, mark: int | None) -> None:
        """Note how the window has just made room, or found that it has enough."""
        self.reserved, self.mark, self._noted = reserved, mark, True

    def note_lazy(self, state: State) -> None:
        """Note which chunks leave with the next break of the prefix: no rule is to foresee them."""
        self._lazy |= {p.id for p in edits.pending_evictions(state)}

    def forget(self) -> None:
        """Drop the turn's first state, which holds what is forgotten; the turn is not judged."""
        self.base, self._early, self._lazy = None, {}, set()

    def ranked(self, state: State) -> Iterable[str]:
        """Return ids in the order of the eviction where that follows from the state, else the oldest first, as most policies have
        it: rules are only trusted where that was right."""
        ranked = self.eviction.ranked(state) if isinstance(self.eviction, Ranking) else None
        return LeastRecentlyRead().ranked(state) if ranked is None else ranked

    def changes(self, state: State) -> tuple[list[Placed], list[Placed]]:
        """Return what left `base` up to ``state``, but for what left by a lazy edit, and what arrived; neither in order."""
        old, new = difference(self.base.placed.contents if self.base else frozenset(), state.placed.contents)
        both = {p.id for p in old} & {p.id for p in new}
        return [p for p in old if p.id not in both | self._lazy], [p for p in new if p.id not in both]

    def unchanged(self, state: State) -> bool:
        """Return True if there was no edit since the last answer."""
        return self.base is not None and self.base.version == state.version

    def leaving(self, state: State) -> list[Placed]:
        """Return what leaves ``state`` before the next question, as the best rule says; nothing where none is trusted."""
        if self.base is None:
            return []
        late, expected = self._remaining(state)
        rule = max(_RULES, key=lambda rule: self._scores[rule, late].value)  # the first of equals
        return rule(self, state, expected) if self._scores[rule, late].value >= _TRUSTED else []

    def begin(self, state: State) -> None:
        """Begin a turn behind an answer of ``state``."""
        self.base, self._lazy = state, set()
        self._early = {rule: rule(self, state, self._remaining(state)[1]) for rule in _RULES}

    def end(self, state: State, reserved: int) -> None:
        """End a turn with a question to ``state``, and judge the rules by it.

        Args:
            reserved: tokens of the question and its answer.
        """
        base = self.base
        if base is not None and not self.unchanged(state):
            base_ids, present, left = {*base.placed.ids}, {*state.placed.ids}, {p.id for p in self.changes(state)[0]}
            departed = tuple(i for i, placement in enumerate(base.placed.ids) if placement in left)
            arrived = [p for p in state.placed if p.id not in base_ids]
            # No rule foresees what an edit had leave lazily: for an early one before the turn, for a late one until its end.
            early_lazy, lazy = {p.id for p in edits.pending_evictions(base)} - present, self._lazy - present
            entries = (p.replace(pending={"evict": ""}) if p.id in lazy else p for p in (*base.placed, *arrived))
            full = base.replace(placed=tuple(entries))
            for rule, early in self._early.items():
                leaving = {p.id for p in early} | early_lazy
                staying = [(p.id, p.conditioned) for p in base.placed if p.id not in leaving]
                right = follows(state, staying) and len(state.placed) == len(staying) + len(arrived)
                self._scores[rule, False].add(early, bool(departed), right=right)
                late = [p for p in rule(self, full, 0) if p.id not in lazy]
                right = survivors(full, [*late, *(p for p in full.placed if p.id in lazy)]) == survivors(state, ())
                self._scores[rule, True].add(late, bool(departed), right=right)
            self.places = departed
            self._arrivals.append((len(arrived), sum(p.tokens for p in arrived)))
        self.forget()
        if not self._noted:
            self.reserved = reserved

    def _remaining(self, state: State) -> tuple[bool, int]:
        """Return True if all that a turn brings has arrived in ``state``, and the tokens that are still to arrive."""
        if not self._arrivals:
            return False, 0
        arrived = [p.tokens for p in self.changes(state)[1]]
        count, tokens = (statistics.median_high(column) for column in zip(*self._arrivals, strict=True))
        late = len(arrived) >= max(1, count)
        return late, 0 if late else max(0, tokens - sum(arrived))


def survivors(state: State, leaving: Sequence[Placed]) -> list[tuple[str, bool]]:
    """Return id and view of each chunk that stays, in order."""
    return [*map(_VIEW, state.placed.without(p.id for p in leaving))]


def follows(state: State, prefix: Sequence[tuple[str, bool]]) -> bool:
    """Return True if ``state`` begins with ``prefix``."""
    return [*map(_VIEW, islice(state.placed, len(prefix)))] == list(prefix)
