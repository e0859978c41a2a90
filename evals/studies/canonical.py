"""Where should a canonical be formed: behind the window's system prompt, behind another one, or behind a neutral prefix?

Behind the window's own system prompt a chunk recalled to the front is exact and free; behind a neutral prefix, or behind
whatever prompt met the chunk first, one canonical serves every system prompt. The price is what a patch must carry on top.
``moved`` is the strongest case of sharing: everything that one agent conditioned behind its own prompt, turned into place behind
another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded, Segment
from ctxwin.evals.console import Device, Dtype, Json, Model, Threads, errors, new_table, open_model, preset
from ctxwin.evals.metrics import kl_divergence
from ctxwin.evals.stats import bootstrap_mean, difference_interval, share_interval
from ctxwin.kv.patch import apply_patch, form_patch
from ctxwin.tiny.world import Item, make_item, render
from ctxwin.tiny.world import Task as WorldTask

from .command import SYSTEM_PROMPT, Output, run

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.kv.layout import SpanKV

SEED = 991_000_000  # items of its own
PROMPTS = {
    "short": SYSTEM_PROMPT,
    "agent": "You plan the next step of an agent. Name what the step needs, and nothing else.",
    "tools": "You may call these tools. "
    + " ".join(
        f'{{"name": "{name}", "parameters": {{"x": "integer", "y": "integer", "text": "string"}}}}'
        for name in ("click", "scroll", "type", "drag", "wait", "look")
    ),
}
"""What the window that serves is told, by name."""
_OTHER = dict(zip(PROMPTS, [*list(PROMPTS)[1:], next(iter(PROMPTS))], strict=True))
KINDS = ("own", "neutral", "other")
TASKS: tuple[WorldTask, ...] = ("multi_hop", "order", "single_hop")


@dataclass(frozen=True)
class CanonicalSettings:
    """What a run does: items of two to six frames, each behind every prompt.

    Attributes:
        n: items.
        ranks: of patches in the deep layers; 0: the canonical alone.
        conflict: share of items whose legends disagree; a model that chains at query time was trained with none.
    """

    n: int = 300
    ranks: tuple[int, ...] = (0, 11)
    conflict: float = 0.8

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.conflict <= 1:
            raise ValueError(f"n must be >= 1 and conflict within 0..1, got {self.n} and {self.conflict}")


@dataclass(frozen=True)
class _Asked:
    """One answer behind reused KV, against the re-prefill behind the same system prompt."""

    item: int
    prompt: str
    kind: str
    rank: int | None
    kl: float
    agreed: bool
    right: bool
    exact_right: bool


def measure(
    engine: HFEngine, settings: CanonicalSettings, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Asks every item behind every kind of canonical.

    Returns ``{"config", "prompts": {name: tokens}, "rows": [{prompt, kind, rank, n, kl, kl_ci95, kl_p95, agreed, ci95, accuracy,
    reprefill, to_reprefill_ci95}]}``; ``rank`` is None for whole conditioned KV (``moved``). Cost: for each prompt, a forward a
    frame for the reference, one for each kind, and one for ``moved``.
    """
    asked: list[_Asked] = []
    for i in range(settings.n):
        task = TASKS[i % len(TASKS)]
        item = make_item(SEED + i, task, 3 + i % 4, conflict=max(settings.conflict, float(task == "order")))
        chunks = [engine.encode(Chunk.image(render(frame), keep_source=False)) for frame in item.frames]
        behind = {name: _Behind(engine, chunks, text) for name, text in {**PROMPTS, "neutral": ""}.items()}
        for prompt in PROMPTS:
            asked += _ask(engine, settings, i, item, prompt, behind)
        on_progress(1)
    rows = []
    for prompt in PROMPTS:
        for kind, rank in dict.fromkeys((a.kind, a.rank) for a in asked):
            found = [a for a in asked if (a.prompt, a.kind, a.rank) == (prompt, kind, rank)]
            rows.append({"prompt": prompt, "kind": kind, "rank": rank} | _summary(found))
    tokens = {name: engine.encode_system_prompt(text).tokens for name, text in {**PROMPTS, "neutral": ""}.items()}
    return {"config": {**asdict(settings), "model": engine.spec.model}, "prompts": tokens, "rows": rows}


class _Behind:
    """An item's chunks behind one system prompt: alone (canonicals) and in order (exact)."""

    def __init__(self, engine: HFEngine, chunks: Sequence[Encoded], prompt: str) -> None:
        encoded = engine.encode_system_prompt(prompt)
        self.head = Segment(encoded, 0, span=engine.prefill([], encoded, 0))
        self.exact, at = [self.head], encoded.advance
        for chunk in chunks:
            self.exact.append(Segment(chunk, at, span=engine.prefill(self.exact, chunk, at)))
            at += chunk.advance
        self.alone = [engine.prefill([self.head], chunk, encoded.advance) for chunk in chunks]


def _ask(
    engine: HFEngine, settings: CanonicalSettings, index: int, item: Item, prompt: str, behind: dict[str, _Behind]
) -> list[_Asked]:
    here, question = behind[prompt], item.questions[0]
    query = engine.encode_query(question.text)
    reference = engine.logits(here.exact, query).numpy()
    truth = engine.decode([int(reference.argmax())]).strip()
    made = []

    def ask(kind: str, rank: int | None, spans: Sequence[SpanKV]) -> None:
        placed = zip(here.exact[1:], spans, strict=True)
        segments = [here.head, *(Segment(s.encoded, s.start, span=span) for s, span in placed)]
        logits = engine.logits(segments, query).numpy()
        word = engine.decode([int(logits.argmax())]).strip()
        right = word == question.answer, truth == question.answer
        made.append(_Asked(index, prompt, kind, rank, kl_divergence(reference, logits), word == truth, *right))

    for kind, name in zip(KINDS, (prompt, "neutral", _OTHER[prompt]), strict=True):
        for rank in settings.ranks:
            ask(kind, rank, [_patched(engine, here, i, base, rank) for i, base in enumerate(behind[name].alone)])
        if kind != "own":
            ask(f"moved from {kind}", None, [s.span for s in behind[name].exact[1:] if s.span is not None])
    return made


def _patched(engine: HFEngine, here: _Behind, place: int, base: SpanKV, rank: int) -> SpanKV:
    segment, kv = here.exact[1 + place], engine.spec.kv
    if not rank or segment.span is None:
        return base
    patch = form_patch(segment.span, base, kv, rank=rank, layers="deep")
    return apply_patch(base, patch, kv, segment.start)


def _summary(asked: Sequence[_Asked]) -> dict[str, Any]:
    items = [str(a.item) for a in asked]
    kls = [a.kl for a in asked]
    right, exact = ([float(getattr(a, name)) for a in asked] for name in ("right", "exact_right"))
    return {
        "n": len(asked),
        "kl": float(np.mean(kls)),
        "kl_ci95": bootstrap_mean(kls, items),
        "kl_p95": float(np.quantile(kls, 0.95)),
        "agreed": float(np.mean([a.agreed for a in asked])),
        "ci95": share_interval([float(a.agreed) for a in asked], items),
        "accuracy": float(np.mean(right)),
        "reprefill": float(np.mean(exact)),
        "to_reprefill_ci95": difference_interval(np.subtract(right, exact), items),
    }


def canonical_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    columns = "system prompt|canonical behind|rank|n|KL|p95|answers agree|95 %|accuracy|re-prefill"
    made = new_table("reuse of chunks by where their canonical was formed, against a re-prefill", columns, left=(0, 1))
    for row in result["rows"]:
        rank = "whole" if row["rank"] is None else str(row["rank"])
        shown = (
            f"{row['kl']:.2e}",
            f"{row['kl_p95']:.2e}",
            f"{row['agreed']:.3f}",
            "[{:.3f}, {:.3f}]".format(*row["ci95"]),
        )
        prompt = f"{row['prompt']} ({result['prompts'][row['prompt']]} tokens)"
        accuracies = f"{row['accuracy']:.3f}", f"{row['reprefill']:.3f}"
        made.add_row(prompt, row["kind"], rank, str(row["n"]), *shown, *accuracies)
    return made


def main(
    n: Annotated[int, typer.Option(help="Items.", min=1)] = 300,
    conflict: Annotated[float, typer.Option(help="Share of items whose legends disagree.", min=0, max=1)] = 0.8,
    quick: Annotated[bool, preset("--quick", "A look at what comes out, in seconds.", n=12)] = False,
    model: Model = "tiny",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Canonicals behind the window's system prompt, behind a neutral prefix, or behind another prompt."""
    with errors():
        settings = CanonicalSettings(n, conflict=conflict)
        engine = open_model(model, dtype, device, threads)
        run("canonical", measure, settings, engine, ("items", n), lambda r: [canonical_table(r)], output, as_json)


if __name__ == "__main__":
    typer.run(main)
