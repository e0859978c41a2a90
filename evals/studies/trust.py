"""Questions that turn against a promoted way, on a model whose profile was taken away, and plain requests beside audits.

``python -m evals.studies.trust --turn multi_hop order [--reordered]`` or ``--beside``, with ``[--model tiny] [--engine vllm]``.
Windows are of `Fidelity("auto")`. Between two asks the engine is idle until everything that was handed over is audited.
"""

import argparse
import contextlib
import json
import logging
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from ctxwin import Chunk, Window
from ctxwin.audit import Options, auditor_of
from ctxwin.demo.earning import without_profile
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.opening import open_engine


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
                way = window.core.audits.in_force()[0]
                answer = window.ask(question.text, 4)
                auditor.drain()
                verdict = "right" if answer.text.strip() == question.answer else "wrong"
                outcomes[f"{way or 'exact'} {verdict}"] += 1
            if any(d.verdict == change for d in auditor.decisions(engine)[begun:]):
                break
        result[kind] = {
            "asks": sum(outcomes.values()),
            "audited": auditor.counts.audits - audits,
            "lost": auditor.counts.lost - lost,
            "served": dict(outcomes),
            "decisions": [str(d) for d in auditor.decisions(engine)[begun:]],
            "ways": {n: e.model_dump() for n, e in auditor.evidence_of(engine).record.strategies.items()},
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"))
    parts = parser.add_mutually_exclusive_group(required=True)
    parts.add_argument("--turn", nargs=2, metavar=("FIRST", "THEN"), help="kinds of questions, one after the other")
    parts.add_argument("--beside", action="store_true", help="what plain requests notice of audits")
    parser.add_argument("--asks", type=int, default=500, help="of --turn: most questions of a kind")
    parser.add_argument("--reordered", action="store_true", help="of --turn: behind orbit patches, in another order")
    parser.add_argument("--conflict", type=float, default=0.8, help="of --turn: share of items whose legends disagree")
    parser.add_argument("--budget", type=float, default=Options().budget, help="of --turn")
    parser.add_argument("--rate", type=float, default=Options().rate, help="of --turn: share of answers audited")
    parser.add_argument("--gap", type=float, default=0.1, help="of --beside: seconds between requests, in the mean")
    parser.add_argument("--pairs", type=int, default=12, help="of --beside: pairs of slices")
    parser.add_argument("--requests", type=int, default=50, help="of --beside: requests in a slice")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("ctxwin").setLevel(logging.INFO)  # says what is decided, and when
    began = time.monotonic()
    with without_profile(given.model) as model, open_engine(str(model), engine=given.engine) as engine:
        if given.beside:
            result = beside(engine, given.pairs, given.requests, given.gap)
        else:
            options = Options(given.budget, share=1.0, quiet_s=0.0, queue=64, rate=given.rate)
            first, then = given.turn
            way = {"reordered": given.reordered, "conflict": given.conflict}
            result = turn(engine, options, first, then, given.asks, **way)
    result["seconds"] = time.monotonic() - began
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
