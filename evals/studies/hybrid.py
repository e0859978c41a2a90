"""``python -m evals.studies.hybrid``: what a trained hybrid answers from chunks that did not see each other.

Held-out items of the bundled world, on a model that binds while it prefills. The states of a window are composed of its chunks'
maps (`ctxwin.kv.states`): taken from one forward over everything, from each chunk alone, from another order, or from each chunk
alone with a low-rank patch; or the first tokens of each chunk are computed where it stands, as HYPIC does (arXiv 2607.01299).
What counts is the answer of a forward over what is placed. Then the chunk that decides an answer leaves, by its KV alone, from
the states too, or forgotten; and windows slide along streams (``--streams``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.results import Generation
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.fidelity import Fidelity
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.kv.relocate import relocate
from ctxwin.kv.states import factors, state_deficit
from ctxwin.progress import progress
from ctxwin.tiny.world import Frame, all_questions, make_item, make_stream, render
from ctxwin.tiny.world import Task as WorldTask
from ctxwin.window.ask import kl
from ctxwin.window.window import Window
from ctxwin_evals.console import Json, new_table, show
from ctxwin_evals.stats import share_interval, wilson

from .command import SYSTEM_PROMPT, Output, errors, write_result
from .scenes import isolated, scene_questions

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.kv.layout import SpanKV

SEED = 981_000_000  # items of its own
ASKED = Sampling(max_tokens=4, logprobs=-1)
KV_RANK, STATE_RANKS, SEAMS = 4, (1, 4, 16, 32, 64), (4, 16)
WINDOW_RANKS, WINDOWED = (8, 16, 32, 64), 100
"""Of patches that windows form, in bf16, of KV and states alike; and the most items of each."""
WINDOW, SLIDES, QUESTIONS = 3, 8, 6
"""Of a stream: chunks placed, slides, and questions after each."""


def lay_out(encoded: Sequence[Encoded], spans: Sequence[SpanKV | None]) -> list[Segment]:
    """Return consecutive segments; the system prompt's span is exact, the others' states are composed."""
    segments, at = [], 0
    for i, (one, span) in enumerate(zip(encoded, spans, strict=True)):
        segments.append(Segment(one, at, span, approximate=span is not None and i > 0, span_key=f"{i}"))
        at += one.advance
    return segments


def arms(engine: HFEngine, encoded: Sequence[Encoded], whole: Generation) -> Iterator[tuple[str, list[Segment], float]]:
    """Ways to serve the chunks of one item: name, layout, and the numbers of its patches as a share of KV and maps."""
    import torch

    kv, header = engine.spec.kv, encoded[0]
    exact = [whole.captured[i] for i in range(len(encoded))]
    starts = [segment.start for segment in lay_out(encoded, exact)]
    alone = [exact[0]]
    for one in encoded[1:]:
        alone.append(engine.prefill([Segment(header, 0, exact[0])], one, header.advance))
    moved = [relocate(span, kv, start) for span, start in zip(alone, starts, strict=True)]
    yield "composed of exact maps", lay_out(encoded, exact), 0
    yield "blind", lay_out(encoded, moved), 0
    both = zip(exact, moved, strict=True)
    yield "KV exact, maps blind", lay_out(encoded, [replace(e, states=m.states) for e, m in both]), 0
    both = zip(exact, moved, strict=True)
    yield "maps exact, KV blind", lay_out(encoded, [replace(m, states=e.states) for e, m in both]), 0
    size = sum(span.nbytes for span in alone[1:]) / 4
    for rank in (None, *STATE_RANKS):
        patched, numbers = [exact[0]], 0
        for i in range(1, len(encoded)):
            patch = form_patch(exact[i], alone[i], kv, rank=KV_RANK, dtype=torch.float32)
            if rank is not None:
                lack = state_deficit(exact[i].states, exact[i - 1].states, alone[i].states)
                patch = replace(patch, states=factors(lack, rank, None, torch.float32))
            span = apply_patch(alone[i], patch, kv, starts[i])
            patched.append(span if patch.states else replace(span, states=alone[i].states))
            numbers += sum(t.numel() for t in patch.tensors().values())
        name = f"KV rank {KV_RANK}" + ("" if rank is None else f", states rank {rank}")
        yield name, lay_out(encoded, patched), numbers / size
    for width in SEAMS:
        cut = [encoded[0]]
        stored: list[SpanKV | None] = [exact[0]]
        for one in encoded[1:]:
            front = one.part(0, width)
            rest = one.part(width, one.tokens)
            preceding = [Segment(header, 0, exact[0]), Segment(front, header.advance)]
            cut += [front, rest]
            stored += [None, engine.prefill(preceding, rest, header.advance + front.advance)]
        at = 0
        layout: list[Segment] = []
        for piece, stored_span in zip(cut, stored, strict=True):
            here: SpanKV | None = None if stored_span is None else relocate(stored_span, kv, at)
            approximate = bool(at) and here is not None
            layout.append(Segment(piece, at, here, approximate=approximate, span_key=str(len(layout))))
            at += piece.advance
        yield f"seam of {width} tokens", layout, 0


def changed(
    engine: HFEngine,
    encoded: Sequence[Encoded],
    whole: Generation,
    query: Encoded,
    about: int,
    rng: np.random.Generator,
) -> Iterator[tuple[str, list[Segment], Generation]]:
    """The same spans after an edit: name, layout, and what a forward over what is then placed answers.

    The chunk asked ``about`` is recalled after the others.
    """
    n = len(encoded)
    last = [*(i for i in range(n) if i != about), about]
    stored = dict(whole.captured)
    alone = engine.prefill([Segment(encoded[0], 0, stored[0])], encoded[about], encoded[0].advance)
    for name, order, spans in (
        ("slid", [0, *range(2, n)], stored),
        ("reversed", [0, *range(n - 1, 0, -1)], stored),
        ("another order", [0, *(1 + int(i) for i in rng.permutation(n - 1))], stored),
        ("recalled behind the others, as kept", last, stored),
        ("recalled behind the others, alone", last, {**stored, about: alone}),
    ):
        one = [encoded[i] for i in order]
        bare = lay_out(one, [None] * len(one))
        yield name, moved(engine, one, [spans[i] for i in order]), engine.generate(bare, query, ASKED)


def moved(engine: HFEngine, encoded: Sequence[Encoded], spans: Sequence[SpanKV]) -> list[Segment]:
    """Spans one after the other, each relocated to its place."""
    starts = [segment.start for segment in lay_out(encoded, spans)]
    return lay_out(encoded, [relocate(s, engine.spec.kv, start) for s, start in zip(spans, starts, strict=True)])


def measure(engine: HFEngine, task: WorldTask, n: int, done: Callable[[int], None]) -> list[dict[str, Any]]:
    """One row for each way: right answers, agreement with a forward, mean KL, patches' share of bytes."""
    rows: dict[str, list[tuple[bool, bool, float, float]]] = defaultdict(list)
    for i in range(n):
        item = make_item(SEED + i, task, 2 + i % 3, conflict=0.8)
        question = item.questions[0]
        encoded, whole, query = read(engine, item.frames, question.text)

        def note(
            name: str, got: Generation, want: Generation, share: float = 0.0, answer: str = question.answer
        ) -> None:
            right, same = got.text.strip() == answer, got.text == want.text
            rows[name].append((right, same, kl(want.logprobs, got.logprobs), share))

        note("re-prefill", whole, whole)
        for name, layout, share in arms(engine, encoded, whole):
            note(name, engine.generate(layout, query, ASKED, salt=name), whole, share)
        rng = np.random.default_rng((SEED, i))
        for name, layout, want in changed(engine, encoded, whole, query, 1 + question.frame, rng):
            note(name, engine.generate(layout, query, ASKED, salt=name), want)
        done(1)
    table_rows = []
    for name, samples in rows.items():
        right, agreed = sum(row[0] for row in samples), sum(row[1] for row in samples)
        table_rows.append({
            "way": name, "n": n, "right": right / n, "agreed": agreed / n, "ci95": list(wilson(agreed, n)),
            "kl": sum(row[2] for row in samples) / n, "patches": sum(row[3] for row in samples) / n,
        })  # fmt: skip
    return table_rows


def read(engine: HFEngine, frames: Sequence[Frame], text: str) -> tuple[list[Encoded], Generation, Encoded]:
    """The system prompt and frames encoded, one forward over them with its KV captured, and the question encoded."""
    chunks = [Chunk.image(render(frame)) for frame in frames]
    encoded = [engine.encode_system_prompt(SYSTEM_PROMPT), *(engine.encode(chunk) for chunk in chunks)]
    query = engine.encode_query(text)
    bare = [replace(segment, capture=True) for segment in lay_out(encoded, [None] * len(encoded))]
    return encoded, engine.generate(bare, query, ASKED), query


def measure_eviction(engine: HFEngine, n: int, done: Callable[[int], None]) -> list[dict[str, Any]]:
    """Of the chunk that decides an answer, once it has left: how often is it still answered what it said, and what it decided?"""
    rows: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for i in range(n):
        item = make_item(SEED + i, "multi_hop", 2 + i % 3, conflict=0.8)
        decided = item.questions[0]
        evicted_frame = decided.antecedents[0]
        of_frame = (q for q in all_questions(item.frames) if q.frame == evicted_frame)
        told_question = next(q for q in of_frame if q.text.startswith("color"))
        texts = told_question.text, decided.text
        for way, (first, second) in answer_after_eviction(engine, item.frames, evicted_frame, texts).items():
            rows[way].append((first == told_question.answer, second == decided.answer))
        done(1)
    table_rows = []
    for way, samples in rows.items():
        counts = [sum(row[j] for row in samples) for j in (0, 1)]
        row = {name: k / n for name, k in zip(("said", "decided"), counts, strict=True)}
        table_rows.append({"way": way, "n": n, **row, "ci95": [list(wilson(k, n)) for k in counts]})
    return table_rows


def answer_after_eviction(
    engine: HFEngine, frames: Sequence[Frame], index: int, questions: Sequence[str]
) -> dict[str, list[str]]:
    """Return answers by way, after the frame ``index`` was evicted."""
    encoded, whole, _ = read(engine, frames, questions[0])
    remaining = [i for i in range(len(encoded)) if i != 1 + index]
    one, spans = [encoded[i] for i in remaining], [whole.captured[i] for i in remaining]
    recomposed = moved(engine, one, spans)
    ways = {
        "still placed": lay_out(encoded, [whole.captured[i] for i in range(len(encoded))]),
        "KV evicted, states kept": [replace(segment, approximate=False) for segment in recomposed],
        "evicted, states recomposed": recomposed,
        "re-prefill without it": lay_out(one, [None] * len(one)),
    }
    by_way = {}
    for way, layout in ways.items():
        generations = [engine.generate(layout, engine.encode_query(text), ASKED, salt=way) for text in questions]
        by_way[way] = [each.text.strip() for each in generations]
    with isolated(engine), Window(engine, SYSTEM_PROMPT, fidelity=Fidelity("patched")) as window:
        ids = window.extend([Chunk.image(render(frame)) for frame in frames])
        window.ask(questions[0], max_tokens=1)
        window.evict(ids[index], forget=True)
        by_way["evicted, forget=True"] = [window.ask(text, max_tokens=4).text.strip() for text in questions]
    return by_way


def measure_windows(engine: HFEngine, n: int, done: Callable[[int], None]) -> list[dict[str, Any]]:
    """Windows whose chunks become canonicals with patches, by rank: do they answer as before, and at what share of the bytes?"""
    rows = []
    for rank in WINDOW_RANKS:
        same = computed = patched = whole = 0
        for i in range(n):
            item = make_item(SEED + i, "multi_hop", 2 + i % 3, conflict=0.8)
            question = item.questions[0].text
            fidelity = Fidelity("patched", rank=rank, advanced={"layout": "joint"})
            with isolated(engine), Window(engine, SYSTEM_PROMPT, fidelity=fidelity) as window:
                window.extend([Chunk.image(render(frame)) for frame in item.frames])
                first_answer = window.ask(question, max_tokens=4).text
                window.maintenance.compress()
                answer = window.ask(question, max_tokens=4)
                same += answer.text == first_answer
                computed += answer.usage.computed_tokens - engine.encode_query(question).tokens
                for kv in (p.kv for p in window.snapshot().placed if p.kv and p.kv.patch):
                    loaded, patch = engine.repo.get_span(kv.span), engine.repo.get_patch(kv.patch or "")
                    if loaded and patch:
                        patched, whole = patched + patch.nbytes, whole + loaded[0].nbytes
            done(1)
        rows.append({
            "rank": rank, "n": n, "agreed": same / n, "ci95": list(wilson(same, n)), "computed": computed,
            "patches": patched / max(1, whole),
        })  # fmt: skip
    return rows


def measure_drift(engine: HFEngine, streams: int, done: Callable[[int], None]) -> list[dict[str, Any]]:
    """Windows that slide and keep what survives, beside re-prefills of what is placed and of all that was seen."""
    samples: list[
        tuple[int, int, bool, bool, float]
    ] = []  # stream, slides, as what is placed, as the stream, KL to the former
    for number in range(streams):
        rng = np.random.default_rng((SEED, 1, number))
        frames = make_stream(rng, WINDOW + SLIDES, window=WINDOW + SLIDES)
        with isolated(engine), Window(engine, SYSTEM_PROMPT, fidelity=Fidelity("patched")) as window:
            for i, frame in enumerate(frames):
                window.append(Chunk.image(render(frame)))
                slides = i + 1 - WINDOW
                if slides > 0:
                    window.slide(1)
                window.ask("color of 00?", max_tokens=1)  # an answer conditions the new chunk
                if slides < 0:
                    continue
                in_view = frames[slides : i + 1]
                texts = [q.text for q in scene_questions(in_view, QUESTIONS, rng)]
                ours = [window.ask(text, max_tokens=4, logprobs=-1) for text in texts]
                now, stream = answers(engine, in_view, texts), answers(engine, frames[: i + 1], texts)
                for mine, placed_now, streamed in zip(ours, now, stream, strict=True):
                    reply, far = mine.text.strip(), kl(placed_now.logprobs, mine.first_token_logprobs)
                    both = reply == placed_now.text.strip(), reply == streamed.text.strip()
                    samples.append((number, slides, *both, far))
        done(1)
    table_rows = []
    for slides in range(SLIDES + 1):
        rows = [row for row in samples if row[1] == slides]
        clusters = [str(row[0]) for row in rows]
        row: dict[str, Any] = {"slides": slides, "n": len(rows), "kl": sum(row[4] for row in rows) / len(rows)}
        for name, at in (("placed", 2), ("stream", 3)):
            same = [float(row[at]) for row in rows]
            row[name], row[f"{name}_ci95"] = sum(same) / len(same), list(share_interval(same, clusters))
        table_rows.append(row)
    return table_rows


def answers(engine: HFEngine, frames: Sequence[Frame], texts: Sequence[str]) -> list[Generation]:
    """Return the answer of one forward over frames to each question."""
    encoded, whole, _ = read(engine, frames, texts[0])
    exact = [replace(s, approximate=False) for s in lay_out(encoded, [whole.captured[i] for i in range(len(encoded))])]
    return [engine.generate(exact, engine.encode_query(text), ASKED) for text in texts]


def main(
    model: Annotated[str, typer.Argument(help="A hybrid of the bundled world.")] = "tests/models/hybrid",
    task: Annotated[str, typer.Option(help="multi_hop needs what chunks absorbed; single_hop does not.")] = "multi_hop",
    n: Annotated[int, typer.Option(help="Held-out items.", min=1)] = 320,
    streams: Annotated[int, typer.Option(help="Streams along which a window slides.", min=1)] = 40,
    quick: Annotated[bool, typer.Option(help="20 items, 2 streams.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Answers from composed states beside those of a forward: blind, patched, with a seam, moved, evicted, sliding."""
    from ctxwin.engines.hf.engine import HFEngine

    count, drawn = (20, 2) if quick else (n, streams)
    result: dict[str, Any] = {"model": model, "task": task}
    with errors():
        engine = HFEngine(model, dtype="float32", position_free=True)
        with progress("items", count) as done:
            result["rows"] = measure(engine, task, count, done)  # type: ignore[arg-type]
        if task == "multi_hop":
            with progress("evictions", count) as done:
                result["evicted"] = measure_eviction(engine, count, done)
            each = min(count, WINDOWED)
            with progress("windows", each * len(WINDOW_RANKS)) as done:
                result["windows"] = measure_windows(engine, each, done)
            with progress("streams", drawn) as done:
                result["drift"] = measure_drift(engine, drawn, done)
    write_result(output, "hybrid.json", result)
    show(result, json, *tables(result))


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the measurements as tables."""
    rendered = [new_table("A hybrid's chunks", "way|right|as a re-prefill|KL|patches, of KV and maps", left=(0,))]
    for row in result["rows"]:
        agreed, patches = _share(row["agreed"], row["ci95"]), f"{100 * row['patches']:.1f} %"
        rendered[-1].add_row(row["way"], f"{row['right']:.3f}", agreed, f"{row['kl']:.2g}", patches)
    if "evicted" in result:
        rendered.append(new_table("A chunk that has left", "way|answered what it said|what it decided", left=(0,)))
        for row in result["evicted"]:
            said, decided = (_share(row[name], ci) for name, ci in zip(("said", "decided"), row["ci95"], strict=True))
            rendered[-1].add_row(row["way"], said, decided)
    if "windows" in result:
        rendered.append(
            new_table("Windows of patched chunks", "rank|n|as before|tokens computed|patches, of KV, states and maps")
        )
        for row in result["windows"]:
            cells = str(row["rank"]), str(row["n"]), _share(row["agreed"], row["ci95"]), str(row["computed"])
            rendered[-1].add_row(*cells, f"{100 * row['patches']:.1f} %")
    if "drift" in result:
        rendered.append(new_table("A window that slides", "slides|n|as what is placed|KL|as all that was seen"))
        for row in result["drift"]:
            both = [_share(row[name], row[f"{name}_ci95"]) for name in ("placed", "stream")]
            rendered[-1].add_row(str(row["slides"]), str(row["n"]), both[0], f"{row['kl']:.2g}", both[1])
    return rendered


def _share(value: float, interval: Sequence[float]) -> str:
    return f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


if __name__ == "__main__":
    typer.run(main)
