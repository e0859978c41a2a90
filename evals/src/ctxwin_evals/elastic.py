"""Elastic Cache (Liu et al., arXiv 2407.18121): merging a prompt's KV, and eviction baselines.

Everything is per layer and item: which slots are kept differs between them, how many does not, so batches stay rectangular.

``window is None``: system prompt, chunks and question are encoded exactly and then thinned out together, as in the paper. Else
the placed chunks were thinned out before the question came, and they and the answer hold ``share`` of their tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from ctxwin.kv.merge import RECENT, bucket_means, bucket_of, budget_slots, most_important
from ctxwin_evals.decoder import Held, Memory, Watch
from ctxwin_evals.importance import Attended, AttendedByHead, AttendedMost


def merged(memory: Memory, anchors: Tensor) -> Memory:
    """KV averaged over the bucket of each anchor, head by head: Elastic Cache, equation 3; see `ctxwin.kv.merge`.

    For MLA, latents and rope keys are averaged.

    Args:
        memory: of S slots.
        anchors: int64 ``[L, B, n]``, ascending, or ``[L, B, H, n]``, each head's own.
    """
    buckets, count = bucket_of(anchors, memory.slots), int(anchors.shape[-1])
    return Memory(bucket_means(memory.k, buckets, count), bucket_means(memory.v, buckets, count))


@dataclass(frozen=True)
class Window:
    """Placed chunks that were thinned out before the question came.

    Attributes:
        head: slots of the system prompt before them; never dropped.
        tokens: how many tokens the chunks had.
        kept: slots that are left of them.
    """

    head: int
    tokens: int
    kept: int


@dataclass(frozen=True, eq=False)
class Policy(ABC):
    """Holds ``share`` of the tokens, also while an answer is generated; it has no state of its own.

    Attributes:
        share: the KV budget, 0..1.
        seen: attention that the slots before the question got so far, float32 ``[L, B, S]``.
        window: the chunks are thinned out already; None: the whole prompt is thinned out after the question.
    """

    share: float
    seen: Tensor
    window: Window | None = None

    watched: ClassVar[Literal["question", "everything", "nothing"]] = "everything"
    """Which passes' attention decides what is kept."""
    attention: ClassVar[type[Attended]] = Attended
    """How it is added up."""

    def of(self, items: Sequence[int]) -> Self:
        """The policy for some items of the batch."""
        return replace(self, seen=self.seen[:, list(items)])

    def compress(self, memory: Memory, attended: Attended) -> Memory:
        """Return the part of a memory that is kept; ``attended`` is reduced with it."""
        count = max(budget_slots(self.share, memory.slots), min(self.least, memory.slots))
        slots = self.chosen(attended.sums, count)
        attended.keep(slots)
        return self.reduced(memory, slots) if count < memory.slots else memory

    @property
    def least(self) -> int:
        """Slots that are kept whatever the budget; a whole prompt keeps its newest one."""
        return int(self.window is None)

    @abstractmethod
    def chosen(self, sums: Tensor, count: int) -> Tensor:
        """Return the ``count`` slots to keep, ascending, int64 ``[L, B, count]``, by attention received ``sums [L, B, S]``."""

    def reduced(self, memory: Memory, slots: Tensor) -> Memory:
        """The memory of the kept slots."""
        return memory.select(slots)

    @abstractmethod
    def drop(self, cache: Held, attended: Attended, head: int) -> None:
        """Drop one slot while an answer is generated; the first ``head`` are the system prompt's."""


class Keeper:
    """A policy at work on one answer, which it keeps within the budget."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.attended = policy.attention(policy.seen)
        self.head = 0 if policy.window is None else policy.window.head
        self._asked = False
        self._tokens = self._least = self._beside = self._made = 0

    @property
    def watch(self) -> Watch | None:
        """Receive the attention weights of the coming pass; None where it needs none."""
        asking = self.policy.window is None and not self._asked
        due = {"question": asking, "everything": True, "nothing": False}[self.policy.watched]
        return self.attended.watch if due else None

    def prompted(self, cache: Held) -> None:
        """Called when system prompt, chunks and question are held; the first token comes from that pass, unaffected."""
        self._asked = True
        self.attended.widen(cache.slots)
        window = self.policy.window
        if window is None:
            self._tokens = cache.slots
            thinned = self.policy.compress(cache.memory, self.attended)
            if thinned.slots < cache.slots:
                cache.replace(thinned)
            self._least = cache.slots
        else:
            self._tokens, self._least = window.tokens, window.kept
            self._beside = cache.slots - window.kept

    def stepped(self, cache: Held) -> None:
        """Called when the KV of one more token was appended."""
        self._made += 1
        if cache.slots > self.allowed:
            self.policy.drop(cache, self.attended, self.head)

    @property
    def allowed(self) -> int:
        """Slots that may be held now: algorithm 1's ``n (1 - r)`` for the n tokens so far, rounded up.

        Protected slots may exceed a small budget; the cache then grows once the budget has caught up. Where the chunks alone
        were thinned out, system prompt and question do not count.
        """
        return self._beside + max(self._least, budget_slots(self.policy.share, self._tokens + self._made))


class Elastic(Policy):
    """Merging around anchors; then elimination at a fixed distance from the newest token (algorithm 1)."""

    watched: ClassVar[Literal["question", "everything", "nothing"]] = "question"

    @property
    def least(self) -> int:
        return 2  # the first and the newest slot

    def chosen(self, sums: Tensor, count: int) -> Tensor:
        return most_important(sums, count, (0, -1) if count else ())

    def reduced(self, memory: Memory, slots: Tensor) -> Memory:
        return merged(memory, slots)

    def drop(self, cache: Held, attended: Attended, head: int) -> None:
        """Algorithm 1: the slot before the newest 25, never the first one (nor the system prompt)."""
        cache.drop(min(max(cache.slots - 1 - RECENT, head, 1), cache.slots - 1))


class ElasticMost(Elastic):
    """Anchors by the most attention that a slot got, instead of the sum."""

    attention = AttendedMost


class ElasticByHead(Elastic):
    """Anchors of each KV head's own (table 3, "head-wise")."""

    attention = AttendedByHead


class ElasticShared(Elastic):
    """Anchors that all layers share (table 3, "shared")."""

    def chosen(self, sums: Tensor, count: int) -> Tensor:
        return super().chosen(sums.mean(0, keepdim=True), count).expand(len(sums), -1, -1)


class H2O(Policy):
    """The Frequency Cache of section 4.1: the slot with the least attention so far is dropped, also while generating.

    As the paper describes H2O: no share of the budget is set aside for recent tokens; only the newest one stays, which no
    other token has attended to yet. Sums are by layer, as Elastic Cache's, so the two differ in what they do with them.
    """

    def chosen(self, sums: Tensor, count: int) -> Tensor:
        return most_important(sums, count, (-1,) if count else ())

    def drop(self, cache: Held, attended: Attended, head: int) -> None:
        """The least attended slot of each layer and item, except the system prompt's and the newest."""
        attended.widen(cache.slots)
        sums = attended.sums.clone()
        sums[..., :head] = sums[..., -1] = torch.inf
        out = sums.argmin(-1, keepdim=True)
        rest = torch.arange(cache.slots - 1, device=out.device).expand(*out.shape[:-1], -1)
        slots = rest + (rest >= out)
        attended.keep(slots)
        cache.replace(cache.memory.select(slots))


class Local(Policy):
    """The Local Cache of section 4.1: the slots furthest from the newest token are dropped.

    As the paper describes it, without the first tokens that StreamingLLM keeps beside the recent ones.
    """

    watched = "nothing"

    def chosen(self, sums: Tensor, count: int) -> Tensor:
        slots = sums.shape[-1]
        return torch.arange(slots - count, slots, device=sums.device).expand(*sums.shape[:2], -1)

    def drop(self, cache: Held, attended: Attended, head: int) -> None:
        """The oldest slot after the system prompt."""
        cache.drop(head)
