"""The edits that are timed, each in a window that has everything the edit needs, and what others would ask in its place.

| move    | window                              | edit                                        | served by                      |
|---------|-------------------------------------|---------------------------------------------|--------------------------------|
| slide   | five chunks                         | the oldest leaves                           | survivors                      |
| steady  | eight chunks                        | the oldest leaves, one comes, four times    | survivors, the new is computed |
| recall  | a short chunk and three equal ones  | the second, evicted before, comes back      | patched, resident in front     |
| fork    | four chunks                         | a branch gets 32 tokens                     | resident, the 32 are computed  |
| toggle  | as for recall                       | the second is switched to its clean view    | canonical, survivors behind it |
| untried | as for recall                       | the same, where no canonical of it is held  | the same, which is computed    |
| reorder | three predecessors and a chunk      | the last predecessor moves to the front     | orbit, resident in front       |
| oldest  | four chunks                         | the oldest moves to the end                 | survivors, it is computed      |
| newest  | four chunks                         | the newest moves to the front               | survivor, others are computed  |
| copy    | four chunks                         | the oldest is appended once more            | resident, the copy is computed |

What an edit could need is formed beforehand: canonicals, patches after the antecedents that a chunk was first conditioned on, and
for a reorder what `Maintenance.prepare_orbit` forms. Others ask the engine by its prefix cache alone:

- ``floor``: the same prompt, of which the cache holds everything but what is new.
- ``prefix``: the same prompt; the cache holds the one before the edit.
- ``trim``: the older half leaves when the prompt is full, so that most asks extend a cached one.
- ``append``: nothing leaves or moves, what comes back or changes its place is appended as a copy; with twice the window the
  prompt begins again at the newest chunks.
- ``look back``: trims, and appends such copies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ctxwin.chunk import Chunk, TokensPart
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.window.window import Window

SYSTEM_PROMPT = "You watch a camera."
QUERY = "What is there now?"
BLOCK = 32
"""The system prompt fills whole blocks of this many tokens, as does what is reused: else the floor would compute a rest, too."""
SHORT = 16
"""The largest chunk before what is recalled or toggled, in tokens: something must condition it."""
TEXT_TOKENS = 8
"""Least text before a picture."""
_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "wi", "xo", "zu", " ", " ", "\n")


@dataclass(frozen=True)
class Scene:
    """A window before its edits.

    Attributes:
        window: with all that the edits need in its engine's store.
        edits: of a fork of ``window``, each followed by an ask that is timed; one that returns a window has that asked.
        prompts: labels of the chunks that others ask about, by `ARMS`. The first is what was asked before the edit, not timed; a
            toggle changes KV and no prompt, so there it is what precedes the toggled chunk: the rest is computed again.
        chunks: by label.
    """

    window: Window
    edits: Sequence[Callable[[Window], object]]
    prompts: dict[str, tuple[str, ...]]
    chunks: dict[str, Chunk]


def _open(
    engine: Engine, sizes: Sequence[int], labels: str, fidelity: Fidelity, seed: int
) -> tuple[Window, list[str], dict[str, Chunk]]:
    """A window over chunks of these sizes whose KV is computed, stored and read; its placements, and chunks by label."""
    named = enumerate(zip(labels.split(), sizes, strict=True))
    chunks = {name: _labelled(engine, n, seed * 100 + i, name) for i, (name, n) in named}
    window = Window(engine, system_prompt=system_prompt_of(engine), fidelity=fidelity)
    ids = window.extend(list(chunks.values()))
    ask(window)
    return window, ids, chunks


def _labelled(engine: Engine, tokens: int, seed: int, label: str) -> Chunk:
    return make_chunk(engine, tokens, seed).model_copy(update={"label": label})


def _prompts(
    first: str, after: str, *, floor: tuple[str, ...] = (), trim: tuple[str, ...] = (), append: tuple[str, ...] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the prompts of `ARMS`; those who have no way of their own ask as the window does."""
    same, floor = (first, after), floor or (after, after)
    return dict(zip(ARMS, (floor, same, trim or same, append or same, trim or append or same), strict=True))


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


def _slide(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    first = "oldest A B C D"
    window, _, chunks = _open(engine, [tokens // 4, *_shares(tokens, 4)], first, fidelity, seed)
    prompts = _prompts(first, "A B C D", trim=(first, "B C D"), append=(first, first))
    return Scene(window, [lambda w: w.slide(1)], prompts, chunks)


def _steady(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    def run(first: int, last: int) -> str:
        return " ".join(map(str, range(first, last + 1)))

    sizes, first = _shares(tokens, 8), run(1, 8)
    window, _, chunks = _open(engine, sizes, first, fidelity, seed)
    chunks |= {str(i): _labelled(engine, sizes[0], seed * 100 + i, str(i)) for i in range(9, 17)}

    def edit(window: Window, new: int) -> None:
        window.slide(1)
        window.append(chunks[str(new)])

    trim = first, *(run(5, last) for last in range(9, 13))
    append = first, *(run(1, last) for last in range(9, 16)), run(9, 16)
    prompts = _prompts(first, run(2, 9), floor=(run(2, 8), run(2, 9)), trim=trim, append=append)
    return Scene(window, [partial(edit, new=new) for new in range(9, 13)], prompts, chunks)


def _recall(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    window, ids, chunks = _open(engine, _behind_a_short_one(tokens), "front recalled A B", fidelity, seed)
    window.maintenance.compress()  # canonicals and patches instead of conditioned KV
    window.evict(ids[1])
    first = "front A B"
    prompts = _prompts(first, "front recalled A B", append=(first, f"{first} recalled"))
    return Scene(window, [lambda w: w.recall(ids[1], "chronological")], prompts, chunks)


def _fork(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    window, _, chunks = _open(engine, _shares(tokens, 4), "A B C D", fidelity, seed)
    chunks["new"] = _labelled(engine, BLOCK, seed * 100 + 4, "new")

    def edit(window: Window) -> Window:
        branch = window.fork()
        branch.append(chunks["new"])
        return branch

    first = "A B C D"
    same = first, f"{first} new"
    return Scene(window, [edit], _prompts(*same, floor=same), chunks)


def _toggle(engine: Engine, tokens: int, fidelity: Fidelity, seed: int, *, tried: bool = True) -> Scene:
    after = "front toggled A B"
    window, ids, chunks = _open(engine, _behind_a_short_one(tokens), after, fidelity, seed)
    if tried:
        with window.fork() as branch:
            branch.toggle(ids[1], conditioned=False)
            ask(branch)  # forms the canonical
    return Scene(window, [lambda w: w.toggle(ids[1], conditioned=False)], _prompts("front", after), chunks)


def _reorder(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    first = "P1 P2 P3 T"
    window, ids, chunks = _open(engine, _shares(tokens, 4), first, fidelity, seed)
    window.maintenance.prepare_orbit(ids[:3])
    order = [ids[2], ids[0], ids[1], ids[3]]
    prompts = _prompts(first, "P3 P1 P2 T", append=(first, f"{first} P1 P2 T"))
    return Scene(window, [lambda w: w.reorder(order)], prompts, chunks)


def _moved(engine: Engine, tokens: int, fidelity: Fidelity, seed: int, *, after: str, copies: str) -> Scene:
    first = "A B C D"
    window, ids, chunks = _open(engine, _shares(tokens, 4), first, fidelity, seed)
    by_label = dict(zip(first.split(), ids, strict=True))

    def edit(window: Window) -> None:
        window.reorder([by_label[label] for label in after.split()])
        advice = window.plan().reorder
        if advice is not None and advice.cheaper == "copy":
            window.undo()
            window.extend([chunks[label] for label in copies.split()])

    return Scene(window, [edit], _prompts(first, after, append=(first, f"{first} {copies}")), chunks)


def _copy(engine: Engine, tokens: int, fidelity: Fidelity, seed: int) -> Scene:
    first = "A B C D"
    window, _, chunks = _open(engine, _shares(tokens, 4), first, fidelity, seed)
    same = first, f"{first} A"
    return Scene(window, [lambda w: w.append(chunks["A"])], _prompts(*same, floor=same), chunks)


def _behind_a_short_one(tokens: int) -> list[int]:
    short = min(SHORT, max(1, tokens // 8))
    return [short, *_shares(tokens - short, 3)]


ARMS = ("floor", "prefix", "trim", "append", "look back")
"""Who asks for the same by the prefix cache alone: the floor, and four users of it."""
MOVES: dict[str, Callable[[Engine, int, Fidelity, int], Scene]] = {
    "slide": _slide, "steady": _steady, "recall": _recall, "fork": _fork, "toggle": _toggle,
    "untried": partial(_toggle, tried=False), "reorder": _reorder, "oldest": partial(_moved, after="B C D A", copies="A"),
    "newest": partial(_moved, after="D A B C", copies="A B C"), "copy": _copy,
}  # fmt: skip
"""The edits by their names in ``--ops``: scenes from an engine, the reused tokens, the fidelity and a seed."""
PATCHED = {"recall", "reorder"}
"""Those whose chunks are served with patches; the rank of others is 0."""
COMPUTED = {"steady", "fork", "untried", "oldest", "newest", "copy"}
"""Those whose ask computes chunks: what it stores would serve the next repetition, which gets content of its own."""
