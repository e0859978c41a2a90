"""A window brought to a given list of chunks with the fewest edits: for callers who say what they want to see.

Chat APIs and agent frameworks pass the whole conversation every time. What stayed is recognised by content and keeps its
KV, what is missing is evicted, what was there before is recalled, and only what is new is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ctxwin.window import edits

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.window.state import Placed, State
    from ctxwin.window.window import Window


@dataclass(frozen=True)
class Edit:
    """One step of `plan_sync`.

    Attributes:
        ids: the placements that leave, come back (one), or are placed, all in their new order.
        at: index of what comes back or is new; the same index into the wanted list.
    """

    op: Literal["evict", "reorder", "recall", "insert"]
    ids: tuple[str, ...] = ()
    at: int = 0


def sync(window: Window, chunks: Iterable[Chunk]) -> list[str]:
    """Makes ``window`` place exactly ``chunks`` in this order; returns their placement ids in order.

    All or nothing: where a chunk cannot be placed, the window is as it was. It may then be over its budget, as after
    `Window.append`. Every edit is a version and an event of its own.

    Raises:
        BudgetExceeded, BadMedia, ChunkUnavailable, UnsupportedModel: see `Window.append`.

    Cost: encoding what is new; O(placed x chunks) comparisons where the lists differ.
    """
    wanted, core = list(chunks), window.core
    with core.writing() as state:
        steps = synced(state, wanted, core.place, core.returning)
        for new, edit, ids in steps:  # nothing can fail from here on
            appended = edit.op == "insert" and edit.at == len(new.placed) - 1
            core.commit(new, "append" if appended else edit.op, ids)
            state = new
    return [p.id for p in state.placed]


def synced(
    state: State,
    wanted: Sequence[Chunk],
    place: Callable[[State, Chunk], Placed],
    returning: Callable[[State, str], Placed],
    *,
    move: bool = True,
) -> list[tuple[State, Edit, tuple[str, ...]]]:
    """The versions on the way from ``state`` to one that places ``wanted``, each with its edit and the placements concerned.

    Args:
        place: a new placement of a chunk; returning: an evicted one, by id, as it is placed again.
        move: see `plan_sync`.
    """
    named = [(p.id, p.chunk_id) for p in state.placed]
    gone = [(p.id, p.chunk_id) for p in state.evicted]
    steps: list[tuple[State, Edit, tuple[str, ...]]] = []
    for edit in plan_sync(named, gone, [c.id for c in wanted], move=move):
        ids = edit.ids
        if edit.op == "evict":
            leaving = set(ids)
            state = edits.evicted(state, [p for p in state.placed if p.id in leaving])
        elif edit.op == "reorder":
            state = edits.reordered(state, ids)
        elif edit.op == "recall":
            state, _ = edits.recalled(state, returning(state, ids[0]), edit.at)
        else:
            placed = place(state, wanted[edit.at])
            state, ids = edits.inserted(state, placed, edit.at).edited(arrivals=state.arrivals + 1), (placed.id,)
        steps.append((state, edit, ids))
    return steps


def plan_sync(
    placed: Sequence[tuple[str, str]], evicted: Sequence[tuple[str, str]], wanted: Sequence[str], *, move: bool = True
) -> list[Edit]:
    """The edits that turn ``placed`` into ``wanted``.

    Args:
        placed, evicted: (placement id, content id) in prompt order, and oldest eviction first.
        wanted: content ids in order.
        move: whether what stands elsewhere than wanted moves there. Else it leaves, and comes anew: right where the same
            content stands at many places and one of them is no more the other than any, as the texts between turns do.

    At most one eviction (of several chunks), at most one reordering, then one recall or insertion for each chunk that is
    not placed, front to back. No chunk leaves that is wanted, and none is inserted that can be recalled.
    """
    contents = [content for _, content in placed]
    match = dict(_common(contents, wanted))  # wanted index -> placed index
    spare: defaultdict[str, list[int]] = defaultdict(list)  # placed elsewhere than wanted
    for i in sorted(set(range(len(placed))) - set(match.values()), reverse=True):
        spare[contents[i]].append(i)
    for j, content in enumerate(wanted):
        if move and j not in match and spare[content]:
            match[j] = spare[content].pop()
    kept = [placed[match[j]][0] for j in sorted(match)]
    staying = set(kept)
    leaving = tuple(placement for placement, _ in placed if placement not in staying)
    back: defaultdict[str, list[str]] = defaultdict(list)
    forgotten = max(0, len(evicted) + len(leaving) - edits.MAX_EVICTED)  # the oldest make room for those that leave
    for placement, content in evicted[forgotten:]:
        back[content].append(placement)
    plan = [Edit("evict", leaving)] if leaving else []
    if kept != [placement for placement, _ in placed if placement in staying]:
        plan.append(Edit("reorder", tuple(kept)))
    for j, content in enumerate(wanted):
        if j not in match:
            known = back[content]  # the one that left last has the most recent neighbours
            plan.append(Edit("recall", (known.pop(),), j) if known else Edit("insert", (), j))
    return plan


def _common(have: Sequence[str], want: Sequence[str]) -> list[tuple[int, int]]:
    """A longest common subsequence as (index into ``want``, index into ``have``), front-most where there are several."""
    front = 0
    while front < min(len(have), len(want)) and have[front] == want[front]:
        front += 1
    pairs = [(i, i) for i in range(front)]
    a, b = have[front:], want[front:]
    longest = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            same = longest[i + 1][j + 1] + 1 if a[i] == b[j] else 0
            longest[i][j] = max(same, longest[i + 1][j], longest[i][j + 1])
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append((front + j, front + i))
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
