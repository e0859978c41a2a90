"""The edits that are timed, each in a window that has everything the edit needs.

| move    | window                              | edit                                     | lanes of the ask behind it     |
|---------|-------------------------------------|------------------------------------------|--------------------------------|
| slide   | five equal chunks                   | the oldest leaves                        | survivors                      |
| recall  | a short chunk and three equal ones  | the second, evicted before, comes back   | patched, resident in front     |
| reorder | three predecessors and a chunk      | the last predecessor moves to the front  | orbit, resident in front       |
| toggle  | as for recall                       | the second is switched to its clean view | canonical, survivors behind it |
| ahead   | as for a slide, in an exact window  | the oldest leaves, then the engine idles | resident                       |

An exact window whose engine does not idle computes what the prefix cache does. Everything that an edit could need is formed
beforehand: canonicals, patches after the antecedents that a chunk was first conditioned on, and for a reorder what
`Maintenance.prepare_orbit` forms, so that no order needs a forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ctxwin.chunk import Chunk, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.window.idle import prefiller_of
from ctxwin.window.window import Window

SYSTEM_PROMPT = "You watch a camera."
QUERY = "What is there now?"
BLOCK = 32
"""The system prompt fills whole blocks of this many tokens, and so does what is reused: a local hit then covers all but the
query, which is the lowest floor there is. With a rest of a block after it, the floor would compute that rest, too, and be
easier to reach."""
SHORT = 16
"""The largest chunk before what is recalled or toggled, in tokens: something must condition it."""


TEXT_TOKENS = 8
"""Least text before a picture."""
_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "wi", "xo", "zu", " ", " ", "\n")


@dataclass(frozen=True)
class Scene:
    """A window before its edit.

    Attributes:
        window: with all that the edit needs in its engine's store.
        edit: makes the edit, in a fork of ``window``.
        cached: placements, in order, that a prefix cache was asked about before the edit. A toggle does not change the
            prompt but the KV, so there it is what precedes the toggled chunk: the rest must be computed again.
        names: of the placements, for people.
        back: undoes the edit; None where that is not timed.
    """

    window: Window
    edit: Callable[[Window], object]
    cached: Sequence[str]
    names: dict[str, str]
    back: Callable[[Window], object] | None = None


def _open(
    engine: Engine,
    sizes: Sequence[int],
    labels: Sequence[str],
    fidelity: Fidelity,
    seed: int,
    prefill: Literal["idle"] | None = None,
) -> tuple[Window, list[str], dict[str, str]]:
    """A window over chunks of these sizes whose KV is computed, stored and read; its placements, and their names."""
    chunks: list[Chunk] = [
        make_chunk(engine, n, seed * 100 + i).model_copy(update={"label": name})
        for i, (n, name) in enumerate(zip(sizes, labels, strict=True))
    ]
    window = Window(engine, system_prompt=system_prompt_of(engine), fidelity=fidelity, prefill=prefill)
    ids = window.extend(chunks)
    ask(window)
    return window, ids, dict(zip(ids, labels, strict=True))


def make_chunk(engine: Engine, tokens: int, seed: int) -> Chunk:
    """A chunk of exactly ``tokens`` tokens: some text and the largest square picture that fits after it.

    Text alone where the model has no eyes or the chunk is too small. The same seed gives the same chunk.
    Cost: one run of the vision tower for each size tried, rarely more than one. Raises ValueError for ``tokens`` < 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    rng = np.random.default_rng(seed)
    side = math.isqrt(max(0, tokens - TEXT_TOKENS - 2)) if engine.spec.vision else 0
    while side >= 2:
        picture = Chunk.image(rng.integers(0, 256, (28 * side, 28 * side, 3), dtype=np.uint8), keep_source=False)
        remaining = tokens - engine.encode(picture).tokens
        if remaining == 0:
            return picture
        if remaining > 0:
            lead = TokensPart(ids=words(engine, remaining, rng))
            return picture.model_copy(update={"parts": (lead, *picture.parts)})
        side -= max(1, -remaining // (2 * side))  # one side less takes about that many tokens
    return Chunk.tokens(list(words(engine, tokens, rng)))


def words(engine: Engine, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """``count`` ordinary token ids, none of them special: those of random words."""
    ids: tuple[int, ...] = ()
    while len(ids) < count:
        text = "".join(_SYLLABLES[i] for i in rng.integers(0, len(_SYLLABLES), 2 * count + 8))
        ids += engine.encode(Chunk.text(text)).token_ids
    return ids[:count]


def system_prompt_of(engine: Engine) -> str:
    """The system prompt, lengthened until it fills whole blocks; unchanged where no length does."""
    for text in (SYSTEM_PROMPT + " Look" * n + end for n in range(2 * BLOCK) for end in ("", ".", " a.", " and see.")):
        if engine.encode_system_prompt(text).tokens % BLOCK == 0:
            return text
    return SYSTEM_PROMPT


def ask(window: Window) -> None:
    """Ask a question whose answer does not matter."""
    window.ask(QUERY, max_tokens=1)


def _shares(tokens: int, parts: int) -> list[int]:
    """``tokens`` in ``parts`` parts that differ by one at most."""
    return [tokens // parts + (i < tokens % parts) for i in range(parts)]


def _slide(engine: Engine, tokens: int, fidelity: Fidelity, seed: int, prefill: Literal["idle"] | None = None) -> Scene:
    sizes, labels = [tokens // 4, *_shares(tokens, 4)], ["oldest", "A", "B", "C", "D"]
    window, ids, names = _open(engine, sizes, labels, fidelity, seed, prefill)
    return Scene(window, lambda w: w.slide(1), ids, names)


def _ahead(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    """As `_slide`, but exact whatever ``fidelity`` allows, and with time to compute before the ask."""

    def edit(window: Window) -> None:
        window.slide(1)
        prefiller_of(window.engine).drain()

    return replace(_slide(engine, tokens, Fidelity("exact"), seed, "idle"), edit=edit)


def _recall(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    labels = ["front", "recalled", "A", "B"]
    window, ids, names = _open(engine, _behind_a_short_one(tokens), labels, fidelity, seed)
    window.maintenance.compress()  # canonicals and patches instead of conditioned KV
    window.evict(ids[1])
    return Scene(window, lambda w: w.recall(ids[1], "chronological"), [ids[0], *ids[2:]], names)


def _reorder(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    window, ids, names = _open(engine, _shares(tokens, 4), ["P1", "P2", "P3", "T"], fidelity, seed)
    window.maintenance.prepare_orbit(ids[:3])
    order = [ids[2], ids[0], ids[1], ids[3]]
    return Scene(window, lambda w: w.reorder(order), ids, names)


def _toggle(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    labels = ["front", "toggled", "A", "B"]
    window, ids, names = _open(engine, _behind_a_short_one(tokens), labels, fidelity, seed)
    with window.fork() as branch:
        branch.toggle(ids[1], conditioned=False)
        ask(branch)  # forms the canonical
    edit, back = (lambda w, on=on: w.toggle(ids[1], conditioned=on) for on in (False, True))
    return Scene(window, edit, ids[:1], names, back)


def _behind_a_short_one(tokens: int) -> list[int]:
    short = min(SHORT, max(1, tokens // 8))
    return [short, *_shares(tokens - short, 3)]


MOVES = {"slide": _slide, "recall": _recall, "reorder": _reorder, "toggle": _toggle, "ahead": _ahead}
"""The edits by their names in ``--ops``: scenes from an engine, the reused tokens, the fidelity and a seed."""
PATCHED = {"recall", "reorder"}
"""Those whose chunks are served with patches; the rank of others is 0."""
