"""Elastic Cache as engines serve it: answers, perplexity and tokens a second, at budgets of the KV.

``python -m evals.studies.elastic`` asks the bundled model eight questions behind one another of each clip. The prompt, first
question included, is merged by the attention of all of it, slots are dropped while the turns go on, and the later seven answers
are read where they stand. ``--model FOLDER`` reads natural text behind a prompt of it instead, and generates behind that, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.tiny.world import questions_for, render, sample_frames
from ctxwin_evals.console import Dtype, Engine, Json, Threads, errors, numbers, open_model_on, progress, show
from ctxwin_evals.stats import bootstrap_mean, share_interval

from .command import SYSTEM_PROMPT, Seed
from .released_texts import Texts

TURNS = 8
PROMPT, READ = 8, 2
"""Passages of 64 tokens in a prompt of natural text, and behind it."""
Case = tuple[list[Chunk], Encoded, list[int], list[range]]
"""Chunks, the query, the tokens read behind it, and where answers stand among them."""


def clips(engine: Any, seed: int, n: int) -> list[Case]:
    """Return clips of six frames, each with eight questions; the first answer is from before anything is merged."""
    cases: list[Case] = []
    turn = engine.template_ids("<|im_end|>\n<|im_start|>user\n")
    for index in range(n):
        rng = np.random.default_rng((0x656C, seed, index))
        frames = sample_frames(rng, ["legend", "scene"] * 3)
        first, *rest = questions_for(frames, TURNS, rng)
        read, answers = list(engine.text_ids(first.answer)), []
        for question in rest:
            read += [*turn, *engine.encode_query(question.text).token_ids]
            word = engine.text_ids(question.answer)
            answers.append(range(len(read), len(read) + len(word)))
            read += [*word]
        cases.append(([Chunk.image(render(frame)) for frame in frames], engine.encode_query(first.text), read, answers))
    return cases


def passages(engine: Any, seed: int, n: int) -> list[Case]:
    """Return passages of natural text, each with what it says next."""
    cases: list[Case] = []
    for context in Texts(engine, seed).contexts("text-8x64", n):
        chunks = [Chunk.tokens(list(ids)) for ids in context.chunks[:PROMPT]]
        first, *read = [token for ids in context.chunks[PROMPT : PROMPT + READ] for token in ids]
        cases.append((chunks, engine.encode(Chunk.tokens([first])), read, []))
    return cases


def layout_of(engine: Any, chunks: Sequence[Chunk]) -> list[Segment]:
    segments, at = [], 0
    for part in (engine.encode_system_prompt(SYSTEM_PROMPT), *map(engine.encode, chunks)):
        segments.append(Segment(part, at))
        at += part.advance
    return segments


def main(
    model: Annotated[str, typer.Option(help="'tiny', or a folder of a text model.")] = "tiny",
    engine: Engine = "vllm",
    budgets: Annotated[str, typer.Option(help="Shares of the KV, in percent.")] = "100,80,60,40,20",
    every: Annotated[int, typer.Option(help="Tokens between two eliminations.", min=1)] = 16,
    n: Annotated[int, typer.Option(help="Clips or passages.", min=1)] = 32,
    timed: Annotated[int, typer.Option(help="Passages that are generated behind, too.", min=0)] = 8,
    dtype: Dtype = "float32",
    threads: Threads = 0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure answers, perplexity and speed."""
    with errors():
        opened: Any = open_model_on(engine, "{}", model, dtype, "cpu", threads)
        cases = clips(opened, seed, n) if model == "tiny" else passages(opened, seed, n)
        shares = [share / 100 for share in numbers(budgets)]
        rows: dict[float, list[tuple[float, list[bool], float]]] = {share: [] for share in shares}
        with progress("contexts", n) as advance:
            for i, (chunks, query, read, answers) in enumerate(cases):
                layout = layout_of(opened, chunks)
                for share in shares:
                    sampling = Sampling(len(read), hold=share, hold_every=every, merge_prompt=share < 1)
                    (scores,) = opened.forced_logprobs(layout, [(query, read)], sampling=sampling)
                    told = [j for answer in answers for j in answer] or range(1, len(read))
                    loss = -float(np.mean([scores[j][read[j]] for j in told]))
                    right = [
                        all(max(scores[j], key=scores[j].__getitem__) == read[j] for j in answer) for answer in answers
                    ]
                    speed = 0.0
                    if not answers and i < timed:
                        begun = time.perf_counter()
                        made = opened.generate(layout, query, sampling, salt=f"timed-{i}-{share}")
                        speed = len(made.token_ids) / (time.perf_counter() - begun - made.ttft_s)
                    rows[share].append((loss, right, speed))
                advance(1)
        opened.close()
        show(
            {"model": Path(model).name, "engine": engine, "every": every, "budgets": summary(rows)},
            as_json,
            table(rows),
        )


def summary(rows: dict[float, list[tuple[float, list[bool], float]]]) -> dict[str, Any]:
    """Return the figures of each budget, with 95 % intervals over contexts."""
    result: dict[str, Any] = {}
    whole = rows.get(1.0)
    for share, some in rows.items():
        clusters = [str(i) for i in range(len(some))]
        losses = [loss for loss, _, _ in some]
        interval = bootstrap_mean(losses, clusters)
        figures: dict[str, Any] = {
            "n": len(some),
            "perplexity": math.exp(float(np.mean(losses))),
            "perplexity_ci95": None if interval is None else [math.exp(bound) for bound in interval],
        }
        flat = [(float(hit), cluster) for (_, right, _), cluster in zip(some, clusters, strict=True) for hit in right]
        if flat:
            figures["right"], figures["answers"] = float(np.mean([hit for hit, _ in flat])), len(flat)
            figures["right_ci95"] = share_interval([hit for hit, _ in flat], [cluster for _, cluster in flat])
        speeds = [speed / base for (_, _, speed), (_, _, base) in zip(some, whole or (), strict=False) if base]
        if speeds:
            figures["tokens_per_s"] = float(np.median([speed for _, _, speed in some if speed]))
            figures["speed_ratio"] = float(np.median(speeds))
            figures["speed_ratio_ci95"] = bootstrap_mean(speeds, clusters[: len(speeds)])
        result[f"{share:g}"] = figures
    return result


def table(rows: dict[float, list[tuple[float, list[bool], float]]]) -> str:
    """Return the figures for people."""
    return "\n".join(f"{share}: {figures}" for share, figures in summary(rows).items())


if __name__ == "__main__":
    typer.run(main)
