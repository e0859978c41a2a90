"""Windowed protocols on any task's items: ``recall@0.5:video-mme``, ``slide:mm-niah/retrieval-image``.

A protocol gives an item a history. Where possible, the question is asked after the item's own context and only the past is
changed (a patch was formed, or a survivor conditioned, after other chunks), so the data set's truth holds. Where what is
placed differs from the item's own context, that truth may no longer hold: such answers are not scored, only compared with
re-prefill.

The distractors are chunks of other items of the same task, never of the same cluster. Source: Kamera, section 5 and appendix D.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.items import Item, Scored, Setting, Task
from ctxwin_evals.tasks import edits
from ctxwin_evals.tasks.edits import Amount, Edit, amount_in

BLOCK = 8
"""Distractors of an item come from its block of this many items, so that an item never depends on how many are drawn."""


@dataclass(frozen=True)
class Protocol:
    """A history that any item can be given.

    Attributes:
        setting: what it is to the arms.
        front: fewest chunks before the asked one.
        edit: changes what precedes the asked chunk.
        amount: what its name takes after ``@``; None for nothing.
        others: how many distractors come in, for an amount and a number of preceding chunks; None: none.
        past: the item's own context is what is placed, and the edited one what was there before; else the reverse.
    """

    name: str
    about: str
    setting: Setting
    front: int
    edit: Edit
    amount: Amount | None = None
    others: Callable[[float, int], int] | None = None
    past: bool = True

    def rows(
        self, context: tuple[int, ...], target: int, others: Sequence[int], rng: np.random.Generator
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Chunks before the edit and when the question comes: own ones as 0.., distractors after them."""
        then = self.edit(context[:target], others, rng, len(others))
        edited = (*then, *context[target:])
        first_order, order = (edited, context) if self.past else (context, edited)
        if self.setting == "slide":
            return first_order, order
        formed = len(then) if self.past else target  # behind these, where the patch of the asked chunk was formed
        return first_order[: formed + 1], order


_COUNT, _SHARE = Amount("a number of chunks (excess@2)", tuple(range(17))), Amount("a share (recall@0.5)", share=True)
PROTOCOLS: dict[str, Protocol] = {
    p.name: p
    for p in (
        Protocol("slide", "a chunk of another item led the window and left", "slide", 0, edits.preceded, None, lambda a, f: 1),
        Protocol("slide-needed", "the leading chunk left", "slide", 1, edits.shortened, past=False),
        Protocol("recall", "the asked chunk's patch was formed with a share of what is in front replaced", "recall", 1,
                 edits.replaced, _SHARE, lambda a, f: int(np.floor(a * f + 0.5))),
        Protocol("reorder", "the asked chunk's stored patch is of another order", "window", 2, edits.reordered),
        Protocol("divergent-reorder", "formed behind another order", "recall", 2, edits.reordered),
        Protocol("divergent-duplicate", "formed with one chunk dropped, its neighbour twice", "recall", 2, edits.duplicated),
        Protocol("divergent-replace-one", "formed with one chunk replaced", "recall", 1, edits.replaced, None, lambda a, f: 1),
        Protocol("divergent-replace-all", "formed behind chunks of another item", "recall", 1, edits.replaced, None,
                 lambda a, f: f),
        Protocol("changed", "formed with so many chunks replaced", "recall", 1, edits.replaced, _COUNT,
                 lambda a, f: min(int(a), f)),
        Protocol("excess", "so many chunks of other items stand in front of all", "recall", 1, edits.preceded, _COUNT,
                 lambda a, f: int(a), past=False),
        Protocol("superset", "so many chunks of other items stand between", "recall", 1, edits.scattered, _COUNT,
                 lambda a, f: int(a), past=False),
    )
}  # fmt: skip


class ProtocolTask(Task):
    """A protocol on the items of a task.

    Args:
        spelling: ``NAME`` or ``NAME@AMOUNT``.
        base: whose items; of setting ``window``.
        seed: of which distractors and places are taken.

    Items that have too few chunks before the asked one (the last where the item does not say) are left out; the others
    keep their index. Raises ValueError for an unknown protocol or amount, or a task that has a history of its own.
    """

    def __init__(self, spelling: str, base: Task, seed: int = 0) -> None:
        name, at, _ = spelling.partition("@")
        if name not in PROTOCOLS:
            raise ValueError(f"a protocol must be one of {', '.join(PROTOCOLS)}; got {spelling!r}")
        if base.setting != "window":
            raise ValueError(f"a protocol needs a task without its own history, got {base.name!r} ({base.setting})")
        self.protocol = PROTOCOLS[name]
        self.amount = amount_in(spelling, self.protocol.amount)
        self.base, self.seed = base, seed
        self.name = f"{name}@{self.amount:g}:{base.name}" if at else f"{name}:{base.name}"
        self.about, self.setting = f"{base.about}; {self.protocol.about}", self.protocol.setting
        self.control = base.control
        self.endless = base.endless  # type: ignore[misc]  # of the instance: that of the task it stands on

    def items(self, n: int | None = None) -> Sequence[Item]:
        whole = self.base.items(None if n is None else -(-n // BLOCK) * BLOCK)
        items = []
        for at in range(0, len(whole), BLOCK):
            block = whole[at : at + BLOCK]
            # The last block of a data set may be too small to have distractors in it.
            donors = block if len(block) == BLOCK else whole[max(0, at - BLOCK) : at + BLOCK]
            for item in block if n is None else block[: max(0, n - at)]:
                rng = np.random.default_rng((0x70726F74, self.seed, item.index))
                changed = with_history(item, [d for d in donors if d.cluster != item.cluster], self, rng)
                if changed is not None:
                    items.append(changed)
        if not items:
            raise ValueError(f"{self.base.name} must have items with earlier chunks, got none for {self.name}")
        return items

    def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
        """The task's own rule; not scored where something other than the item's own context is placed."""
        scored = self.base.score(answer, target, meta)
        return scored if meta["own_context"] else replace(scored, score=None)

    def leave_out(self, error: ValueError) -> None:
        self.base.leave_out(error)

    def config(self) -> dict[str, Any]:
        return {**self.base.config(), "protocol": self.protocol.name, "amount": self.amount, "protocol_seed": self.seed}


def with_history(item: Item, donors: Sequence[Item], task: ProtocolTask, rng: np.random.Generator) -> Item | None:
    """An item under a protocol; None if too few chunks precede the asked one.

    Raises ValueError where the donors have too few chunks.
    """
    context = tuple(range(len(item.placed)))
    target = context[-1] if item.asked is None else item.asked
    if target < task.protocol.front:
        return None
    borrowed = task.protocol.others(task.amount, target) if task.protocol.others else 0
    picked = [(d, c) for d in (donors[int(i)] for i in rng.permutation(len(donors))) for c in dict.fromkeys(d.placed)]
    if len(picked) < borrowed:
        raise ValueError(
            f"items near {item.doc_id!r} of {item.task} must lend {borrowed} chunks of other clusters, got {len(picked)}; "
            f"take a smaller amount"
        )
    picked = picked[:borrowed]
    first_order, order = rows = task.protocol.rows(context, target, range(len(context), len(context) + borrowed), rng)
    shapes = (item.shape, *(d.shape for d, _ in picked))
    return replace(
        item,
        task=task.name,
        load=partial(_load_chunks, item, tuple(picked)),
        count=len(context) + borrowed,
        before=() if first_order == order and task.setting == "window" else first_order,
        placed=order,
        asked=order.index(target),
        shape=None if None in shapes else (shapes, rows),
        digest=digest("protocol", task.name, item.digest, [[d.digest, c] for d, c in picked], *map(list, rows)),
        meta={**item.meta, "own_context": order == context, "control": first_order == order[: len(first_order)]},
    )


def _load_chunks(item: Item, picked: Sequence[tuple[Item, int]]) -> list[Chunk]:
    """Load the item's placed chunks in order, then the distractors; each donor is loaded once."""
    whole = item.load()
    lenders = {donor.index: donor for donor, _ in picked}
    lent = {index: donor.load() for index, donor in lenders.items()}
    return [*(whole[f] for f in item.placed), *(lent[donor.index][c] for donor, c in picked)]
