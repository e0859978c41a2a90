"""Edits behind which chunks keep their KV (lane ``edited``): what that loses, beside the floor of another arithmetic.

``make released`` and then ``python -m evals.studies.clock --model ~/.cache/ctxwin/released/smollm2``; without ``--model`` the
bundled model. Every item is served in these ways and compared with a window that is exact at the same time:

- ``tick``: a clock in the system prompt goes on, and all chunks were computed one to nine minutes earlier;
- ``turns``: each chunk was computed a minute after the one in front of it, behind what the clock had left of that;
- ``edited``: with ``--edit one``, ``cut`` or ``pronoun``, a chunk was replaced by one that states another fact of that form
  (`released_texts`), all others computed before: another code; another thing in a sentence, or another person, of which the
  next chunk tells the rest;
- ``floor``: nothing is reused, and the arithmetic is bfloat16 in place of float32.

Questions: what comes next in the text, or the shapes and colours of frames; of a model of text, the time; or the fact.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ctxwin.audit.replay import Rows, diverge
from ctxwin.chunk import Chunk
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.fidelity import Fidelity
from ctxwin.progress import progress
from ctxwin.tiny.world import make_stream, questions_for, render
from ctxwin.window.layout import Work
from ctxwin.window.window import Window
from ctxwin_evals.console import Json, Threads, new_table, open_model, show
from ctxwin_evals.stats import bootstrap_mean, share_interval, wilson

from .command import Output, Seed, errors, write_result
from .released_texts import MEN, OBJECTS, WOMEN, Texts

EDITED = Fidelity("patched", survivors="refresh", edited_tokens=16)
SYSTEM_PROMPT = "You read what follows. The time is 10:0{minute} on this day."
CHUNKS, TOKENS, ANSWER = 6, 64, 10
_BEST = 1024
PIECES: dict[str, tuple[int, str, tuple[Sequence[object], ...]]] = {
    "one": (0, " is {}.", (range(1000, 10000),)),
    "cut": (-1, " The code of the {} is", (OBJECTS,)),
    "pronoun": (-1, " This is {}.", (WOMEN, MEN)),
}
"""By form: the edited chunk's distance from the asked one, what it says, and words that may take one another's place there."""


@dataclass(frozen=True)
class Item:
    """Chunks as they are once edited, and what is read behind them.

    Attributes:
        original: place of the chunk that was replaced, and that chunk; None where a clock goes on.
        target: tokens of the right answer; () where nobody knows it.
    """

    chunks: list[Chunk]
    queries: dict[str, Encoded]
    original: tuple[int, Chunk] | None = None
    target: tuple[int, ...] = ()


def fact_items(engine: HFEngine, seed: int, n: int, form: str) -> Iterator[Item]:
    """Yield texts in which one fact is another than before, and a question about it."""
    distance, piece, kinds = PIECES[form]
    for context in Texts(engine, seed).contexts(f"facts-{form}", n):
        placed = context.chunks[-context.placed :]
        place, rng = context.asked + distance, np.random.default_rng((seed, context.index))
        ids = placed[place]
        at, size, words = next(
            (at, len(now), [other for other in kind if other != word])
            for kind in kinds
            for word in kind
            for now in [engine.text_ids(piece.format(word))]
            for at in range(len(ids))
            if ids[at : at + len(now)] == now
        )
        original = ids[:at] + engine.text_ids(piece.format(words[int(rng.integers(len(words)))])) + ids[at + size :]
        query = engine.encode(Chunk.tokens(list(context.query)))
        chunks = [Chunk.tokens(list(chunk)) for chunk in placed]
        yield Item(chunks, {"fact": query}, (place, Chunk.tokens(list(original))), context.target)


def text_items(engine: HFEngine, seed: int, n: int) -> Iterator[Item]:
    """Yield passages of natural text, and what is read behind them."""
    time_query = engine.encode(Chunk.tokens(engine.text_ids("\nThe time is 10:0")))
    for context in Texts(engine, seed).contexts(f"text-{CHUNKS}x{TOKENS}", n):
        chunks = [Chunk.tokens(list(ids)) for ids in context.chunks[-CHUNKS:]]
        yield Item(chunks, {"text": engine.encode(Chunk.tokens(list(context.query))), "time": time_query})


def frame_items(engine: HFEngine, seed: int, n: int) -> Iterator[Item]:
    """Yield frames of the bundled model's world, and a question about several of them."""
    for index in range(n):
        rng = np.random.default_rng((seed, index))
        frames = make_stream(rng, CHUNKS, window=CHUNKS)
        question = questions_for(frames, 1, rng, ("multi_hop", "single_hop"))[0].text
        yield Item([Chunk.image(render(frame)) for frame in frames], {"frames": engine.encode_query(question)})


def segments_of(window: Window) -> tuple[Segment, ...]:
    """Return the segments of a window with their KV, computed where it is missing."""
    window.ask("?", 1)
    return window.core.assembly.build_layout(window.core.state, window.fidelity, Work()).segments


def exact_segments(engine: HFEngine, chunks: Sequence[Chunk], minute: int) -> tuple[Segment, ...]:
    """Return the segments of an exact window at this time."""
    with Window(engine, SYSTEM_PROMPT.format(minute=minute), fidelity=Fidelity("exact")) as window:
        window.extend(chunks)
        return segments_of(window)


def edited_segments(engine: HFEngine, chunks: Sequence[Chunk], minute: int, *, turns: bool) -> tuple[Segment, ...]:
    """Return the segments of a window whose clock went on, after all chunks were computed or once a chunk."""
    with ExitStack() as opened:
        first = minute - len(chunks) if turns else 0
        window = opened.enter_context(Window(engine, SYSTEM_PROMPT.format(minute=first), fidelity=EDITED))
        for i, chunk in enumerate(chunks if turns else ()):
            if i:
                window = opened.enter_context(window.fork(SYSTEM_PROMPT.format(minute=first + i)))
            window.append(chunk)
            segments_of(window)
        if not turns:
            window.extend(chunks)
            segments_of(window)
        window = opened.enter_context(window.fork(SYSTEM_PROMPT.format(minute=minute)))
        lanes = {entry.lane for entry in window.chunks}
        if lanes != {"edited"}:
            raise RuntimeError(f"all chunks must keep their KV, got lanes {sorted(lanes)}")
        return segments_of(window)


def replaced_segments(engine: HFEngine, item: Item, minute: int) -> tuple[Segment, ...]:
    """Return the segments of a window in which one chunk was replaced once all were computed."""
    assert item.original is not None
    place, original = item.original
    with Window(engine, SYSTEM_PROMPT.format(minute=minute), fidelity=EDITED) as window:
        window.extend([*item.chunks[:place], original, *item.chunks[place + 1 :]])
        segments_of(window)
        window.evict(window.chunks[place].id)
        window.insert(place, item.chunks[place])
        lanes = {entry.lane for entry in window.chunks[place + 1 :]}
        if lanes != {"edited"}:
            raise RuntimeError(f"all chunks behind the replaced one must keep their KV, got lanes {sorted(lanes)}")
        return segments_of(window)


def greedy_answer(engine: HFEngine, segments: Sequence[Segment], query: Encoded) -> tuple[int, ...]:
    """Return the greedy answer."""
    return tuple(engine.generate(segments, query, Sampling(ANSWER)).token_ids)


def measure(engine: HFEngine, rounded: HFEngine, item: Item, minute: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and question: KL along the exact answer, and if the greedy answer is another, and right."""
    if item.original is None:
        turns = {"tick": False, "turns": True}
        edited = {name: edited_segments(engine, item.chunks, minute, turns=all_) for name, all_ in turns.items()}
    else:
        edited = {"edited": replaced_segments(engine, item, minute)}
    reference = exact_segments(engine, item.chunks, minute)  # last, or edited chunks would find its KV
    floor = exact_segments(rounded, item.chunks, minute)
    ways = {name: (engine, segments) for name, segments in edited.items()} | {"floor": (rounded, floor)}
    for question, query in item.queries.items():
        answer = greedy_answer(engine, reference, query)

        def rows(of: HFEngine, segments: Sequence[Segment], query: Encoded = query, ids: Any = answer) -> Rows:
            return of.forced_logprobs(segments, [(query, ids)], best=_BEST)[0]

        expected = rows(engine, reference)
        for way, (of, segments) in ways.items():
            divergence = diverge(expected, rows(of, segments), ended=False)
            reply, size = greedy_answer(of, segments, query), len(item.target)
            right = [bool(size) and ids[:size] == item.target for ids in (answer, reply)]
            yield {"way": way, "question": question, "kl": divergence.kl, "changed": reply != answer, "right": right}
    for of in (engine, rounded):
        for key in list(of.store.list("span/")):
            of.repo.delete(key)


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures of each question and way, with 95 % intervals over items."""
    result = []
    for question, way in dict.fromkeys((row["question"], row["way"]) for row in rows):
        some = [row for row in rows if (row["question"], row["way"]) == (question, way)]
        clusters, changed = [str(row["item"]) for row in some], [float(row["changed"]) for row in some]
        kls = [row["kl"] for row in some]
        right = [float(row["right"][1]) for row in some if row["right"][0]]
        result.append(
            {
                "question": question, "way": way, "n": len(some),
                "kl": sum(kls) / len(kls), "kl_ci95": bootstrap_mean(kls, clusters),
                "changed": sum(changed) / len(changed), "changed_ci95": share_interval(changed, clusters),
                "right_exact": len(right), "still_right": sum(right),
                "still_right_ci95": wilson(sum(right), len(right)) if right else None,
            }
        )  # fmt: skip
    return result


def _table(summary: Sequence[dict[str, Any]]) -> Any:
    columns = "question | way | n | KL | 95 % | answers changed | 95 % | right, still right | 95 %"
    table = new_table("Chunks behind an edit", columns, left=(0, 1))
    for f in summary:
        kl, changed, right = (f[f"{name}_ci95"] or (0.0, 0.0) for name in ("kl", "changed", "still_right"))
        table.add_row(
            f["question"], f["way"], str(f["n"]), f"{f['kl']:.2g}", f"{kl[0]:.2g}, {kl[1]:.2g}",
            f"{f['changed']:.1%}", f"{changed[0]:.1%}, {changed[1]:.1%}",
            f"{f['right_exact']}, {f['still_right']:.0f}", f"{right[0]:.1%}, {right[1]:.1%}",
        )  # fmt: skip
    return table


def main(
    model: Annotated[str, typer.Option(help="tiny, or the folder of a text model.")] = "tiny",
    edit: Annotated[str, typer.Option(help=f"clock, or a fact of a text model: {', '.join(PIECES)}.")] = "clock",
    n: Annotated[int, typer.Option(help="Items.", min=1)] = 40,
    seed: Seed = 0,
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure what chunks lose that keep their KV when a clock in the system prompt, or a fact in front of them, changes."""
    with errors():
        engine, rounded = (open_model(model, dtype, "cpu", threads) for dtype in ("float32", "bfloat16"))
        if edit not in ("clock", *PIECES):
            raise ValueError(f"edit must be clock, {', '.join(PIECES)}, got {edit!r}")
        items = frame_items if model == "tiny" else text_items if edit == "clock" else partial(fact_items, form=edit)
        rows: list[dict[str, Any]] = []
        with progress("items", n) as advance:
            for index, item in enumerate(items(engine, seed, n)):
                minute = CHUNKS + index % (10 - CHUNKS)
                rows += [{"item": index, **row} for row in measure(engine, rounded, item, minute)]
                advance(1)
        result: dict[str, Any] = {"model": Path(model).name, "edit": edit, "n": n, "seed": seed}
        result["ways"] = summarise(rows)
        write_result(output, f"{edit}-{result['model']}.json", result)
        show(result, as_json, _table(result["ways"]))


if __name__ == "__main__":
    typer.run(main)
