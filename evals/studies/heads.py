"""Heads and landmark keys on released weights: where conditioning lives, and whether choosing there beats a patch.

``make released`` and then ``python -m evals.studies.heads``. A cell is a KV head of a layer (Kamera, appendix C.3, fig. 6).
Cells are ordered on contexts of their own: by the ``energy`` of their deficits, or by the ``kl`` that each removes alone. Arms:

- ``heads:ORDER-SHARE/reprefill``: the leading share of the cells as a re-prefill has them, the others blind;
- ``heads:ORDER-SHARE/patched:M@quantized``: quantized patches of these cells, in the bytes of rank M over all cells;
- ``landmarks:M/reprefill``: each chunk is computed behind the M tokens in front that it attends to most (fig. 3), whose exact
  KV is what is kept; ``keys`` is how many hold 90 % of a head's attention to what is in front of the last chunk, ``of`` all;
- ``last:M/reprefill``: behind the last M tokens in front of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from ctxwin.chunk import Chunk
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.patch import Patch, compress
from ctxwin.kv.quantize import GROUP
from ctxwin_evals.arms import Served
from ctxwin_evals.console import Json, Threads, errors, open_model, progress, show
from ctxwin_evals.decoder import Decoder, Memory
from ctxwin_evals.generation import forced_logits
from ctxwin_evals.patching import Patcher
from ctxwin_evals.samples import FORMAT, open_samples
from ctxwin_evals.stats import bootstrap_mean
from tools.released_models import default_cache

from .command import Seed
from .released import Study, Views, run, split, summarise, tables
from .released_texts import Context, Texts

Order = Callable[[str], Sequence[int]]
"""(``energy`` or ``kl``) -> numbers of the cells, layer by layer, the best first."""
FIRST = 180
"""Contexts from this one on order the cells; those before it judge."""
AT_ONCE, SHORT = 6, 8
"""Cells that are tried in one batch, and tokens of the target that are then read."""
ARMS = (
    "blind,heads:energy-0.25/reprefill,heads:energy-0.5/reprefill,heads:energy-0.75/reprefill,heads:kl-0.1/reprefill,"
    "heads:kl-0.25/reprefill,heads:kl-0.5/reprefill,heads:kl-0.75/reprefill,patched:8@quantized,"
    "heads:kl-0.25/patched:8@quantized,heads:kl-0.5/patched:8@quantized,"
    "heads:energy-0.5/patched:8@quantized,landmarks:8/reprefill,last:8/reprefill"
)


class HeadStudy(Study):
    """Also serves the arms of heads and landmarks; ``order`` is asked for when the first arm of heads comes."""

    def __init__(self, decoder: Decoder, order: Order) -> None:
        super().__init__(decoder, lambda: decoder)
        self._order = cache(order)

    def serve_arm(self, views: Views, name: str) -> Served | None:
        history, arm = split(name)
        kind, _, argument = history.partition(":")
        if kind in ("landmarks", "last"):
            return behind_landmarks(views, int(argument), by_attention=kind == "landmarks")
        if kind != "heads":
            return super().serve_arm(views, name)
        group, spec = views.group(""), self.decoder.spec
        by, _, share = argument.partition("-")
        cells = torch.zeros(spec.layers * spec.heads, dtype=torch.bool)
        cells[self._order(by)[: round(float(share) * len(cells))]] = True
        cells = cells.view(spec.layers, spec.heads)
        if arm == "reprefill":
            return Served([_mixed(b, e, cells) for b, e in zip(group.blind[0], group.exact[0], strict=True)])
        rank, spans, stored = int(arm.removeprefix("patched:").removesuffix("@quantized")), [group.blind[0][0]], 0
        for place in range(1, len(group.places)):
            patch, size = of_cells(group.deficit(0, place), spec, cells, rank)
            spans.append(group.patched(group.canonical[0][place], patch, place))
            stored += size
        return Served(spans, stored, group.kv_bytes(range(1, len(group.places))))


def _mixed(blind: SpanKV, exact: SpanKV, cells: Tensor) -> SpanKV:
    chosen = cells[:, None, :, None]
    return replace(exact, k=torch.where(chosen, exact.k, blind.k), v=torch.where(chosen, exact.v, blind.v))


def of_cells(lost: Deficit, spec: KVSpec, cells: Tensor, rank: int) -> tuple[Patch, int]:
    """Return a quantized patch of the deficit in some cells, bool ``[L, H]``, and its bytes, where others take none.

    It has at most the bytes of joint bfloat16 factors of ``rank`` over all cells.
    """
    layers, width = len(lost.covered(tuple(range(spec.layers)))), spec.k_dim + spec.v_dim
    room = rank * (lost.tokens + layers * spec.heads * width) * 2
    some = replace(lost, k=lost.k * cells[:, None, :, None], v=lost.v * cells[:, None, :, None])
    share = float(cells.float().mean())
    budget, best = room * (lost.tokens + spec.heads * width) / (lost.tokens + share * spec.heads * width), None
    for _ in range(3):  # columns of zeros are paid for in `budget` and not counted in `size`
        patch = compress(some, spec, bytes_share=budget / spec.span_bytes(lost.tokens), layout="quantized")
        size = patch.nbytes
        if patch.quantized is not None:
            empty = ((~cells).sum(1) * width)[list(patch.layers), None]
            bits = patch.quantized.bits.int()
            size -= int(((bits > 0) * (empty * bits / 8 + 2 * empty / GROUP)).sum())
        if best is None or best[1] > room or best[1] < size <= room:
            best = patch, size
        budget *= 0.985 * room / size
    assert best is not None
    return best


def behind_landmarks(views: Views, count: int, *, by_attention: bool) -> Served:
    """Return chunks computed behind ``count`` exact tokens of those in front, beside the system prompt and their own."""
    group, decoder = views.group(""), views.decoder
    lead, spans, keys = group.system_prompt_span.tokens, [group.exact[0][0]], torch.zeros(0)
    for i, place in enumerate(group.places[1:], 1):
        slots, at = lead + place.end, torch.arange(lead + place.slot, lead + place.end)
        part = group.context.pick(torch.arange(place.slot, place.end)[None])
        memory = group.memory([group.exact[0][: i + 1]])
        if by_attention:
            attention: list[Tensor] = []
            decoder.run(part, memory, at, watch=lambda _, weights, a=attention: a.append(weights[0].sum(1)))  # type: ignore[misc]
            earlier = torch.stack(attention)[..., lead : lead + place.slot]  # [L, query heads, tokens in front]
            shares = earlier.sort(-1, descending=True).values.cumsum(-1) / earlier.sum(-1, keepdim=True)
            keys = (shares < 0.9).sum(-1).float() + 1
            chosen = earlier.sum((0, 1)).topk(min(count, place.slot)).indices
        else:
            chosen = torch.arange(max(0, place.slot - count), place.slot)
        mask = torch.zeros(place.tokens, slots, dtype=torch.bool)
        mask[:, :lead] = mask[:, lead + chosen] = True
        mask |= (torch.arange(slots) >= lead + place.slot) & (torch.arange(slots) <= at[:, None])
        decoder.run(part, memory, at, mask=mask)
        frame = group.items[0].placed[i]
        spans.append(memory.span(0, lead + place.slot, slots, group.position_rows(frame), place.start))
    tokens = sum(place.tokens for place in group.places[1:])
    kept = (len(group.places) - 1) * group.spec.span_bytes(count)
    extra = {"keys": float(keys.mean()), "of": float(group.places[-1].slot)} if by_attention else {}
    return Served(spans, kept, group.kv_bytes(range(1, len(group.places))), tokens, extra=extra)


def measure_cells(decoder: Decoder, views: Views) -> tuple[list[float], list[float]]:
    """Return each cell's energy, and the KL that it removes where it alone is as a re-prefill has it."""
    group, spec, context = views.group(""), decoder.spec, views.context
    energy = sum(x.double().pow(2).sum((1, 3)) for lost in group.deficits() for x in (lost.k, lost.v))
    assert isinstance(energy, Tensor)
    blind, exact, target = group.memory(group.blind), group.memory(group.exact), context.target[:SHORT]
    query, cells = decoder.engine.encode(Chunk.tokens(context.query)), range(spec.layers * spec.heads)

    def kls(some: Sequence[int]) -> list[float]:
        k, v = (x.repeat(1, len(some), 1, 1, 1) for x in (blind.k, blind.v))
        for b, cell in enumerate(some):
            layer, head = divmod(cell, spec.heads)
            if cell >= 0:
                k[layer, b, head], v[layer, b, head] = exact.k[layer, 0, head], exact.v[layer, 0, head]
        rows = forced_logits(decoder, Memory(k, v), [query] * len(some), group.begin, [target] * len(some))
        return [float((wanted.exp() * (wanted - row.log_softmax(-1))).sum(-1).mean()) for row in rows]

    wanted = views.exact[:SHORT]
    nothing = kls([-1])[0]
    removed = [nothing - kl for at in cells[::AT_ONCE] for kl in kls(cells[at : at + AT_ONCE])]
    return energy.flatten().tolist(), removed


def train(
    decoder: Decoder, contexts: Sequence[Context], file: Path, advance: Callable[[int], None]
) -> dict[str, Tensor]:
    """Return energies and KL removed, ``[contexts, cells]``, from the file where they are in it already."""
    rows = json.loads(file.read_text()) if file.exists() else {}
    for context in contexts:
        if context.digest not in rows:
            rows[context.digest] = measure_cells(decoder, Views(decoder, Patcher(decoder.spec), context))
            file.write_text(json.dumps(rows))
        advance(1)
    cells = [rows[context.digest] for context in contexts]
    some = torch.tensor(cells, dtype=torch.float64).view(len(contexts), 2, -1) if cells else torch.zeros(0, 2, 0)
    return {"energy": some[:, 0], "kl": some[:, 1]}


def cells_for(values: Tensor, share: float) -> list[float]:
    """Return by context the share of the cells that hold a share of what all of them do."""
    sums = values.clamp_min(0).sort(-1, descending=True).values.cumsum(-1)
    return (((sums < share * sums[:, -1:]).sum(-1) + 1) / values.shape[1]).tolist()


def main(
    model: Annotated[str, typer.Option(help="Folder of a text model.")] = str(default_cache() / "smollm2"),
    texts: Annotated[str, typer.Option(help="Set of contexts, text-PLACEDxTOKENS.")] = "text-6x64",
    arms: Annotated[str, typer.Option(help="Arms, separated by commas.")] = ARMS,
    n: Annotated[int, typer.Option(help="Contexts that judge.", min=1, max=FIRST)] = 40,
    training: Annotated[
        int, typer.Option(help="Contexts that order the cells; 0 where no arm is of heads.", min=0)
    ] = 16,
    seed: Seed = 0,
    threads: Threads = 0,
    output: Annotated[Path | None, typer.Option(help="Folder of the rows; one that exists is continued.")] = None,
    as_json: Json = False,
) -> None:
    """Measure where conditioning lives, and patches of the best heads."""
    with errors(), open_model(model, "float32", "cpu", threads) as engine:
        decoder = Decoder(engine)
        contexts = Texts(engine, seed).contexts(texts, FIRST + training)
        folder = output or Path("eval-output") / f"heads-{Path(model).name}-{seed}"
        config = {"format": FORMAT, "study": "heads", "model": engine.spec.identity, "seed": seed, "training": training}
        with open_samples(folder, config) as samples:
            with progress("training contexts", training) as advance:
                cells = train(decoder, contexts[FIRST:], folder / f"cells-{texts}.json", advance)
            study = HeadStudy(decoder, lambda by: cells[by].mean(0).argsort(descending=True).tolist())
            with progress("contexts", n) as advance:
                names = list(dict.fromkeys(["reprefill", "blind", *arms.split(",")]))
                run(study.serve, samples, contexts[:n], names, float("inf"), advance)
            summary = summarise(samples)
        holding = {
            by: (sum(s) / len(s), bootstrap_mean(s, [*map(str, range(len(s)))]))
            for by in (cells if training else ())
            for s in [cells_for(cells[by], 0.9)]
        }
        result = {"model": Path(model).name, "cells for 90 %": holding, "sets": summary}
        show(
            result,
            as_json,
            tables(summary),
            *(f"Share of the cells that hold 90 % of {by}: {share}" for by, share in holding.items()),
        )


if __name__ == "__main__":
    typer.run(main)
