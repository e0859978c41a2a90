"""How far each policy is from the best possible: an offline optimum over recorded traces.

A trace (`ctxwin.view.Trace`; every example writes one with ``--trace``) says when chunks arrived and when one was needed
again. Each policy is given the same arrivals and needs, in the same budget, on a window of its own; what its asks
compute is counted. The optimum knows all of it beforehand: an integer programme (`scipy.optimize.milp`) with a variable for
every chunk and ask, whose answer no policy can beat, since it may place every chunk wherever that costs nothing.

Two stores bound what leaving costs. One keeps everything: what comes back is at worst computed once more, at best read. One
keeps only what is placed, so that whatever left is computed again: there, victims are all that counts (paging, Belady 1966).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from ctxwin.chunk import Chunk
from ctxwin.evals.console import Json, Model, Threads, errors, new_table, open_model, progress, show, write_result
from ctxwin.fidelity import Fidelity
from ctxwin.policies import ByCost, ById, Eviction, LeastRecentlyRead, OldestFirst
from ctxwin.window.window import Window

from .isolation import isolated

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.base import Engine

POLICIES: dict[str, Callable[[], Eviction]] = {
    "OldestFirst": OldestFirst,
    "LeastRecentlyRead": LeastRecentlyRead,
    "ByCost": ByCost,
}
Keeps = Literal["everything", "placed"]
STORES: tuple[Keeps, ...] = ("everything", "placed")
_SYSTEM_PROMPT, _QUERY = "You watch a camera.", "color of 00?"


@dataclass
class Step:
    """One ask: chunks that arrive before it, and chunks that it needs again, by number."""

    arrive: list[int] = field(default_factory=list)
    need: list[int] = field(default_factory=list)


@dataclass
class Demand:
    """What a recorded window was asked for.

    Attributes:
        tokens: of every chunk. budget: tokens for chunks.
        steps: in order; forks count with the window they were made of, unless they stand behind another system prompt.
    """

    name: str
    budget: int
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def demands(path: Path) -> list[Demand]:
    """The windows of a trace. ValueError where it records none that was asked."""
    roots: dict[str, str] = {}
    made: dict[str, Demand] = {}
    numbers: dict[tuple[str, str], int] = {}
    open_steps: dict[str, Step] = {}
    placed: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] != "event":
            continue
        window, op = event["window"], event["op"]
        if op == "fork":
            apart = bool(event.get("note"))
            roots[event["other"]] = event["other"] if apart else roots.get(window, window)
            if apart:
                placed[event["other"]] = event["placed"]
        root = roots.setdefault(window, window)
        demand = made.setdefault(root, Demand(f"{path.stem}/{len(made) + 1}", 0))
        step = open_steps.setdefault(root, Step())
        sizes = {p["id"]: p["tokens"] for p in [*placed.pop(root, []), *event["placed"]]}
        demand.budget = max(demand.budget, sum(sizes.values())) if op == "ask" else demand.budget
        for placement, tokens in sizes.items():
            if (root, placement) not in numbers:
                numbers[root, placement] = len(demand.tokens)
                demand.tokens.append(tokens)
                step.arrive.append(numbers[root, placement])
        if op in ("recall", "look_back"):
            step.need += [numbers[root, i] for i in event["ids"] if numbers[root, i] not in step.arrive]
        if op == "ask":
            demand.steps.append(step)
            open_steps[root] = Step()
    found = [demand for demand in made.values() if demand.steps]
    if not found:
        raise ValueError(f"a trace must record windows that were asked, got none in {path}")
    return found


def optimum(demand: Demand, keeps: Keeps) -> float:
    """The least cost of re-entries, in tokens, of any choice of victims.

    Where the store keeps everything one is free, at the right place; else the chunk is computed again.

    Variables x[c, t] (chunk c is in view at ask t) and e[c, t] >= x[c, t] - x[c, t - 1] (it came back). What arrives or is
    needed is in view, what is in view fits the budget, and the costs of all e after a chunk's arrival are least.
    """
    steps, n = demand.steps, len(demand.tokens)
    arrived = {c: t for t, step in enumerate(steps) for c in step.arrive}
    cells = [(c, t) for c in range(n) for t in range(arrived.get(c, len(steps)), len(steps))]
    at = {cell: i for i, cell in enumerate(cells)}
    size = len(cells)
    least = np.zeros(2 * size)
    for t, step in enumerate(steps):
        for c in {*step.arrive, *step.need}:
            least[at[c, t]] = 1
    rows = lil_matrix((size + len(steps), 2 * size))
    upper = np.zeros(size + len(steps))
    costs = np.zeros(2 * size)
    for (c, t), i in at.items():
        costs[size + i] = demand.tokens[c] if t > arrived[c] and keeps == "placed" else 0
        rows[i, i], rows[i, size + i] = 1, -1
        if t > arrived[c]:
            rows[i, at[c, t - 1]] = -1
        rows[size + t, i] = demand.tokens[c]
    upper[size:] = demand.budget
    bounds, constraint = Bounds(least, np.ones(2 * size)), LinearConstraint(rows.tocsr(), -np.inf, upper)
    found = milp(costs, constraints=constraint, bounds=bounds, integrality=np.ones(2 * size))
    if not found.success:
        raise ValueError(f"the programme of {demand.name} has no solution: {found.message}")
    return float(found.fun)


def computed(engine: Engine, demand: Demand, policy: Eviction, keeps: Keeps) -> int:
    """Tokens that a window computes for a demand under a policy."""
    total = 0
    fixed = engine.encode_system_prompt(_SYSTEM_PROMPT).tokens
    asked = engine.encode_query(_QUERY).tokens + 1
    budget = fixed + demand.budget + asked
    opened = Window(engine, _SYSTEM_PROMPT, budget, Fidelity("auto"), eviction=policy, retrieval=ById())
    with isolated(engine), opened as window:
        ids: dict[int, str] = {}
        for step in demand.steps:
            for c in step.arrive:
                ids[c] = window.append(
                    Chunk.tokens([20 + (7 * c + i * (c + 1)) % 300 for i in range(demand.tokens[c])])
                )
            wanted = [ids[c] for c in step.need if ids[c] not in window.ids]
            for here in (ids[c] for c in step.need if ids[c] in window.ids):
                window.touch(here)
            # What has arrived and what is needed stays, whatever the policy says: the ask is about it.
            held = [ids[c] for c in {*step.arrive, *step.need} if ids[c] in window.ids]
            for placement in held:
                window.pin(placement)
            if wanted:
                window.look_back(" ".join(wanted), reserve_tokens=asked)
            window.slide(reserve_tokens=asked)
            for placement in held:
                window.pin(placement, pinned=False)
            total += window.ask(_QUERY, max_tokens=1).usage.computed_tokens
            if keeps == "placed":
                _drop(engine)
                window.core.assembly.before.clear()
    return total


def _drop(engine: Engine) -> None:
    """Deletes the KV of whatever is not placed."""
    for key in list(engine.store.list("span/")):
        if not engine.repo.leased(key):
            engine.repo.delete(key)


def measure(engine: Engine, wanted: Sequence[Demand], advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """A row for each window and store: the optimum, and what each policy computes."""
    rows = []
    for demand in wanted:
        fixed = engine.encode_system_prompt(_SYSTEM_PROMPT).tokens
        needed = fixed + sum(demand.tokens) + len(demand.steps) * engine.encode_query(_QUERY).tokens
        for keeps in STORES:
            # The system prompt's KV is leased by nobody, so a store that keeps what is placed computes it again.
            again = 0 if keeps == "everything" else fixed * (len(demand.steps) - 1)
            best = needed + again + optimum(demand, keeps)
            took = {name: computed(engine, demand, made(), keeps) for name, made in POLICIES.items()}
            row = {"window": demand.name, "store": keeps, "asks": len(demand.steps), "chunks": len(demand.tokens)}
            row |= {"needs": sum(len(s.need) for s in demand.steps), "optimum": best, "computed": took}
            rows.append(row | {"ratio": {name: tokens / best for name, tokens in took.items()}})
            advance(1)
    return rows


def optimum_table(rows: Iterable[dict[str, Any]]) -> Table:
    """The result for a terminal."""
    columns = "|".join(["window", "store keeps", "asks", "chunks", "needed again", "optimum", *POLICIES])
    made = new_table("Tokens computed over the offline optimum", columns, left=(0, 1))
    for row in rows:
        ratios = [f"{ratio:.3f}" for ratio in row["ratio"].values()]
        counts = (str(row[name]) for name in ("asks", "chunks", "needs"))
        made.add_row(row["window"], row["store"], *counts, f"{row['optimum']:,.0f}", *ratios)
    return made


def main(
    traces: Annotated[list[Path], typer.Argument(help="Traces, as the examples write with --trace.")],
    model: Model = "tiny",
    threads: Threads = 1,
    output: Annotated[Path | None, typer.Option(help="Also write optimum.json into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Hold the policies against the best possible, over recorded traces."""
    with errors():
        wanted = [demand for path in traces for demand in demands(path)]
        engine = open_model(model, "float32", "cpu", threads)
        with progress("windows", len(STORES) * len(wanted)) as advance:
            rows = measure(engine, wanted, advance)
        result = {"policies": list(POLICIES), "rows": rows}
        write_result(output, "optimum.json", result)
        show(result, as_json, optimum_table(rows))


if __name__ == "__main__":
    typer.run(main)
