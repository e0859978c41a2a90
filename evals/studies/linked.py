"""Linking in one step: gaps of stored chunks computed at once, each behind stored KV alone (`ctxwin.engines.segments.gap_runs`).

The same files are linked in other orders on embedded vLLM: a random model of half a billion parameters, whose answers are noise
and whose cost is real. With ``--task`` a trained model (``--model``) answers a generated task's questions over its chunks, each
stored by itself; its time is mostly that of requests.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer

from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment, partial_ranges
from ctxwin.kv.layout import SpanKV
from ctxwin_evals.console import Json, numbers, show
from ctxwin_evals.stats import share_interval
from ctxwin_evals.tasks.tiny import TinyOptions, TinyTask

from .command import SYSTEM_PROMPT, Seed, errors

SHARE = 0.15
NAMES = ["prefix cache", "full reuse", "MPIC-8", "MPIC-16", "MPIC-32", "in a row"]
NAMES += [f"apart, joined over {join}" for join in (0, 3, 8)]


@dataclass(frozen=True)
class Prompt:
    """Chunks in an order, each with the KV it has alone, and what is asked of them; no answer where it is noise."""

    chunks: Sequence[tuple[Encoded, SpanKV]]
    query: Encoded
    answer: str = ""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the requests that vLLM in this process gets, and the steps in which it computes, until the block ends."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counts, add, schedule = Counter[str](), Scheduler.add_request, Scheduler.schedule

    def count_request(self: Scheduler, *arguments: Any) -> None:
        counts["requests"] += 1
        add(self, *arguments)

    def count_step(self: Scheduler, *arguments: Any) -> Any:
        output = schedule(self, *arguments)
        counts["steps"] += output.total_num_scheduled_tokens > 0
        return output

    with mock.patch.multiple(Scheduler, add_request=count_request, schedule=count_step):
        yield counts


def ranges_of(chosen: Sequence[int], join: int = 0) -> tuple[tuple[int, int], ...]:
    """Return tokens as ascending ranges; those that at most ``join`` others separate are one."""
    ranges: list[tuple[int, int]] = []
    for token in sorted(chosen):
        if ranges and token - ranges[-1][1] <= join:
            ranges[-1] = ranges[-1][0], token + 1
        else:
            ranges.append((token, token + 1))
    return tuple(ranges)


def files_of(engine: Engine, front: Segment, files: int, size: int, runs: int) -> Iterator[Prompt]:
    """Yield the same files in an order of each run's own."""
    from ctxwin_evals.bench.moves import QUERY, make_chunk

    encoded = [engine.encode(make_chunk(engine, size, 700_000 + i)) for i in range(files)]
    stored = [(each, engine.prefill([front], each, front.encoded.advance)) for each in encoded]
    rng = np.random.default_rng(files)
    for _ in range(runs):
        yield Prompt([stored[i] for i in rng.permutation(files).tolist()], engine.encode_query(QUERY))


def questions_of(engine: Engine, front: Segment, task: TinyTask, n: int) -> Iterator[Prompt]:
    """Yield the questions of a task."""
    for item in task.items(n):
        chunks = item.load()
        encoded = [engine.encode(chunks[i]) for i in item.placed]
        stored = [(each, engine.prefill([front], each, front.encoded.advance)) for each in encoded]
        yield Prompt(stored, engine.encode_query(item.query), str(item.target))


def measure(engine: Engine, front: Segment, prompts: Iterator[Prompt], counts: Counter[str]) -> list[dict[str, Any]]:
    """Ask every arm for each prompt, side by side; the first one, which learns what calls cost, is not counted."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    rng = np.random.default_rng(0x6C696E6B)
    for run, prompt in enumerate(prompts):
        picks = [rng.permutation(each.tokens)[: round(SHARE * each.tokens)].tolist() for each, _ in prompt.chunks]
        for name in NAMES:
            layout, start, word = [front], front.encoded.advance, name.split()[-1]
            for i, (each, span) in enumerate(prompt.chunks):
                ranges = ranges_of(range(len(picks[i])))
                if name.startswith("apart"):
                    ranges = ranges_of(picks[i], int(word))
                elif name.startswith("MPIC"):
                    ranges = partial_ranges(each.media_ranges, int(name[5:]), each.tokens)
                linked = Segment(each, start, span, span_key=f"{name}-{run}-{i}", approximate=True)
                if name == "prefix cache":
                    linked = Segment(each, start)
                elif name != "full reuse":
                    linked = replace(linked, recompute=ranges)
                layout.append(linked)
                start += each.advance
            salt = "" if name == "prefix cache" else f"{name}-{run}"
            counts.clear()
            answer = engine.generate(layout, prompt.query, Sampling(max_tokens=1), salt=salt)
            row = answer.ttft_s, answer.computed_tokens, counts["requests"], counts["steps"]
            found[name] += [(*row, float(answer.text.strip() == prompt.answer))] * bool(run)
    rows = []
    for name, asks in found.items():
        ratios = [ask[0] / base[0] for ask, base in zip(asks, found["prefix cache"], strict=True)]
        first, computed, requests, steps = (median(ask[i] for ask in asks) for i in range(4))
        right = [ask[4] for ask in asks]
        rows.append({
            "arm": name, "n": len(asks), "requests": requests, "steps": steps, "computed": computed,
            "first_token_ms": 1e3 * first, "ratio": median(ratios), "least": min(ratios), "most": max(ratios),
            "right": sum(right) / len(right), "right_ci95": share_interval(right, [str(i) for i in range(len(right))]),
        })  # fmt: skip
    return rows


def main(
    files: Annotated[int, typer.Option(help="Files in a prompt.", min=2)] = 8,
    size: Annotated[int, typer.Option(help="Tokens of a file.", min=64)] = 256,
    runs: Annotated[int, typer.Option(help="Orders that are timed, or questions of the task.", min=1)] = 5,
    task: Annotated[str, typer.Option(help="tiny/NAME: its questions instead of the files.")] = "",
    model: Annotated[str, typer.Option(help="The model that is asked them.")] = "tiny",
    frames: Annotated[str, typer.Option(help="Numbers of frames of a question.")] = "3,4,5,6",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Time linked chunks on vLLM beside a prefix cache."""
    from ctxwin.opening import open_engine
    from ctxwin_evals.bench.model import Sizes, ensure_model

    with errors():
        options = TinyOptions(seed, tuple(numbers(frames)))
        name, dtype = (model, "float32") if task else (str(ensure_model(Sizes(), 0)[0]), "bfloat16")
        with open_engine(name, engine="vllm", dtype=dtype, processes="single") as engine, counted() as counts:
            header = engine.encode_system_prompt(SYSTEM_PROMPT)
            front = Segment(header, 0, span=engine.prefill([], header, 0), span_key="header")
            prompts = files_of(engine, front, files, size, runs + 1)
            if task:
                prompts = questions_of(engine, front, TinyTask(task, options), runs + 1)
            rows = measure(engine, front, prompts, counts)
        lines = ["| arm | requests | steps | computed | first token | of a prefix cache's | right |", "|---" * 7 + "|"]
        for row in rows:
            cells = f"{row['first_token_ms']:.0f} ms | {row['ratio']:.2f} [{row['least']:.2f}, {row['most']:.2f}]"
            low, high = row["right_ci95"]
            cells += f" | {row['right']:.2f} [{low:.2f}, {high:.2f}]" if task else " | "
            work = " | ".join(f"{row[name]:.0f}" for name in ("requests", "steps", "computed"))
            lines.append(f"| {row['arm']} | {work} | {cells} |")
        show({"files": files, "size": size, "task": task, "rows": rows}, as_json, "\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
