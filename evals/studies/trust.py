"""From no profile to promoted: the demo's stream on a model whose profile was taken away, audits included.

``python -m evals.studies.trust [--model tiny] [--engine vllm] [--asks 500] [--reference stricter]``

Windows are of `Fidelity("auto")`. Between two asks the engine is idle until everything that was handed over is audited, as it
would be between the frames of a camera; what audits compute is counted. ``least`` is what nobody can do without: each frame
once when it is new, and each question.
"""

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ctxwin import Chunk, Window
from ctxwin.audit import Options, auditor_of
from ctxwin.baselines.ledger import Ledger
from ctxwin.baselines.policies import POLICIES
from ctxwin.baselines.prefix_cache import PrefixCache
from ctxwin.demo.agent import Agent, Step
from ctxwin.demo.earning import without_profile
from ctxwin.demo.run import Options as DemoOptions
from ctxwin.demo.run import prepare
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.opening import open_engine

SEED_ASKS = 50
"""Asks that a stream of the demo's length has, at least."""


def randomise(folder: Path) -> None:
    """Draw the decoder of a model anew."""
    import torch
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    weights, drawn = load_file(path), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "visual" not in name and weight.ndim > 1:
            weights[name] = (torch.randn(weight.shape, generator=drawn) * weight.float().std()).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})


def turn(
    engine: Engine,
    options: Options,
    first: str,
    then: str,
    most: int,
    *,
    reordered: bool = False,
    conflict: float = 0.8,
) -> dict[str, Any]:
    """Serve asks of one kind until a way is promoted, then of another kind until it is given up: one window an item.

    ``reordered``: the frames before the one that is asked about are put into another order, for which that one has an
    orbit patch. What `multi_hop` asks does not depend on their order, and what ``order`` asks does.
    """
    from ctxwin.tiny.world import make_item, render

    auditor = auditor_of(engine, options)
    result: dict[str, Any] = {"first": first, "then": then, "options": vars(options)}
    way: str | None = None
    for kind, change in ((first, "promoted"), (then, "demoted")):
        begun, audits, lost = len(auditor.decisions(engine)), auditor.counts.audits, auditor.counts.lost
        outcomes: Counter[str] = Counter()
        for index in range(most):
            drawn = 1000 * (kind == then) + index
            item = make_item(drawn, kind, 3 + index % 4, conflict=1.0 if kind == "order" else conflict)  # type: ignore[arg-type]
            question = item.questions[0]
            if reordered and question.frame < 2:
                continue
            with Window(engine, "You watch a camera.") as window:
                frames = item.frames[: question.frame + 1] if reordered else item.frames
                *front, last = window.extend([Chunk.image(render(frame), keep_source=False) for frame in frames])
                if reordered:
                    window.maintenance.prepare_orbit(front, 3)
                    window.reorder([*reversed(front), last])
                way = window.core.audits.strategy
                answer = window.ask(question.text, 4)
                auditor.drain()
                verdict = "right" if answer.text.strip() == question.answer else "wrong"
                outcomes[f"{way or 'exact'} {verdict}"] += 1
            if any(d.what == change for d in auditor.decisions(engine)[begun:]):
                break
        result[kind] = {
            "asks": sum(outcomes.values()),
            "audited": auditor.counts.audits - audits,
            "lost": auditor.counts.lost - lost,
            "served": dict(outcomes),
            "decisions": [str(d) for d in auditor.decisions(engine)[begun:]],
            "ways": {n: e.model_dump() for n, e in auditor.ledger(engine).record.ways.items()},
        }
    return result


def beside(engine: Engine, pairs: int = 12, requests: int = 50, gap_s: float = 0.1) -> dict[str, Any]:
    """Measure the effect on plain requests: processor time of the process during each one, with audits and without.

    Requests come at random, ``gap_s`` apart in the mean. Pairs of slices, in alternating order, each after the same window's
    asks, all of which are due to be audited: in one slice of a pair in the pauses, in the other after it.
    """
    from ctxwin.engines.sampling import Sampling
    from ctxwin.engines.segments import Segment
    from ctxwin.tiny.world import make_stream, questions_for, render

    auditor = auditor_of(engine, Options(queue=64))
    took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    system, rng = engine.encode_system_prompt("You answer briefly."), np.random.default_rng(0)
    audited = 0
    for index in range(2 * pairs):
        pair, audits = index // 2, (index % 2 == 1) != (index // 2 % 2 == 1)
        frames = make_stream(np.random.default_rng(index), 6, window=6)
        with auditor.hold(), Window(engine, "You watch a camera.", fidelity=Fidelity("blind", audit=1.0)) as window:
            window.extend([Chunk.image(render(frame)) for frame in frames])
            for question in questions_for(frames, 20, np.random.default_rng(index), ("multi_hop", "single_hop")):
                window.ask(question.text, 4)
        audits_before = auditor.counts.audits
        with contextlib.nullcontext() if audits else auditor.hold():
            for number in range(requests):
                time.sleep(rng.exponential(gap_s))
                query = engine.encode_query(f"what is {pair} and {number}?")
                began = time.perf_counter(), time.process_time()
                engine.generate([Segment(system, 0)], query, Sampling(4))
                ended = time.perf_counter(), time.process_time()
                took[audits].append((1e3 * (ended[0] - began[0]), 1e3 * (ended[1] - began[1])))
        audited += (auditor.counts.audits - audits_before) if audits else 0
        auditor.drain()
    result: dict[str, Any] = {"counts": vars(auditor.counts), "audited_beside": audited, "gap_s": gap_s}
    for clock, name in enumerate(("wall", "processor")):
        off, on = (np.array([t[clock] for t in took[audits]]) for audits in (False, True))
        result[name] = {
            f"p{p}_ms": {"resting": float(np.quantile(off, p / 100)), "audits": float(np.quantile(on, p / 100))}
            for p in (50, 90, 99)
        }
        drawn = rng.integers(len(off), size=(2000, len(off)))
        ratios = np.quantile(on[drawn], 0.99, axis=1) / np.quantile(off[rng.permuted(drawn)], 0.99, axis=1)
        result[name]["p99_ratio_ci95"] = [float(q) for q in np.quantile(ratios, [0.025, 0.5, 0.975])]
    result["n"] = len(took[True])
    return result


def run(engine: Engine, asks: int, fidelity: Fidelity, options: Options, folder: Path) -> dict[str, Any]:
    """Run so many asks of the demo, on one stream after another."""
    auditor = auditor_of(engine, options)
    seeds = tuple(range(-(-asks // SEED_ASKS)))
    footage = prepare(DemoOptions(out=folder, seeds=seeds))
    ledger, caches = Ledger(engine, policies=()), {policy: PrefixCache() for policy in POLICIES}
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        agent = Agent(engine, footage[seed], 6, fidelity, ledger, caches, seed)
        steps, frames_seen = agent.run(), 0
        while len(rows) < asks:
            with auditor.hold():
                step = next(steps, None)
            if step is None:
                break
            audited_before = auditor.counts.tokens
            auditor.drain()
            fresh = sum(agent._encoded[i].tokens for i in range(frames_seen, agent.frames_watched))
            frames_seen = agent.frames_watched
            rows.append(_row(step, fresh, auditor.counts.tokens - audited_before, agent.window.core.audits.strategy))
        agent.window.close()
    return {
        "asks": len(rows),
        "fidelity": fidelity.model_dump(),
        "options": vars(options),
        "first_half": _sums(rows[: len(rows) // 2]),
        "second_half": _sums(rows[len(rows) // 2 :]),
        "all": _sums(rows),
        "counts": vars(auditor.counts),
        "record": auditor.ledger(engine, fidelity.advanced.reference).record.model_dump(),
        "promoted_at": next((i for i, row in enumerate(rows) if row["way"]), None),
        "rows": rows,
    }


def _row(step: Step, fresh: int, audited: int, way: str | None) -> dict[str, Any]:
    query = step["prompt_tokens"] - sum(p["tokens"] for p in step["placed"])
    return {
        "op": step["op"],
        "kind": step["kind"],
        "way": way,
        "computed": step["computed_tokens"],
        "audited": audited,
        "least": fresh + max(0, query),
        **{policy: step[f"computed_tokens_{policy}"] for policy in POLICIES},
        "right": step["answer"] == step["truth"],
        "right_reprefill": step["answer_reprefill"] == step["truth"],
        "changed": step["answer"] != step["answer_reprefill"],
        "blind_changed": step["answer_blind"] != step["answer_reprefill"],
        "kl": step["kl"],
        "lanes": sorted({p["lane"] for p in step["placed"]}),
    }


def _sums(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from ctxwin_evals.stats import wilson

    names = ("computed", "audited", "least", *POLICIES)
    sums: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    approximate = [row for row in rows if row["way"]]
    for name, some in (("answers", rows), ("of_the_way", approximate)):
        changed = sum(row["changed"] for row in some)
        sums[name] = {"n": len(some), "changed": changed}
        if some:
            sums[name]["ci95"] = wilson(changed, len(some))
            sums[name]["right"] = sum(row["right"] for row in some) / len(some)
            sums[name]["right_reprefill"] = sum(row["right_reprefill"] for row in some) / len(some)
    sums["harmed_right"] = sum(row["right_reprefill"] and not row["right"] for row in approximate)
    sums["over_least"] = sums["computed"] / sums["least"]
    sums["over_append"] = sums["computed"] / sums["append"]
    return sums


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"))
    parser.add_argument("--asks", type=int, default=500)
    parser.add_argument("--reference", default="stricter", choices=("stricter", "window", "stream", "nearer"))
    parser.add_argument("--questions", type=int, default=Options().questions)
    parser.add_argument("--budget", type=float, default=Options().budget)
    parser.add_argument("--excess-budget", type=float, default=Options().excess_budget, help="nats a token of text")
    parser.add_argument("--turn", nargs=2, metavar=("FIRST", "THEN"), help="kinds of questions, one after the other")
    parser.add_argument("--reordered", action="store_true", help="of --turn: behind orbit patches, in another order")
    parser.add_argument("--conflict", type=float, default=0.8, help="of --turn: share of items whose legends disagree")
    parser.add_argument("--beside", action="store_true", help="what plain requests notice of audits")
    parser.add_argument("--gap", type=float, default=0.1, help="of --beside: seconds between requests, in the mean")
    parser.add_argument("--pairs", type=int, default=12, help="of --beside: pairs of slices")
    parser.add_argument("--requests", type=int, default=50, help="of --beside: requests in a slice")
    parser.add_argument("--rate", type=float, default=Options().rate)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("ctxwin").setLevel(logging.INFO)  # says what is decided, and when
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        without_profile("tiny" if arguments.model == "random" else arguments.model) as model,
    ):
        if arguments.model == "random":
            randomise(model)
        options = Options(
            share=1.0,
            quiet_s=0.0,
            questions=arguments.questions,
            queue=64,
            budget=arguments.budget,
            excess_budget=arguments.excess_budget,
            rate=arguments.rate,
        )
        with open_engine(str(model), engine=arguments.engine) as engine:
            fidelity = Fidelity("auto", advanced={"reference": arguments.reference})
            if arguments.beside:
                result = beside(engine, arguments.pairs, arguments.requests, arguments.gap)
            elif arguments.turn:
                first, then = arguments.turn
                result = turn(
                    engine,
                    options,
                    first,
                    then,
                    arguments.asks,
                    reordered=arguments.reordered,
                    conflict=arguments.conflict,
                )
            else:
                result = run(engine, arguments.asks, fidelity, options, Path(folder))
    result["seconds"] = time.monotonic() - began
    text = json.dumps(result, indent=1)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1) + "\n")


if __name__ == "__main__":
    main()
