"""Windowed protocols on any task's items: ``recall@0.5:video-mme``, ``slide:mm-niah/retrieval-image``.

A protocol gives an item a history. Where it can, the question is asked behind the item's own context and what is changed
is the past (a patch was formed, or a survivor conditioned, behind other chunks): the data set's own truth then holds.
Where what is placed differs from the item's own context, the data set's truth may not hold any more: such answers are not
scored, and are compared with re-prefill alone.

The distractors are chunks of other items of the same task, never of the same cluster. Source: Kamera, section 5 and appendix D.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.evals.items import Item, Scored, Setting, Task
from ctxwin.evals.tasks.edits import Edit, duplicated, preceded, reordered, replaced, replaced_share, scattered
from ctxwin.hashing import digest

BLOCK = 8
"""Distractors of an item come from its block of so many items, so that an item never depends on how many are drawn."""


class Rows(NamedTuple):
    """Chunks before the edit and when the question comes: own ones as 0.., distractors behind them."""

    before: tuple[int, ...]
    placed: tuple[int, ...]


Plan = Callable[[Sequence[int], int, Sequence[int], np.random.Generator], Rows]
"""(own chunks in order, place of the asked one, distractors, generator) -> rows."""


@dataclass(frozen=True)
class Protocol:
    """A history that any item can be given.

    Attributes:
        setting: what it is to the arms.
        front: fewest chunks in front of the asked one.
        plan: makes it, for an amount.
        amounts: largest amount, the pattern of its spelling; None where the name takes none.
        others: how many distractors it needs, of an amount and a number of chunks in front.
    """

    name: str
    about: str
    setting: Setting
    front: int
    plan: Callable[[float], Plan]
    amounts: tuple[float, str] | None = None
    others: Callable[[float, int], int] = lambda amount, front: 0

    def parse(self, spelling: str, text: str) -> float:
        """The amount; ValueError naming the protocol where it is none."""
        if self.amounts is None:
            if text:
                raise ValueError(f"protocol {self.name!r} must have no amount, got {spelling!r}")
            return 0.0
        most, pattern = self.amounts
        if not re.fullmatch(pattern, text) or float(text) > most:
            raise ValueError(
                f"protocol {self.name!r} must have an amount 0..{most:g} ({self.name}@1), got {spelling!r}"
            )
        return float(text)


def _past(edit: Callable[[float], Edit]) -> Callable[[float], Plan]:
    """The asked chunk was conditioned behind what ``edit`` makes of what is in front of it now."""

    def at(amount: float) -> Plan:
        def plan(own: Sequence[int], asked: int, others: Sequence[int], rng: np.random.Generator) -> Rows:
            return Rows((*edit(amount)(own[:asked], others, rng), own[asked]), tuple(own))

        return plan

    return at


def _present(edit: Callable[[float], Edit]) -> Callable[[float], Plan]:
    """The asked chunk was conditioned behind the item's own chunks, and is served behind what ``edit`` makes of them."""

    def at(amount: float) -> Plan:
        def plan(own: Sequence[int], asked: int, others: Sequence[int], rng: np.random.Generator) -> Rows:
            return Rows(tuple(own[: asked + 1]), (*edit(amount)(own[:asked], others, rng), *own[asked:]))

        return plan

    return at


def _slide(needed: bool) -> Callable[[float], Plan]:
    """A distractor stood in front and leaves; or the item's own leading chunk leaves."""

    def plan(own: Sequence[int], asked: int, others: Sequence[int], rng: np.random.Generator) -> Rows:
        return Rows(tuple(own), tuple(own[1:])) if needed else Rows((others[0], *own), tuple(own))

    return lambda amount: plan


_COUNT, _SHARE = (16.0, r"\d{1,2}"), (1.0, r"\d+(?:\.\d*)?|\.\d+")
PROTOCOLS: dict[str, Protocol] = {
    p.name: p
    for p in (
        Protocol("slide", "a chunk of another item led the window and left", "slide", 0, _slide(False),
                 others=lambda amount, front: 1),
        Protocol("slide-needed", "the leading chunk left", "slide", 1, _slide(True)),
        Protocol("recall", "the asked chunk's patch was formed with a share of what is in front replaced", "recall", 1,
                 _past(replaced_share), _SHARE, lambda amount, front: int(np.floor(amount * front + 0.5))),
        Protocol("reorder", "the asked chunk's stored patch is of another order", "window", 2,
                 _past(lambda amount: reordered)),
        Protocol("divergent-reorder", "formed behind another order", "recall", 2, _past(lambda amount: reordered)),
        Protocol("divergent-duplicate", "formed with one chunk dropped, its neighbour twice", "recall", 2,
                 _past(lambda amount: duplicated)),
        Protocol("divergent-replace-one", "formed with one chunk replaced", "recall", 1,
                 _past(lambda amount: replaced(1)), others=lambda amount, front: 1),
        Protocol("divergent-replace-all", "formed behind chunks of another item", "recall", 1,
                 _past(lambda amount: replaced_share(1.0)), others=lambda amount, front: front),
        Protocol("changed", "formed with so many chunks replaced", "recall", 1,
                 _past(lambda amount: replaced(int(amount))), _COUNT, lambda amount, front: min(int(amount), front)),
        Protocol("excess", "so many chunks of other items stand in front of all", "recall", 1,
                 _present(lambda amount: preceded(int(amount))), _COUNT, lambda amount, front: int(amount)),
        Protocol("superset", "so many chunks of other items stand between", "recall", 1,
                 _present(lambda amount: scattered(int(amount))), _COUNT, lambda amount, front: int(amount)),
    )
}  # fmt: skip


class ProtocolTask(Task):
    """A protocol on the items of a task.

    Args:
        spelling: ``NAME`` or ``NAME@AMOUNT``.
        base: whose items; of setting ``window``.
        seed: of which distractors and places are taken.

    Items that have too few chunks in front of the asked one (the last where the item does not say) are left out; the others
    keep their index. Raises ValueError for an unknown protocol or amount, or a task that has a history of its own.
    """

    def __init__(self, spelling: str, base: Task, seed: int = 0) -> None:
        name, at, text = spelling.partition("@")
        if name not in PROTOCOLS or (at and not text):
            raise ValueError(f"a protocol must be one of {', '.join(PROTOCOLS)}; got {spelling!r}")
        if base.setting != "window":
            raise ValueError(
                f"a protocol needs a task without a history of its own, got {base.name!r} ({base.setting})"
            )
        self.protocol = PROTOCOLS[name]
        self.amount = self.protocol.parse(spelling, text)
        self.base, self.seed = base, seed
        self.name = f"{name}@{self.amount:g}:{base.name}" if at else f"{name}:{base.name}"
        self.about = f"{base.about}; {self.protocol.about}"
        self.setting = self.protocol.setting
        self.control = base.control
        self.endless = base.endless  # type: ignore[misc]  # of the instance: that of the task it stands on

    def items(self, n: int | None = None) -> Sequence[Item]:
        whole = self.base.items(None if n is None else -(-n // BLOCK) * BLOCK)
        made = []
        for at in range(0, len(whole), BLOCK):
            block = whole[at : at + BLOCK]
            # The last block of a data set may be too small to have distractors in it.
            donors = block if len(block) == BLOCK else whole[max(0, at - BLOCK) : at + BLOCK]
            for item in block if n is None else block[: max(0, n - at)]:
                rng = np.random.default_rng((0x70726F74, self.seed, item.index))
                changed = with_history(item, [d for d in donors if d.cluster != item.cluster], self, rng)
                if changed is not None:
                    made.append(changed)
        if not made:
            raise ValueError(
                f"{self.base.name} must have items with chunks in front of the asked one, got none for {self.name}"
            )
        return made

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """By the task's own rule; not scored where the item's own context is not what is placed."""
        scored = self.base.score(answer, target, meta)
        return scored if meta["own_context"] else replace(scored, score=None)

    def config(self) -> dict[str, Any]:
        return {**self.base.config(), "protocol": self.protocol.name, "amount": self.amount, "protocol_seed": self.seed}


def with_history(item: Item, donors: Sequence[Item], task: ProtocolTask, rng: np.random.Generator) -> Item | None:
    """An item under a protocol; None where too little stands in front of the asked chunk.

    Raises ValueError where the donors have too few chunks.
    """
    own, asked = range(len(item.placed)), len(item.placed) - 1 if item.asked is None else item.asked
    if asked < task.protocol.front:
        return None
    wanted = task.protocol.others(task.amount, asked)
    picked = [(d, c) for d in (donors[int(i)] for i in rng.permutation(len(donors))) for c in dict.fromkeys(d.placed)]
    if len(picked) < wanted:
        raise ValueError(
            f"items near {item.doc_id!r} of {item.task} must lend {wanted} chunks of other clusters, got {len(picked)}; "
            f"take a smaller amount"
        )
    picked = picked[:wanted]
    rows = task.protocol.plan(task.amount)(own, asked, range(len(own), len(own) + wanted), rng)
    shapes = (item.shape, *(d.shape for d, _ in picked))
    return replace(
        item,
        task=task.name,
        load=partial(_joined, item, tuple(picked)),
        count=len(own) + wanted,
        before=() if rows.before == rows.placed and task.setting == "window" else rows.before,
        placed=rows.placed,
        asked=rows.placed.index(own[asked]),
        shape=None if None in shapes else (shapes, rows),
        digest=digest("protocol", task.name, item.digest, [[d.digest, c] for d, c in picked], *map(list, rows)),
        meta={
            **item.meta,
            "own_context": rows.placed == tuple(own),
            "control": rows.before == rows.placed[: len(rows.before)],
        },
    )


def _joined(item: Item, picked: Sequence[tuple[Item, int]]) -> list[Chunk]:
    """The item's placed chunks in order, then the distractors; each donor is loaded once."""
    whole = item.load()
    lenders = {donor.index: donor for donor, _ in picked}
    lent = {index: donor.load() for index, donor in lenders.items()}
    return [*(whole[f] for f in item.placed), *(lent[donor.index][c] for donor, c in picked)]
