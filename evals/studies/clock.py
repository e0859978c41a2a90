"""A clock in the system prompt: what chunks lose that keep their KV when it goes on (lane ``edited``), beside the floor.

``make released`` and then ``python -m evals.studies.clock --model ~/.cache/ctxwin/released/smollm2``; without ``--model`` the
bundled model. Every item is served in three ways and compared with a window that is exact at the same time:

- ``tick``: all chunks were computed one to nine minutes earlier;
- ``turns``: each chunk was computed a minute after the one in front of it, behind what the clock had left of that;
- ``floor``: nothing is reused, and the arithmetic is bfloat16 in place of float32.

Questions: what comes next in the text, or the shapes and colours of frames; and, of a model of text, the time itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from ctxwin.tiny.world import make_stream, questions_for, render
from ctxwin.window.layout import Work
from ctxwin.window.window import Window
from ctxwin_evals.console import Json, Threads, errors, new_table, open_model, progress, show
from ctxwin_evals.stats import bootstrap_mean, share_interval

from .command import Output, Seed, write_result
from .released_texts import Texts

EDITED = Fidelity("patched", survivors="refresh", edited_tokens=16)
SYSTEM_PROMPT = "You read what follows. The time is 10:0{minute} on this day."
CHUNKS, TOKENS, ANSWER = 6, 64, 10
_BEST = 1024
Item = tuple[list[Chunk], dict[str, Encoded]]


def text_items(engine: HFEngine, seed: int, n: int) -> Iterator[Item]:
    """Yield passages of natural text, and what is read behind them."""
    time_query = engine.encode(Chunk.tokens(engine.text_ids("\nThe time is 10:0")))
    for context in Texts(engine, seed).contexts(f"text-{CHUNKS}x{TOKENS}", n):
        chunks = [Chunk.tokens(list(ids)) for ids in context.chunks[-CHUNKS:]]
        yield chunks, {"text": engine.encode(Chunk.tokens(list(context.query))), "time": time_query}


def frame_items(engine: HFEngine, seed: int, n: int) -> Iterator[Item]:
    """Yield frames of the bundled model's world, and a question about several of them."""
    for index in range(n):
        rng = np.random.default_rng((seed, index))
        frames = make_stream(rng, CHUNKS, window=CHUNKS)
        question = questions_for(frames, 1, rng, ("multi_hop", "single_hop"))[0].text
        yield [Chunk.image(render(frame)) for frame in frames], {"frames": engine.encode_query(question)}


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


def greedy_answer(engine: HFEngine, segments: Sequence[Segment], query: Encoded) -> tuple[int, ...]:
    """Return the greedy answer."""
    return tuple(engine.generate(segments, query, Sampling(ANSWER)).token_ids)


def measure(engine: HFEngine, rounded: HFEngine, item: Item, minute: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and question: KL along the exact answer, top-1 flips, and if the greedy answer is another."""
    chunks, queries = item
    tick, turns = (edited_segments(engine, chunks, minute, turns=turns) for turns in (False, True))
    reference = exact_segments(engine, chunks, minute)  # last, or edited chunks would find its KV
    floor = exact_segments(rounded, chunks, minute)
    ways = {"tick": (engine, tick), "turns": (engine, turns), "floor": (rounded, floor)}
    for question, query in queries.items():
        answer = greedy_answer(engine, reference, query)

        def rows(of: HFEngine, segments: Sequence[Segment], query: Encoded = query, ids: Any = answer) -> Rows:
            return of.forced_logprobs(segments, [(query, ids)], best=_BEST)[0]

        expected = rows(engine, reference)
        for way, (of, segments) in ways.items():
            divergence = diverge(expected, rows(of, segments), ended=False)
            changed = greedy_answer(of, segments, query) != answer
            yield {"way": way, "question": question, "kl": divergence.kl, "changed": changed}
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
        result.append(
            {
                "question": question, "way": way, "n": len(some),
                "kl": sum(kls) / len(kls), "kl_ci95": bootstrap_mean(kls, clusters),
                "changed": sum(changed) / len(changed), "changed_ci95": share_interval(changed, clusters),
            }
        )  # fmt: skip
    return result


def _table(summary: Sequence[dict[str, Any]]) -> Any:
    table = new_table("A clock that goes on", "question | way | n | KL | 95 % | answers changed | 95 %", left=(0, 1))
    for f in summary:
        kl, changed = (f[f"{name}_ci95"] or (0.0, 0.0) for name in ("kl", "changed"))
        table.add_row(
            f["question"], f["way"], str(f["n"]), f"{f['kl']:.2g}", f"{kl[0]:.2g}, {kl[1]:.2g}",
            f"{f['changed']:.1%}", f"{changed[0]:.1%}, {changed[1]:.1%}",
        )  # fmt: skip
    return table


def main(
    model: Annotated[str, typer.Option(help="tiny, or the folder of a text model.")] = "tiny",
    n: Annotated[int, typer.Option(help="Items.", min=1)] = 40,
    seed: Seed = 0,
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure what a clock in the system prompt costs chunks that keep their KV."""
    with errors():
        engine, rounded = (open_model(model, dtype, "cpu", threads) for dtype in ("float32", "bfloat16"))
        items = frame_items if model == "tiny" else text_items
        rows: list[dict[str, Any]] = []
        with progress("items", n) as advance:
            for index, item in enumerate(items(engine, seed, n)):
                minute = CHUNKS + index % (10 - CHUNKS)
                rows += [{"item": index, **row} for row in measure(engine, rounded, item, minute)]
                advance(1)
        result: dict[str, Any] = {"model": Path(model).name, "n": n, "seed": seed, "ways": summarise(rows)}
        write_result(output, f"clock-{result['model']}.json", result)
        show(result, as_json, _table(result["ways"]))


if __name__ == "__main__":
    typer.run(main)
