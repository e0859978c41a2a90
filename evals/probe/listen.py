"""What arms say: every question behind every arm, held against the exact re-prefill of the same chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ctxwin.evals.arms import Arm
from ctxwin.evals.decoder import Decoder
from ctxwin.evals.group import Group
from ctxwin.evals.items import Item
from ctxwin.evals.patching import Patcher
from ctxwin.evals.probe.asking import Asker, divergence
from ctxwin.evals.probe.contexts import Context, Kind, Question, normal

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk

BATCH = 16
_TOKENS = 8192
"""Most context tokens that share a forward."""


@dataclass(frozen=True)
class Heard:
    """One question behind one arm.

    Attributes:
        next_kl, kl: KL(re-prefill || arm) of the next token, and averaged along re-prefill's greedy answer; nats.
        flip: whether the arm's greedy answer is another one.
        right: whether it is the true one, where a truth is known and the answer is re-prefill's own.
        control: KL(oracle || arm) along the same answer, where both were asked.
        stored, over: bytes kept beyond the canonicals, and of the chunks they belong to in bf16.
        extra: further figures of the arm.
    """

    arm: str
    cluster: str
    kind: Kind
    next_kl: float
    kl: float
    flip: bool
    right: bool | None = None
    control: float | None = None
    stored: int = 0
    over: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class Clock:
    """What is left of a probe's time, stage by stage.

    Args:
        seconds: the whole budget.
        progress: called with a stage's name, what is done of it and how much there is.
    """

    def __init__(self, seconds: float, progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        self.begun = time.monotonic()
        self.seconds = seconds
        self.progress = progress

    def until(self, share: float) -> float:
        """When a stage must end that may run until this share of the budget is used."""
        return self.begun + share * self.seconds

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.begun


class Listener:
    """Asks contexts' questions behind arms.

    Args:
        decoder: the model.
        patcher: how deficits are compressed where an arm does not say.
        system_prompt: system prompt.
        max_tokens: longest answer.
    """

    def __init__(self, decoder: Decoder, patcher: Patcher, system_prompt: str, max_tokens: int) -> None:
        self.decoder = decoder
        self.patcher = patcher
        self.system_prompt = system_prompt
        self.asker = Asker(decoder, max_tokens)
        self._batch = 0

    def group(self, items: Sequence[Item], patcher: Patcher | None = None) -> Group:
        """Items of one shape, read with the probe's system prompt."""
        return Group(self.decoder, items, self.patcher if patcher is None else patcher, self.system_prompt)

    def hear(
        self,
        contexts: Sequence[Context],
        arms: Sequence[Arm],
        *,
        kinds: Sequence[Kind] = ("one", "cross", "yours"),
        items: Sequence[Item] | None = None,
        patcher: Patcher | None = None,
    ) -> Iterator[Heard]:
        """Every arm's answers to the questions of some kinds; contexts of one shape.

        Args:
            items: what to place instead of the contexts' own items (a recall, for example).

        Cost: a re-prefill, a greedy answer a question, and for each arm its serving and one pass a question.
        """
        group = self.group([bare(c.item) for c in contexts] if items is None else items, patcher)
        numbers = [q for q in range(len(contexts[0].questions)) if contexts[0].questions[q].kind in kinds]
        exact = group.memory(group.exact)
        texts = {q: [c.questions[q].text for c in contexts] for q in numbers}
        answers = {q: self.asker.greedy(exact, texts[q], group.begin) for q in numbers}
        said = {q: self.asker.forced(exact, texts[q], group.begin, answers[q]) for q in numbers}
        del exact
        oracle: dict[int, list[Tensor]] = {}
        for arm in arms:
            served = arm.serve(group)
            some = [b for b, one in enumerate(served) if one is not None]
            if not some:
                continue
            memory = group.memory([one.spans for one in served if one is not None])
            for q in numbers:
                heard = self.asker.forced(
                    memory, [texts[q][b] for b in some], group.begin, [answers[q][b] for b in some]
                )
                if arm.name == "oracle":
                    oracle[q] = heard
                for i, b in enumerate(some):
                    one = served[b]
                    assert one is not None
                    kls = divergence(said[q][b], heard[i])
                    flip = bool((heard[i].argmax(-1) != torch.tensor(answers[q][b])).any())
                    yield Heard(
                        arm.name, contexts[b].item.cluster, contexts[b].questions[q].kind, float(kls[0]),
                        float(kls.mean()), flip, self.right(contexts[b].questions[q], answers[q][b], flip),
                        float(divergence(oracle[q][b], heard[i]).mean()) if q in oracle else None,
                        one.stored, one.over, one.extra,
                    )  # fmt: skip

    def right(self, question: Question, answer: Sequence[int], flip: bool) -> bool | None:
        """Whether an answer is the true one; None where no truth is known, or where only a flip of it is."""
        if question.truth is None:
            return None
        right = normal(self.asker.text(answer)) == question.truth
        return right and not flip

    def batches(self, contexts: Sequence[Context]) -> Iterator[list[Context]]:
        """Contexts that share forwards: of one shape, no more than memory allows."""
        if not contexts:
            return
        if not self._batch:
            self._batch = max(1, min(BATCH, _TOKENS // self.group([bare(contexts[0].item)]).context_tokens))
        for at in range(0, len(contexts), BATCH):
            shapes: dict[object, list[Context]] = {}
            for context in contexts[at : at + BATCH]:
                key = ("alone", context.item.index) if context.item.shape is None else context.item.shape
                shapes.setdefault(key, []).append(context)
            for same in shapes.values():
                for begin in range(0, len(same), self._batch):
                    yield same[begin : begin + self._batch]


def bare(item: Item) -> Item:
    """An item without its strangers, which then need not be encoded."""
    count = len(item.placed)
    return item if item.count == count else replace(item, count=count, load=partial(_first, item.load, count))


def _first(load: Callable[[], Sequence[Chunk]], count: int) -> list[Chunk]:
    return list(load())[:count]
