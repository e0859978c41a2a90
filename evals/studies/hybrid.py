"""``python -m evals.studies.hybrid``: what a trained hybrid answers from chunks that did not see each other.

Held-out items of the bundled world, on a model that binds while it prefills. The states of a window are composed of its chunks'
maps (`ctxwin.kv.states`): taken from one forward over everything, from each chunk alone, from another order, or from each chunk
alone with a low-rank patch; or the first tokens of each chunk are computed where it stands, as HYPIC does (arXiv 2607.01299).
What counts is the answer of a forward over what is placed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded, Generation, Sampling, Segment
from ctxwin.evals.console import Json, errors, new_table, progress, show, write_result
from ctxwin.evals.stats import wilson
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.kv.relocate import relocate
from ctxwin.kv.states import composed
from ctxwin.tiny.world import Task as WorldTask
from ctxwin.tiny.world import make_item, render
from ctxwin.window.ask import kl

from .command import SYSTEM_PROMPT, Output

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.kv.layout import SpanKV
    from ctxwin.kv.states import States

SEED = 981_000_000  # items of its own
ASKED = Sampling(max_tokens=4, logprobs=-1)
KV_RANK, STATE_RANKS, SEAMS = 4, (1, 4, 16), (4, 16)


def deficit(exact: States, before: States, alone: States, rank: int) -> tuple[dict[str, torch.Tensor], int]:
    """A chunk's states with what its own zero-start ends lack behind ``before``, in a few directions shared by the heads.

    Args:
        exact: the states behind it in one forward.
        before: those in front of it there.
        alone: states and maps of the chunk computed alone.
        rank: directions of each layer.

    Returns:
        The patched states, and the patch's numbers. Cost: an SVD a layer.
    """
    import torch

    blind, made, numbers = composed(before, alone), dict(alone), 0
    for name, want in exact.items():
        if name.endswith(".recurrent"):
            layer = name.removesuffix(".recurrent")
            heads, width, values = want.shape
            lack = (want - blind[name]).permute(1, 0, 2).reshape(width, heads * values)
            u, s, v = torch.linalg.svd(lack, full_matrices=False)
            low = (u[:, :rank] * s[:rank]) @ v[:rank]
            made[f"{layer}.own"] = alone[f"{layer}.own"] + low.reshape(width, heads, values).permute(1, 0, 2)
            numbers += rank * (width + heads * values)
    return made, numbers


def placed(encoded: Sequence[Encoded], spans: Sequence[SpanKV | None]) -> list[Segment]:
    """Chunks one behind the other; the system prompt's span is exact, the others' states are composed."""
    made, at = [], 0
    for i, (one, span) in enumerate(zip(encoded, spans, strict=True)):
        made.append(Segment(one, at, span, approximate=span is not None and i > 0, span_key=f"{i}"))
        at += one.advance
    return made


def arms(engine: HFEngine, encoded: Sequence[Encoded], whole: Generation) -> Iterator[tuple[str, list[Segment], float]]:
    """Ways to serve the chunks of one item: name, layout, and the numbers of its patches as a share of KV and maps."""
    kv, header = engine.spec.kv, encoded[0]
    exact = [whole.captured[i] for i in range(len(encoded))]
    starts = [segment.start for segment in placed(encoded, exact)]
    alone = [exact[0]]
    for one in encoded[1:]:
        alone.append(engine.prefill([Segment(header, 0, exact[0])], one, header.advance))
    moved = [relocate(span, kv, start) for span, start in zip(alone, starts, strict=True)]
    yield "composed of exact maps", placed(encoded, exact), 0
    yield "blind", placed(encoded, moved), 0
    both = zip(exact, moved, strict=True)
    yield "KV exact, maps blind", placed(encoded, [replace(e, states=m.states) for e, m in both]), 0
    both = zip(exact, moved, strict=True)
    yield "maps exact, KV blind", placed(encoded, [replace(m, states=e.states) for e, m in both]), 0
    size = sum(span.nbytes for span in alone[1:]) / 4
    patched, patches = [exact[0]], 0
    for span, base, start in zip(exact[1:], alone[1:], starts[1:], strict=True):
        patch = form_patch(span, base, kv, rank=KV_RANK, dtype=span.k.dtype)
        patched.append(replace(apply_patch(base, patch, kv, start), states=base.states))
        patches += sum(t.numel() for t in patch.tensors().values())
    yield f"KV rank {KV_RANK}", placed(encoded, patched), patches / size
    for rank in STATE_RANKS:
        spans, numbers = [exact[0]], 0
        for i in range(1, len(encoded)):
            states, added = deficit(exact[i].states, exact[i - 1].states, alone[i].states, rank)
            spans.append(replace(patched[i], states=states))
            numbers += added
        yield f"KV rank {KV_RANK}, states rank {rank}", placed(encoded, spans), (patches + numbers) / size
    for width in SEAMS:
        cut = [encoded[0]]
        held: list[SpanKV | None] = [exact[0]]
        for one in encoded[1:]:
            front = one.part(0, width)
            rest = one.part(width, one.tokens)
            before = [Segment(header, 0, exact[0]), Segment(front, header.advance)]
            cut += [front, rest]
            held += [None, engine.prefill(before, rest, header.advance + front.advance)]
        at = 0
        layout: list[Segment] = []
        for piece, own in zip(cut, held, strict=True):
            here: SpanKV | None = None if own is None else relocate(own, kv, at)
            layout.append(Segment(piece, at, here, approximate=bool(at) and own is not None, span_key=str(len(layout))))
            at += piece.advance
        yield f"seam of {width} tokens", layout, 0


def changed(
    engine: HFEngine, encoded: Sequence[Encoded], whole: Generation, query: Encoded
) -> Iterator[tuple[str, list[Segment], Generation]]:
    """The same spans after an edit: name, layout, and what a forward over what is then placed answers."""
    kv, n = engine.spec.kv, len(encoded)
    for name, order in (("slid", [0, *range(2, n)]), ("reversed", [0, *range(n - 1, 0, -1)])):
        one = [encoded[i] for i in order]
        starts = [segment.start for segment in placed(one, [None] * len(one))]
        spans = [relocate(whole.captured[i], kv, start) for i, start in zip(order, starts, strict=True)]
        yield name, placed(one, spans), engine.generate(placed(one, [None] * len(one)), query, ASKED)


def measure(engine: HFEngine, task: WorldTask, n: int, done: Callable[[int], None]) -> list[dict[str, Any]]:
    """One row for each way: right answers, agreement with a forward, mean KL, patches' share of bytes."""
    rows: dict[str, list[tuple[bool, bool, float, float]]] = defaultdict(list)
    for i in range(n):
        item = make_item(SEED + i, task, 2 + i % 3, conflict=0.8)
        question = item.questions[0]
        chunks = [Chunk.image(render(frame)) for frame in item.frames]
        encoded = [engine.encode_system_prompt(SYSTEM_PROMPT), *(engine.encode(chunk) for chunk in chunks)]
        query = engine.encode_query(question.text)
        bare = [replace(segment, capture=True) for segment in placed(encoded, [None] * len(encoded))]
        whole = engine.generate(bare, query, ASKED)

        def note(
            name: str, got: Generation, want: Generation, share: float = 0.0, answer: str = question.answer
        ) -> None:
            rows[name].append(
                (got.text.strip() == answer, got.text == want.text, kl(want.logprobs, got.logprobs), share)
            )

        note("re-prefill", whole, whole)
        for name, layout, share in arms(engine, encoded, whole):
            note(name, engine.generate(layout, query, ASKED, salt=name), whole, share)
        for name, layout, want in changed(engine, encoded, whole, query):
            note(name, engine.generate(layout, query, ASKED, salt=name), want)
        done(1)
    made = []
    for name, found in rows.items():
        right, agreed = sum(row[0] for row in found), sum(row[1] for row in found)
        made.append({
            "way": name, "n": n, "right": right / n, "agreed": agreed / n, "ci95": list(wilson(agreed, n)),
            "kl": sum(row[2] for row in found) / n, "patches": sum(row[3] for row in found) / n,
        })  # fmt: skip
    return made


def main(
    model: Annotated[str, typer.Argument(help="A hybrid of the bundled world.")] = "tests/models/hybrid",
    task: Annotated[str, typer.Option(help="multi_hop needs what chunks absorbed; single_hop does not.")] = "multi_hop",
    n: Annotated[int, typer.Option(help="Held-out items.", min=1)] = 320,
    quick: Annotated[bool, typer.Option(help="20 items.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Answers from composed states beside those of a forward: blind, patched, with a seam, slid, reversed."""
    from ctxwin.engines.hf.engine import HFEngine

    count = 20 if quick else n
    with errors():
        engine = HFEngine(model, dtype="float32", position_free=True)
        with progress("items", count) as done:
            rows = measure(engine, task, count, done)  # type: ignore[arg-type]
    result = {"model": model, "task": task, "rows": rows}
    write_result(output, "hybrid.json", result)
    show(result, json, table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """What was measured, for people."""
    made = new_table("A hybrid's chunks", "way|right|as a re-prefill|KL|patches, of KV and maps", left=(0,))
    for row in rows:
        low, high = row["ci95"]
        agreed = f"{row['agreed']:.3f} [{low:.3f}, {high:.3f}]"
        made.add_row(row["way"], f"{row['right']:.3f}", agreed, f"{row['kl']:.2g}", f"{100 * row['patches']:.1f} %")
    return made


if __name__ == "__main__":
    typer.run(main)
