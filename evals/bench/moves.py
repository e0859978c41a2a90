"""The edits that are timed, each in a window that holds all that the edit needs.

| move    | window                              | edit                                   | lanes of the ask behind it      |
|---------|-------------------------------------|----------------------------------------|---------------------------------|
| slide   | five equal chunks                   | the oldest leaves                      | survivors                       |
| recall  | a short chunk and three equal ones  | the second, evicted before, comes back | patched, resident in front      |
| reorder | three predecessors and a chunk      | the last predecessor moves to the front | orbit, resident in front       |
| toggle  | as for recall                       | the second is switched to its clean view | canonical, survivors behind it |

Everything an edit of that kind could need is formed beforehand: canonicals, patches behind the antecedents that a chunk was first
conditioned on, and for a reorder an orbit patch for every chunk behind every set of the others, so that no order needs a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from ctxwin.evals.bench.content import make_chunk
from ctxwin.fidelity import Fidelity
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from ctxwin.chunk import Chunk
    from ctxwin.engines.base import Engine

SYSTEM_PROMPT = "You watch a camera."
QUERY = "What is there now?"
BLOCK = 32
"""The system prompt fills whole blocks of this many tokens, and so does what is reused: a local hit then covers all but the
query, which is the lowest floor there is. With a rest of a block behind it, the floor would compute that rest, too, and be
easier to reach."""
SHORT = 16
"""Most tokens of the chunk that stands in front of what is recalled or toggled: something must condition it."""


@dataclass(frozen=True)
class Scene:
    """A window before its edit.

    Attributes:
        window: with all that the edit needs in its engine's store.
        edit: makes the edit, in a fork of ``window``.
        cached: placements, in order, that a prefix cache was asked about before the edit. A toggle does not change the
            prompt but the KV, so there it is what stands in front of the toggled chunk: the rest must be computed again.
        names: of the placements, for people.
        back: undoes the edit; None where that is not timed.
    """

    window: Window
    edit: Callable[[Window], None]
    cached: tuple[str, ...]
    names: dict[str, str]
    back: Callable[[Window], None] | None = None


@dataclass(frozen=True)
class Move:
    """One kind of edit.

    Attributes:
        name: as in ``--ops``.
        patches: whether its chunks are served with patches; the rank of the others is 0.
        make: builds the scene from an engine, the reused tokens, the fidelity and a seed.
    """

    name: str
    patches: bool
    make: Callable[[Engine, int, Fidelity, int], Scene]


def _open(
    engine: Engine, sizes: Sequence[int], names: Sequence[str], fidelity: Fidelity, seed: int
) -> tuple[Window, list[str]]:
    """A window over chunks of these sizes whose KV is computed, stored and read."""
    chunks: list[Chunk] = [
        make_chunk(engine, n, seed * 100 + i).model_copy(update={"label": name})
        for i, (n, name) in enumerate(zip(sizes, names, strict=True))
    ]
    window = Window(engine, system_prompt=system_prompt_of(engine), fidelity=fidelity)
    ids = window.extend(chunks)
    ask(window)
    return window, ids


def system_prompt_of(engine: Engine) -> str:
    """The system prompt, lengthened until it fills whole blocks; as it is where no length does (see ``system_prompt_tokens``)."""
    for text in (SYSTEM_PROMPT + " Look" * n + end for n in range(2 * BLOCK) for end in ("", ".", " a.", " and see.")):
        if engine.encode_system_prompt(text).tokens % BLOCK == 0:
            return text
    return SYSTEM_PROMPT


def ask(window: Window) -> None:
    """Asks a question whose answer does not matter."""
    window.ask(QUERY, max_tokens=1)


def _shares(tokens: int, parts: int) -> list[int]:
    """``tokens`` in ``parts`` parts that differ by one at most."""
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]


def _slide(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    sizes, names = [tokens // 4, *_shares(tokens, 4)], ["oldest", "A", "B", "C", "D"]
    window, ids = _open(engine, sizes, names, fidelity, seed)
    return Scene(window, lambda w: _quiet(w.slide(1)), tuple(ids), dict(zip(ids, names, strict=True)))


def _recall(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    sizes, names = _behind_a_short_one(tokens), ["front", "recalled", "A", "B"]
    window, ids = _open(engine, sizes, names, fidelity, seed)
    window.compress()  # canonicals and patches instead of conditioned KV
    window.evict(ids[1])
    return Scene(
        window, lambda w: _quiet(w.recall(ids[1])), (ids[0], ids[2], ids[3]), dict(zip(ids, names, strict=True))
    )


def _reorder(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    names = ["P1", "P2", "P3", "T"]
    window, ids = _open(engine, _shares(tokens, 4), names, fidelity, seed)
    for target in ids:
        others = [i for i in ids[:3] if i != target]
        # The target stands behind all three; a predecessor may come to stand behind any of the others.
        sets = [others] if target == ids[3] else [list(s) for n in (1, 2) for s in combinations(others, n)]
        for front in sets:
            with window.fork() as branch:
                for gone in set(branch.ids) - {target, *front}:
                    branch.evict(gone)
                branch.reorder([*front, target])
                branch.prepare_orbit(front)
    order = [ids[2], ids[0], ids[1], ids[3]]
    return Scene(window, lambda w: w.reorder(order), tuple(ids), dict(zip(ids, names, strict=True)))


def _toggle(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    sizes, names = _behind_a_short_one(tokens), ["front", "toggled", "A", "B"]
    window, ids = _open(engine, sizes, names, fidelity, seed)
    with window.fork() as branch:
        branch.toggle(ids[1], conditioned=False)
        ask(branch)  # forms the canonical
    return Scene(
        window,
        lambda w: w.toggle(ids[1], conditioned=False),
        (ids[0],),
        dict(zip(ids, names, strict=True)),
        back=lambda w: w.toggle(ids[1], conditioned=True),
    )


def _behind_a_short_one(tokens: int) -> list[int]:
    short = min(SHORT, max(1, tokens // 8))
    return [short, *_shares(tokens - short, 3)]


def _quiet(_: object) -> None:
    """Drops what an edit returns."""


MOVES = {
    move.name: move
    for move in (
        Move("slide", False, _slide),
        Move("recall", True, _recall),
        Move("reorder", True, _reorder),
        Move("toggle", False, _toggle),
    )
}
