"""``python -m evals.studies.merged``: how far answers follow chunks that windows keep in fewer slots (Elastic Cache as a tier).

Held-out items of the bundled world are asked of a window whole, then with its chunks merged: all of them, the older half, or one
that has left and comes back. What a re-prefill answers is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.open import open_engine
from ctxwin.evals.console import Json, errors, new_table, progress, show, write_result
from ctxwin.evals.stats import wilson
from ctxwin.fidelity import Fidelity
from ctxwin.tiny.world import Task as WorldTask
from ctxwin.tiny.world import make_item, render
from ctxwin.window.window import Window

from .command import SYSTEM_PROMPT, Output

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.base import Engine

SEED = 978_000_000  # items of its own
TASKS: tuple[WorldTask, ...] = ("multi_hop", "order", "single_hop")
WHICH = ("all", "older half", "recalled")


def merge_some(window: Window, which: str, share: float) -> None:
    """Merges the chunks that ``which`` names."""
    ids = window.ids
    if which == "recalled":
        window.evict(ids[0])
        window.merge(ids[0], share)
        window.recall(ids[0])
        return
    for placement in ids if which == "all" else ids[: len(ids) // 2]:
        window.merge(placement, share)


def measure(
    engine: Engine, shares: Sequence[float], n: int, conflict: float, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """One row for each share and each of `WHICH`: agreement with the whole window's answer, and bytes of chunks served."""
    found: dict[tuple[str, float], list[tuple[bool, bool, float]]] = {(w, s): [] for w in WHICH for s in shares}
    right = 0
    for i in range(n):
        task = TASKS[i % len(TASKS)]
        item = make_item(SEED + i, task, 3 + i % 4, conflict=max(conflict, float(task == "order")))
        question = item.questions[0]
        for (which, share), rows in found.items():
            with Window(engine, SYSTEM_PROMPT, fidelity=Fidelity("patched", merge=0.5)) as window:
                window.extend([Chunk.image(render(frame)) for frame in item.frames])
                whole, held = window.ask(question.text, 4), sum(e.bytes for e in window.plan().entries)
                right += whole.text.strip() == question.answer
                merge_some(window, which, share)
                kept = sum(e.bytes for e in window.plan().entries)
                answer = window.ask(question.text, 4)
                rows.append((answer.text == whole.text, answer.text.strip() == question.answer, kept / held))
        done(1)
    made = []
    for (which, share), rows in found.items():
        agreed = sum(same for same, _, _ in rows)
        made.append({
            "merged": which, "share": share, "n": n, "agreed": agreed / n, "ci95": list(wilson(agreed, n)),
            "right": sum(r for _, r, _ in rows) / n, "whole_right": right / n / len(found),
            "bytes": sum(b for _, _, b in rows) / n,
        })  # fmt: skip
    return made


def main(
    models: Annotated[str, typer.Argument(help="Models of the bundled world, comma-separated.")] = "tiny",
    shares: Annotated[str, typer.Option(help="Budgets, comma-separated.")] = "0.8,0.5,0.25",
    n: Annotated[int, typer.Option(help="Held-out items.", min=1)] = 300,
    conflict: Annotated[float, typer.Option(help="Share of items whose legends disagree.")] = 0.8,
    engine: Annotated[str, typer.Option(help="hf or vllm.")] = "hf",
    quick: Annotated[bool, typer.Option(help="20 items.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Agreement with a re-prefill of windows whose chunks are kept in fewer slots than tokens."""
    with errors():
        budgets, count = [float(share) for share in shares.split(",")], 20 if quick else n
        result: dict[str, Any] = {}
        for name in models.split(","):
            where = f"tiny:{engine}" if name == "tiny" else f"{engine}:{name}"
            with open_engine(where, dtype="float32") as opened, progress(f"items on {Path(name).name}", count) as done:
                result[Path(name).name] = measure(opened, budgets, count, conflict, done)
    write_result(output, "merged.json", result)
    show(result, json, *tables(result))


def tables(result: dict[str, Any]) -> list[Table]:
    """What was measured, for people."""
    made = []
    for name, rows in result.items():
        table = new_table(name, "merged|budget|agrees with a re-prefill|right|of bytes", left=(0,))
        for row in rows:
            low, high = row["ci95"]
            agreed = f"{row['agreed']:.3f} [{low:.3f}, {high:.3f}]"
            table.add_row(row["merged"], f"{row['share']:g}", agreed, f"{row['right']:.3f}", f"{row['bytes']:.3f}")
        made.append(table)
    return made


if __name__ == "__main__":
    typer.run(main)
