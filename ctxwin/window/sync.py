"""Synchronise a window with a given list of chunks by the fewest edits.

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
    from ctxwin.window.core import WindowCore
    from ctxwin.window.state import Placed, State


@dataclass(frozen=True)
class Edit:
    """One step of `plan_sync`.

    Attributes:
        ids: the placements that leave, come back (one), or are placed, all in their new order.
        at: index of what comes back or is new; the same index into the target list.
    """

    op: Literal["evict", "reorder", "recall", "insert"]
    ids: tuple[str, ...] = ()
    at: int = 0


def sync(core: WindowCore, chunks: Iterable[Chunk]) -> list[str]:
    """Make a window place exactly ``chunks`` in this order; return their placement ids in order.

    All or nothing: where a chunk cannot be placed, the window is as it was. It may then be over its budget, as after
    `Window.append`. Every edit is a version and an event of its own.

    Raises:
        BudgetExceeded, BadMedia, ChunkUnavailable, UnsupportedModel: see `Window.append`.

    Cost: encoding what is new; O(placed x chunks) comparisons where the lists differ.
    """
    target = list(chunks)
    with core.writing() as state:
        steps = sync_steps(state, target, core.place, core.evicted_entry)
        for new, edit, ids in steps:  # nothing can fail from here on
            appended = edit.op == "insert" and edit.at == len(new.placed) - 1
            core.commit(new, "append" if appended else edit.op, ids)
            state = new
    return [p.id for p in state.placed]


def sync_steps(
    state: State,
    target: Sequence[Chunk],
    place: Callable[[State, Chunk], Placed],
    evicted_entry: Callable[[State, str], Placed],
    *,
    move: bool = True,
) -> list[tuple[State, Edit, tuple[str, ...]]]:
    """Return the versions on the way from ``state`` to one that places ``target``, each with its edit and its placements.

    Args:
        place: a new placement of a chunk; evicted_entry: an evicted one, by id, as it is placed again.
        move: see `plan_sync`.
    """
    named = [(p.id, p.chunk_id) for p in state.placed]
    evicted = [(p.id, p.chunk_id) for p in state.evicted]
    steps: list[tuple[State, Edit, tuple[str, ...]]] = []
    for edit in plan_sync(named, evicted, [c.id for c in target], move=move):
        ids = edit.ids
        if edit.op == "evict":
            state = edits.evict(state, state.placed.having(set(ids)))
        elif edit.op == "reorder":
            state = edits.reorder(state, ids)
        elif edit.op == "recall":
            state, _ = edits.recall(state, evicted_entry(state, ids[0]), edit.at)
        else:
            entry = place(state, target[edit.at])
            if edit.at == len(state.placed):
                state = edits.append(state, entry)
            else:
                state = edits.insert(state, entry, edit.at).edited(arrivals=state.arrivals + 1)
            ids = (entry.id,)
        steps.append((state, edit, ids))
    return steps


def plan_sync(
    current: Sequence[tuple[str, str]], evicted: Sequence[tuple[str, str]], target: Sequence[str], *, move: bool = True
) -> list[Edit]:
    """Return the edits that turn ``current`` into ``target``.

    Args:
        current, evicted: (placement id, content id) in prompt order, and oldest eviction first.
        target: content ids in order.
        move: whether a chunk placed elsewhere moves to its target. Else it leaves and is placed anew: right where the same
            content stands at many places and one of them is no more the other than any, as the texts between turns do.

    At most one eviction (of several chunks), at most one reordering, then one recall or insertion for each chunk that is
    not placed, front to back. No chunk leaves that is wanted, and none is inserted that can be recalled.
    """
    contents = [content for _, content in current]
    match = dict(_common(contents, target))  # wanted index -> placed index
    spare: defaultdict[str, list[int]] = defaultdict(list)  # placed elsewhere than wanted
    for i in sorted(set(range(len(current))) - set(match.values()), reverse=True):
        spare[contents[i]].append(i)
    for j, content in enumerate(target):
        if move and j not in match and spare[content]:
            match[j] = spare[content].pop()
    retained = [current[match[j]][0] for j in sorted(match)]
    staying = set(retained)
    leaving = tuple(placement for placement, _ in current if placement not in staying)
    back: defaultdict[str, list[str]] = defaultdict(list)
    forgotten = max(0, len(evicted) + len(leaving) - edits.MAX_EVICTED)  # the oldest make room for those that leave
    for placement, content in evicted[forgotten:]:
        back[content].append(placement)
    plan = [Edit("evict", leaving)] if leaving else []
    if retained != [placement for placement, _ in current if placement in staying]:
        plan.append(Edit("reorder", tuple(retained)))
    for j, content in enumerate(target):
        if j not in match:
            candidates = back[content]  # the one that left last has the most recent neighbours
            plan.append(Edit("recall", (candidates.pop(),), j) if candidates else Edit("insert", (), j))
    return plan


def _common(have: Sequence[str], want: Sequence[str]) -> list[tuple[int, int]]:
    """Return a longest common subsequence as (index into ``want``, index into ``have``), front-most where there are several."""
    begin = 0
    while begin < min(len(have), len(want)) and have[begin] == want[begin]:
        begin += 1
    pairs = [(i, i) for i in range(begin)]
    a, b = have[begin:], want[begin:]
    longest = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            same = longest[i + 1][j + 1] + 1 if a[i] == b[j] else 0
            longest[i][j] = max(same, longest[i + 1][j], longest[i][j + 1])
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append((begin + j, begin + i))
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
