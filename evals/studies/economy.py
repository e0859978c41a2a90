"""The patch economy: how many chunks of sixteen windows a store of a fixed size holds, and whether the answers stay.

Several windows watch the same frames, each in an order of its own, over one store. Once each has been asked twice, with
`Window.compress` (``if_short=True``) in between, or without patches, every chunk that the next ask would not compute counts as
held. Then questions about every window are held against an exact re-prefill of what it places, and against the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ctxwin.baselines import Reference
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine, Sampling
from ctxwin.engines.open import open_engine
from ctxwin.evals.console import Json, errors, new_table, progress, show, write_result
from ctxwin.evals.stats import share_interval
from ctxwin.fidelity import Fidelity
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from ctxwin.tiny.world import Kind, make_stream, questions_for, render
from ctxwin.window.window import Window

KINDS: tuple[Kind, ...] = ("multi_hop", "single_hop")


@dataclass(frozen=True)
class EconomySettings:
    """What a run does: scenes, windows over each, frames a window, questions a window, and the store's size in chunks' KV."""

    scenes: int = 8
    windows: int = 16
    frames: int = 8
    questions: int = 4
    chunks: int = 16
    seed: int = 0
    engine: str = "hf"
    system_prompt: str = "You watch a camera."


def measure(settings: EconomySettings, advance: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Runs every scene with and without the economy; a row each with counts, answers and intervals."""
    engine = open_engine(f"tiny:{settings.engine}", store=MemoryStore(), dtype="float32")
    rows = []
    for economy in (False, True):
        asked: list[tuple[int, bool, bool, bool]] = []
        totals: dict[str, int] = dict.fromkeys(
            ("placed", "held", "bytes", "computed", "background", "served", "formed"), 0
        )
        for scene in range(settings.scenes):
            _scene(engine, settings, scene, economy, asked, totals)
            advance(1)
        clusters = [str(scene) for scene, *_ in asked]
        same, right, reference = ([float(a[i]) for a in asked] for i in (1, 2, 3))
        accuracy, expected = float(np.mean(right)), float(np.mean(reference))
        row: dict[str, Any] = {"economy": economy, "n": len(asked), **totals}
        row |= {"same": float(np.mean(same)), "same_ci95": share_interval(same, clusters)}
        row |= {"accuracy": accuracy, "reprefill_accuracy": expected, "points": 100 * (accuracy - expected)}
        rows.append(row)
    engine.close()
    return {"settings": asdict(settings), "rows": rows, "ratio": rows[1]["held"] / max(1, rows[0]["held"])}


def _scene(
    engine: Engine,
    settings: EconomySettings,
    scene: int,
    economy: bool,
    asked: list[tuple[int, bool, bool, bool]],
    totals: dict[str, int],
) -> None:
    rng = np.random.default_rng([settings.seed, scene])
    frames = make_stream([settings.seed, 77, scene], settings.frames, window=settings.frames)  # type: ignore[arg-type]
    chunks = [Chunk.image(render(frame), text=f"t={i} s") for i, frame in enumerate(frames)]
    token_bytes = engine.spec.kv.token_bytes
    limit = settings.chunks * engine.encode(chunks[0]).tokens * token_bytes
    engine.store = MemoryStore(limit)
    engine.repo = SpanRepository(engine.store, engine.spec.identity, spec=engine.spec.kv)
    orders = [rng.permutation(settings.frames) for _ in range(settings.windows)]
    windows: list[Window] = []
    fidelity = Fidelity("auto") if economy else Fidelity("auto", forbid=("patched",))

    def idle() -> None:
        before = engine.counters.prefill_tokens
        for window in windows if economy else ():
            window.compress(if_short=True)
        totals["background"] += engine.counters.prefill_tokens - before

    for order in orders:
        windows.append(Window(engine, settings.system_prompt, fidelity=fidelity))
        windows[-1].extend([chunks[i] for i in order])
        windows[-1].ask("shape of 1?", max_tokens=1)
        idle()
    for window in windows:
        totals["computed"] += window.ask("shape of 1?", max_tokens=1).usage.computed_tokens
        idle()
    for window in windows:
        plan = window.plan()
        totals["placed"] += len(plan.entries)
        totals["held"] += sum(not entry.compute for entry in plan.entries)
    totals["bytes"] += engine.store.stats().bytes
    reference = Reference(engine, engine.encode_system_prompt(settings.system_prompt))
    for window, order in zip(windows, orders, strict=True):
        shown = [frames[i] for i in order]
        encoded = [engine.encode(chunks[i]) for i in order]
        for question in questions_for(shown, settings.questions, rng, KINDS):
            ours = window.ask(question.text, max_tokens=4).text.strip()
            theirs = reference.reprefill(encoded, engine.encode_query(question.text), Sampling(4)).text.strip()
            asked.append((scene, ours == theirs, ours == question.answer, theirs == question.answer))
    totals["served"] += engine.repo.counters.patches_served
    totals["formed"] += engine.repo.counters.patches
    for window in windows:
        window.close()


def main(
    scenes: Annotated[int, typer.Option(help="Scenes, each with a store of its own.", min=1)] = 8,
    windows: Annotated[int, typer.Option(help="Windows over one store.", min=2)] = 16,
    frames: Annotated[int, typer.Option(help="Frames in each window.", min=2)] = 8,
    questions: Annotated[int, typer.Option(help="Questions a window.", min=1)] = 4,
    chunks: Annotated[int, typer.Option(help="Size of the store, in chunks' conditioned KV.", min=2)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of scenes, orders and questions.", min=0)] = 0,
    engine: Annotated[str, typer.Option(help="hf or vllm.")] = "hf",
    output: Annotated[Path | None, typer.Option(help="Also write economy.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Count the chunks that a small store holds for many windows, with and without compression while bytes are short."""
    with errors():
        settings = EconomySettings(scenes, windows, frames, questions, chunks, seed, engine)
        with progress("scenes", 2 * scenes) as advance:
            result = measure(settings, advance)
        write_result(output, "economy.json", result)
        table = new_table(
            "Chunks held", "economy|placed|held|patches formed|served|n|same as re-prefill|right|re-prefill"
        )
        for row in result["rows"]:
            low, high = row["same_ci95"]
            counts = [str(row[key]) for key in ("placed", "held", "formed", "served", "n")]
            shares = [f"{row['same']:.4f} ({low:.4f} to {high:.4f})", f"{row['accuracy']:.4f}"]
            table.add_row("yes" if row["economy"] else "no", *counts, *shares, f"{row['reprefill_accuracy']:.4f}")
        show(result, as_json, table)


if __name__ == "__main__":
    typer.run(main)
