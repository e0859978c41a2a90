"""What each method keeps of a prompt's KV, and drops while an answer is generated (Elastic Cache, sections 3.3 and 4.1).

Two moments. ``window is None``: system prompt, chunks and question are encoded exactly and then thinned out together, as in the
paper; the first token comes from the exact pass. Otherwise the placed chunks were thinned out before the question came, and
only what is generated is still managed: chunks and answer together hold ``share`` of their tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ctxwin.evals.decoder import Memory, Watch
from ctxwin.evals.elastic.merging import Attended, budget_slots, merged, most_important
from ctxwin.evals.generation import Held, Keeper, Policy

RECENT = 25
"""Newest slots that fixed-point elimination leaves alone (section 4.1, 'Implementation Details')."""


@dataclass(frozen=True)
class Window:
    """Placed chunks that were thinned out before the question came.

    Attributes:
        head: slots of the system prompt in front of them; never dropped.
        tokens: how many tokens the chunks had.
        kept: slots that are left of them.
    """

    head: int
    tokens: int
    kept: int


@dataclass(frozen=True, eq=False)
class Budgeted(Policy):
    """A policy that holds ``share`` of the tokens.

    Attributes:
        share: the KV budget, 0..1.
        seen: attention that the slots in front of the question got so far, float32 ``[L, B, S]``.
        window: the chunks are thinned out already; None: the whole prompt is thinned out behind the question.
    """

    share: float
    seen: Tensor
    window: Window | None = None

    def of(self, items: Sequence[int]) -> Self:
        """For some items of the batch."""
        return replace(self, seen=self.seen[:, list(items)])

    @abstractmethod
    def compress(self, memory: Memory, attended: Attended) -> Memory:
        """What is kept of a memory; ``attended`` follows it."""

    @abstractmethod
    def start(self) -> BudgetKeeper: ...


class BudgetKeeper(Keeper):
    """Counts what a budget allows for."""

    def __init__(self, policy: Budgeted) -> None:
        self.policy = policy
        self.attended = Attended(policy.seen)
        self.head = 0 if policy.window is None else policy.window.head
        self._asked = False
        self._tokens = self._least = self._beside = self._made = 0

    @property
    def watch(self) -> Watch | None:
        """What is thinned out by attention watches the question; without, it is not needed."""
        return self.attended.watch if self.policy.window is None and not self._asked else None

    def prompted(self, held: Held) -> None:
        self._asked = True
        self.attended.widen(held.slots)
        window = self.policy.window
        if window is None:
            self._tokens = held.slots
            thinned = self.policy.compress(held.memory, self.attended)
            if thinned.slots < held.slots:
                held.replace(thinned)
            self._least = held.slots
        else:
            self._tokens, self._least = window.tokens, window.kept
            self._beside = held.slots - window.kept

    def stepped(self, held: Held) -> None:
        self._made += 1
        if held.slots > self.allowed:
            self.drop(held)

    @property
    def allowed(self) -> int:
        """Slots that may be held now: algorithm 1's ``n (1 - r)`` for the n tokens so far, rounded up.

        Protected slots may be more than a small budget allows for; the cache then grows once the budget has caught up. Header
        and question are not counted where the chunks alone were thinned out.
        """
        return self._beside + max(self._least, budget_slots(self.policy.share, self._tokens + self._made))

    @abstractmethod
    def drop(self, held: Held) -> None:
        """Drops one slot."""


class Elastic(Budgeted):
    """Merging around anchors; then elimination at a fixed distance from the newest token (algorithm 1)."""

    def compress(self, memory: Memory, attended: Attended) -> Memory:
        """The most important slots, the first and the newest among them, and everything else averaged into them."""
        slots = memory.slots
        count = max(budget_slots(self.share, slots), min(2, slots))
        anchors = most_important(attended.sums, count, (0, -1) if slots else ())
        attended.keep(anchors)
        return merged(memory, anchors) if count < slots else memory

    def start(self) -> BudgetKeeper:
        return _FixedPoint(self)


class _FixedPoint(BudgetKeeper):
    def drop(self, held: Held) -> None:
        """Algorithm 1: the slot in front of the newest 25, never the first one (nor the system prompt)."""
        held.drop(min(max(held.slots - 1 - RECENT, self.head, 1), held.slots - 1))


class H2O(Budgeted):
    """The Frequency Cache of section 4.1: the slot that got the least attention so far goes, while generating, too.

    As the paper describes H2O: no share of the budget is set aside for recent tokens; only the newest one, which no other
    has looked at yet, stays. Sums are by layer, as Elastic Cache's, so that the two differ in what they do with them.
    """

    def compress(self, memory: Memory, attended: Attended) -> Memory:
        slots = memory.slots
        whole = self.window is None
        count = max(budget_slots(self.share, slots), int(whole and slots > 0))
        kept = most_important(attended.sums, count, (-1,) if count else ())
        attended.keep(kept)
        return memory.kept(kept) if count < slots else memory

    def start(self) -> BudgetKeeper:
        return _LeastAttended(self)


class _LeastAttended(BudgetKeeper):
    @property
    def watch(self) -> Watch | None:
        return self.attended.watch

    def drop(self, held: Held) -> None:
        """The least attended slot of each layer and item, but the system prompt's and the newest."""
        self.attended.widen(held.slots)
        sums = self.attended.sums.clone()
        sums[..., : self.head] = sums[..., -1] = torch.inf
        out = sums.argmin(-1, keepdim=True)
        rest = torch.arange(held.slots - 1, device=out.device).expand(*out.shape[:-1], -1)
        kept = rest + (rest >= out)
        self.attended.keep(kept)
        held.replace(held.memory.kept(kept))


class Local(Budgeted):
    """The Local Cache of section 4.1: the slots most distant from the newest token go.

    As the paper describes it, without the first tokens that StreamingLLM keeps beside the recent ones.
    """

    def compress(self, memory: Memory, attended: Attended) -> Memory:
        slots = memory.slots
        count = max(budget_slots(self.share, slots), int(self.window is None and slots > 0))
        recent = torch.arange(slots - count, slots, device=memory.k.device)
        attended.keep(recent.expand(*attended.sums.shape[:2], -1))
        return memory.kept(recent) if count < slots else memory

    def start(self) -> BudgetKeeper:
        return _Oldest(self)


class _Oldest(BudgetKeeper):
    @property
    def watch(self) -> Watch | None:
        return None

    def drop(self, held: Held) -> None:
        """The oldest slot behind the system prompt."""
        held.drop(self.head)


METHODS: dict[str, type[Budgeted]] = {"elastic": Elastic, "h2o": H2O, "local": Local}
