"""Linking files of a library in orders they were never seen in: what it costs, and what it does to the answers.

``speed``: a random model of half a billion parameters on vLLM, whose answers are noise and whose cost is real. Each prompt links
the same files in another order: computed behind what a prefix cache finds (the system prompt alone), all from canonicals
(``full reuse``), or with all text and the first k tokens of each picture computed in context (``mpic:K``; MPIC, section 4.2).
``reading``: a store whose reads take as long as a new chunk's forward; the chunk stands in front of four held ones (MPIC, section
3.2: at best both take as long as the longer one). ``rates``: the same asks arriving at rising rates. ``answers``: trained models
of the bundled world on transformers, against a re-prefill of the same prompt.

MPIC is served in a chain of requests (`ctxwin.engines.base.Segment.recompute`); its figures are those of a window.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Sampling, Segment
from ctxwin.evals.bench.model import SMALL, Sizes, ensure_model
from ctxwin.evals.bench.moves import QUERY, SYSTEM_PROMPT, make_chunk
from ctxwin.evals.console import Json, errors, new_table, numbers, progress, show, write_result
from ctxwin.evals.stats import wilson
from ctxwin.fidelity import Fidelity, Lane
from ctxwin.library.library import Library
from ctxwin.store.memory import MemoryStore
from ctxwin.store.spans import SpanRepository
from ctxwin.tiny.world import Task as WorldTask
from ctxwin.tiny.world import make_item, render
from ctxwin.window.window import Window

from .command import Output

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.base import Engine
    from ctxwin.window.answer import Answer

SEED = 977_000_000  # items of its own
TASKS: tuple[WorldTask, ...] = ("multi_hop", "order", "single_hop")
PREFIX = "prefix cache"


def arms(counts: Sequence[int]) -> dict[str, Fidelity]:
    """What is compared, by name."""
    # The prefix cache's arm leaves exact KV in the store, which would be served.
    only: tuple[Lane, ...] = ("resident", "survivor", "patched")
    linked = {f"mpic:{k}": Fidelity("patched", recompute=k, forbid=only) for k in counts}
    return {PREFIX: Fidelity("exact"), "full reuse": Fidelity("blind"), **linked}


def asked(engine: Engine, chunks: Sequence[Chunk], fidelity: Fidelity, query: str, max_tokens: int = 1) -> Answer:
    """One question behind these files in this order, in a window of its own."""
    with Window(engine, SYSTEM_PROMPT, fidelity=fidelity) as window:
        window.extend(chunks)
        return window.ask(query, max_tokens=max_tokens)


def shelf(engine: Engine, pictures: int, tokens: int, seed: int) -> list[Chunk]:
    """Files of a library, whose KV behind a neutral header is computed as at their upload."""
    chunks = [make_chunk(engine, tokens, seed + i) for i in range(pictures)]
    library = Library(engine.store, f"shelf-{seed}")
    for i, chunk in enumerate(chunks):
        library.add(chunk, f"file-{i}")
    library.prepare(engine)
    return chunks


def speed(
    engine: Engine, counts: Sequence[int], pictures: Sequence[int], tokens: int, runs: int, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """First tokens, side by side: each run takes an order of its own and asks every arm for it."""
    rows: list[dict[str, Any]] = []
    for many in pictures:
        chunks = shelf(engine, 2 * many, tokens, 1000 * many)
        found: dict[str, list[Answer]] = {name: [] for name in arms(counts)}
        rng = np.random.default_rng(many)
        for run in range(runs + 1):  # the first one learns what calls cost
            order = [chunks[i] for i in rng.permutation(2 * many)[:many]]
            for name, fidelity in arms(counts).items():
                answer = asked(engine, order, fidelity, QUERY)
                if run:
                    found[name].append(answer)
            done(1)
        base = [a.usage.ttft_s for a in found[PREFIX]]
        for name, answers in found.items():
            first = [a.usage.ttft_s for a in answers]
            ratios = [mine / his for mine, his in zip(first, base, strict=True)]
            rows.append({
                "pictures": many, "arm": name, "prompt": answers[0].usage.prompt_tokens,
                "computed": median(a.usage.computed_tokens for a in answers), "first_token_ms": 1e3 * median(first),
                "ratio": median(ratios), "ratio_range": [min(ratios), max(ratios)], "runs": runs,
            })  # fmt: skip
    return rows


def scattered(
    engine: Engine, shares: Sequence[float], pictures: int, tokens: int, runs: int, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """First tokens where a share of each file's tokens is computed that stands apart, as those that deviate most do
    (CacheBlend-r, without what it takes to find them), beside as many in a row."""
    chunks = shelf(engine, pictures, tokens, 700_000)
    rows: list[dict[str, Any]] = []
    prompt = engine.encode_system_prompt(SYSTEM_PROMPT)
    query, rng = engine.encode_query(QUERY), np.random.default_rng(5)
    encoded = [engine.encode(chunk) for chunk in chunks]
    front = Segment(prompt, 0, span=engine.prefill([], prompt, 0), span_key="prompt")
    spans = [engine.prefill([front], each, prompt.advance) for each in encoded]
    for share in shares:
        for name in ("in a row", "apart"):
            found = []
            for run in range(runs + 1):
                layout, at = [front], prompt.advance
                for i in (int(j) for j in rng.permutation(pictures)):
                    count = round(share * encoded[i].tokens)
                    chosen = np.arange(count) if name == "in a row" else rng.permutation(encoded[i].tokens)[:count]
                    key = f"{name}-{share}-{run}-{i}"
                    segment = Segment(encoded[i], at, spans[i], span_key=key, approximate=True)
                    layout.append(replace(segment, recompute=ranges_of(chosen)))
                    at += encoded[i].advance
                made = engine.generate(layout, query, Sampling(max_tokens=1), salt=f"{name}-{share}-{run}")
                if run:
                    found.append(made)
            rows.append({
                "share": share, "where": name, "requests": median(m.forwards for m in found),
                "computed": median(m.computed_tokens for m in found), "first_token_ms": 1e3 * median(m.ttft_s for m in found),
            })  # fmt: skip
            done(1)
    return rows


def ranges_of(tokens: Sequence[int] | np.ndarray) -> tuple[tuple[int, int], ...]:
    """Different tokens as ascending ranges apart."""
    made: list[tuple[int, int]] = []
    for token in sorted(int(t) for t in tokens):
        if made and made[-1][1] == token:
            made[-1] = (made[-1][0], token + 1)
        else:
            made.append((token, token + 1))
    return tuple(made)


class SlowStore(MemoryStore):
    """Reads of the keys in ``far`` take ``seconds``."""

    seconds = 0.0
    far: frozenset[str] = frozenset()

    def tier(self, key: str) -> str:
        return "SlowStore" if self.seconds and key in self.far else "MemoryStore"

    def get(self, key: str) -> bytes | None:
        if key in self.far:
            time.sleep(self.seconds)
        return super().get(key)


def reading(
    engine: Engine, store: SlowStore, tokens: int, runs: int, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """First tokens of: reading alone, computing alone, and both."""
    engine.repo = SpanRepository(
        store, engine.spec.identity, max_live_bytes=0, spec=engine.spec.kv
    )  # nothing is at hand
    window = Window(engine, SYSTEM_PROMPT, fidelity=Fidelity("patched"))
    window.extend([make_chunk(engine, tokens, 900 + i) for i in range(4)])
    window.ask(QUERY, max_tokens=1)
    store.far = frozenset(
        placed.kv.span for placed in window.snapshot().placed if placed.kv
    )  # the system prompt is near
    found: dict[str, list[float]] = {"computing": [], "reading": [], "both": []}
    for run in range(runs + 2):
        new = make_chunk(engine, tokens, 950 + 10 * run), make_chunk(engine, tokens, 951 + 10 * run)
        for name, chunk in (("computing", new[0]), ("reading", None), ("both", new[1])):
            store.seconds = 0.0 if name == "computing" else median(found["computing"] or [0.1])
            with window.fork() as branch:
                if chunk is not None:
                    branch.insert(0, chunk)
                took = branch.ask(QUERY, max_tokens=1).usage.ttft_s
                found[name].append(took)
            store.seconds = 0.0
        done(1)
    kept = {name: taken[2:] for name, taken in found.items()}  # the first ones learn what calls and reads cost
    longer = [max(a, b) for a, b in zip(kept["computing"], kept["reading"], strict=True)]
    ratios = [both / alone for both, alone in zip(kept["both"], longer, strict=True)]
    made = {f"{name}_ms": 1e3 * median(taken) for name, taken in kept.items()}
    return [{**made, "of_the_longer": median(ratios), "range": [min(ratios), max(ratios)], "runs": runs}]


def arriving(engine: Engine, order: Sequence[Chunk], fidelity: Fidelity, due: float, waits: list[float]) -> None:
    """Asks once it is ``due``; adds seconds from then to the first token."""
    time.sleep(max(0.0, due - time.perf_counter()))
    entered = time.perf_counter()
    waits.append(entered - due + asked(engine, order, fidelity, QUERY).usage.ttft_s)


def rates(
    engine: Engine,
    counts: Sequence[int],
    pictures: int,
    tokens: int,
    at: Sequence[float],
    seconds: float,
    done: Callable[[int], None],
) -> list[dict[str, Any]]:
    """First tokens and throughput while asks arrive at a rate, of whom each links the files in an order of its own."""
    chunks = shelf(engine, pictures, tokens, 500_000)
    rows: list[dict[str, Any]] = []
    seed = 0
    for rate in at:
        for name, fidelity in arms(counts).items():
            waits: list[float] = []
            threads = []
            begin = time.perf_counter()
            arrivals = np.cumsum(np.random.default_rng(7).exponential(1 / rate, max(2, round(rate * seconds))))
            for due in arrivals:
                seed += 1
                order = [chunks[i] for i in np.random.default_rng(seed).permutation(pictures)]

                due = begin + float(due)
                threads.append(threading.Thread(target=arriving, args=(engine, order, fidelity, due, waits)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            took = time.perf_counter() - begin
            rows.append({
                "rate": rate, "arm": name, "asks": len(waits), "first_token_ms": 1e3 * median(waits),
                "p95_ms": 1e3 * float(np.quantile(waits, 0.95)), "asks_per_s": len(waits) / took,
            })  # fmt: skip
            done(1)
    return rows


def answers(
    engine: Engine, counts: Sequence[int], n: int, conflict: float, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Agreement with a re-prefill of the same prompt, over held-out items: frames that were uploaded one by one."""
    found: dict[str, list[tuple[bool, bool, int]]] = {name: [] for name in arms(counts)}
    for i in range(n):
        task = TASKS[i % len(TASKS)]
        item = make_item(SEED + i, task, 3 + i % 4, conflict=max(conflict, float(task == "order")))
        chunks = [Chunk.image(render(frame)) for frame in item.frames]
        library = Library(engine.store, f"answers-{i}")
        for j, chunk in enumerate(chunks):
            library.add(chunk, f"file-{j}")
        library.prepare(engine)
        question, texts = item.questions[0], dict[str, str]()
        for name, fidelity in arms(counts).items():
            answer = asked(engine, chunks, fidelity, question.text, 4)
            texts[name] = answer.text
            same, right = answer.text == texts[PREFIX], answer.text.strip() == question.answer
            found[name].append((same, right, answer.usage.computed_tokens))
        library.delete()
        done(1)
    rows = []
    for name, seen in found.items():
        agreed = sum(same for same, _, _ in seen)
        rows.append({
            "arm": name, "n": n, "agreed": agreed / n, "ci95": list(wilson(agreed, n)), "right": sum(r for _, r, _ in seen) / n,
            "computed": sum(c for _, _, c in seen) / n,
        })  # fmt: skip
    return rows


def main(
    parts: Annotated[
        str, typer.Option(help="speed, scattered, reading, rates, answers; comma-separated.")
    ] = "speed,reading,rates,answers",
    model: Annotated[str, typer.Option(help="half (0.5 B) or small (79 M), both random: of speed and rates.")] = "half",
    trained: Annotated[str, typer.Option(help="Models of the bundled world, comma-separated.")] = "tiny",
    k: Annotated[str, typer.Option(help="Tokens of each picture that are computed, comma-separated.")] = "8,16,32",
    pictures: Annotated[str, typer.Option(help="Files in a prompt, comma-separated; rates take the last.")] = "2,4,8",
    tokens: Annotated[int, typer.Option(help="Tokens of a file.", min=16)] = 256,
    runs: Annotated[int, typer.Option(help="Orders that are timed.", min=1)] = 5,
    at: Annotated[str, typer.Option(help="Asks a second, comma-separated.")] = "0.1,0.3,1.0",
    seconds: Annotated[float, typer.Option(help="For how long asks arrive at each rate.")] = 40.0,
    n: Annotated[int, typer.Option(help="Held-out items.", min=1)] = 300,
    conflict: Annotated[float, typer.Option(help="Share of items whose legends disagree.")] = 0.8,
    quick: Annotated[bool, typer.Option("--quick", help="At most three minutes: small, few runs, 30 items.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """What linking a library's files costs and does, beside a prefix cache and full reuse."""
    from ctxwin.engines.open import open_engine

    if quick:
        model, pictures, tokens, runs, at, seconds, n = "small", "4", 512, 2, "1.0", 5.0, 30
    wanted, counts, many = parts.split(","), numbers(k), numbers(pictures)
    levels = [float(x) for x in at.split(",")]
    result: dict[str, Any] = {"config": {"model": model, "tokens": tokens, "k": counts, "conflict": conflict}}
    with errors():
        if unknown := set(wanted) - {"speed", "scattered", "reading", "rates", "answers"}:
            raise typer.BadParameter(
                f"parts must be speed, scattered, reading, rates and answers, got {sorted(unknown)}"
            )
        if {"speed", "scattered", "reading", "rates"} & set(wanted):
            folder, _ = ensure_model(SMALL if model == "small" else Sizes(), 0)
            store = SlowStore()
            with open_engine(f"vllm:{folder}", dtype="bfloat16", store=store) as engine:
                if "speed" in wanted:
                    with progress("orders", len(many) * (runs + 1)) as done:
                        result["speed"] = speed(engine, counts, many, tokens, runs, done)
                if "scattered" in wanted:
                    with progress("shares", 4) as done:
                        result["scattered"] = scattered(engine, (0.05, 0.15), many[-1], tokens, runs, done)
                if "reading" in wanted:
                    with progress("reads", runs + 2) as done:
                        result["reading"] = reading(engine, store, tokens, runs, done)
                if "rates" in wanted:
                    with progress("rates", len(levels) * (2 + len(counts))) as done:
                        result["rates"] = rates(engine, counts, many[-1], tokens, levels, seconds, done)
        for name in trained.split(",") if "answers" in wanted else ():
            where = "tiny:hf" if name == "tiny" else f"hf:{name}"
            with open_engine(where) as engine, progress(f"items on {Path(name).name}", n) as done:
                result.setdefault("answers", {})[Path(name).name] = answers(engine, counts, n, conflict, done)
    write_result(output, "linked.json", result)
    show(result, json, *tables(result))


def tables(result: dict[str, Any]) -> list[Table]:
    """What was measured, for people."""
    made = []
    if "speed" in result:
        table = new_table("First token", "files|arm|computed of the prompt|ms|of a prefix cache's", left=(1,))
        for row in result["speed"]:
            low, high = row["ratio_range"]
            share = f"{row['computed']:.0f} / {row['prompt']}"
            ratio = f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]"
            table.add_row(str(row["pictures"]), row["arm"], share, f"{row['first_token_ms']:.0f}", ratio)
        made.append(table)
    if "scattered" in result:
        table = new_table("Tokens apart", "share|where|requests|computed|first token, ms", left=(1,))
        for row in result["scattered"]:
            shown = (f"{row[name]:.0f}" for name in ("requests", "computed", "first_token_ms"))
            table.add_row(f"{row['share']:g}", row["where"], *shown)
        made.append(table)
    if "reading" in result:
        table = new_table("Reading beside computing", "computing alone, ms|reading alone|both|of the longer one")
        for row in result["reading"]:
            low, high = row["range"]
            ratio = f"{row['of_the_longer']:.2f} [{low:.2f}, {high:.2f}]"
            table.add_row(*(f"{row[f'{name}_ms']:.0f}" for name in ("computing", "reading", "both")), ratio)
        made.append(table)
    if "rates" in result:
        table = new_table("First token under load", "asks/s|arm|ms|95 %|answered/s", left=(1,))
        for row in result["rates"]:
            table.add_row(
                f"{row['rate']:g}",
                row["arm"],
                f"{row['first_token_ms']:.0f}",
                f"{row['p95_ms']:.0f}",
                f"{row['asks_per_s']:.2f}",
            )
        made.append(table)
    for name, rows in result.get("answers", {}).items():
        table = new_table(name, "arm|agrees with a re-prefill|right|computed tokens")
        for row in rows:
            low, high = row["ci95"]
            agreed = f"{row['agreed']:.3f} [{low:.3f}, {high:.3f}]"
            table.add_row(row["arm"], agreed, f"{row['right']:.3f}", f"{row['computed']:.0f}")
        made.append(table)
    return made


if __name__ == "__main__":
    typer.run(main)
