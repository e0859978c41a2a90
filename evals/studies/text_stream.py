"""A sliding window of text on a model of any size: tokens beside users of a prefix cache, and answers beside re-prefills.

``make released`` and then ``python -m evals.studies.text_stream`` run it on SmolLM2-135M, with ``--model`` on another. Text is
the standard library's documentation. Each ask brings one chunk and a question, so the window slides at each ask once it is full:

- ``default``: no profile, audits between the asks, as an engine that idles runs them; all their tokens are counted;
- ``low water``, ``auto``: the same with ``low_water=0.5`` or ``"auto"``;
- ``exact``: nothing approximate is tried.

The opponents (`ctxwin.baselines`) send the same chunks as prompts to a prefix cache. An answer is compared with a re-prefill of
what the window places; where both are computed exactly, they can still differ by the rounding of another batch.
"""

import argparse
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.audit import Options, auditor_of
from ctxwin.baselines import NAMES, Ledger
from ctxwin.demo.earning import without_profile
from ctxwin.engines.base import Engine
from tools.released_models import default_cache

DEFAULT_MODEL = default_cache() / "smollm2"
SYSTEM_PROMPT, QUESTION = "You read a manual.", "\nIn one word, this text is about"
ANSWER_TOKENS, RESERVED = 6, 24
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "low water": {"low_water": 0.5},
    "auto": {"low_water": "auto"},
    "exact": {"fidelity": Fidelity("exact")},
    "exact, low water": {"fidelity": Fidelity("exact"), "low_water": 0.5},
    "exact, auto": {"fidelity": Fidelity("exact"), "low_water": "auto"},
}


def chunks_of(engine: Engine, tokens: int) -> Iterator[Chunk]:
    """Yield chunks of exactly so many tokens of the standard library's documentation."""
    from pydoc_data.topics import topics

    texts = (topics[name][:8000] for name in sorted(topics))
    ids = [i for text in texts for i in engine.encode(Chunk.text(text)).token_ids]
    for start in range(0, len(ids) - tokens, tokens):
        yield Chunk.tokens(ids[start : start + tokens])


def run(engine: Engine, way: str, chunks: int, tokens: int, asks: int) -> dict[str, Any]:
    """Slide a window of at most ``chunks`` chunks over so many asks, and count."""
    auditor = auditor_of(engine)
    system_prompt = f"{SYSTEM_PROMPT} {chunks} chunks, {way}."  # so that no run finds another's KV
    ledger = Ledger(engine, reserve_tokens=RESERVED, reference=True)
    audited, advice = auditor.counts.tokens, None
    budget = engine.encode_system_prompt(system_prompt).tokens + chunks * tokens + RESERVED
    with Window(engine, system_prompt, budget, **WAYS[way]) as window:
        ledger.watch(window)
        for chunk in itertools.islice(chunks_of(engine, tokens), asks):
            window.append(chunk)
            window.slide(reserve_tokens=RESERVED)
            advice = advice or window.plan(QUESTION).sliding
            with auditor.hold():
                window.ask(QUESTION, ANSWER_TOKENS)
            auditor.drain()
    record = auditor.ledger(engine).record
    return {
        "way": way,
        "chunks": chunks,
        "audited_tokens": auditor.counts.tokens - audited,
        "saved_by_a_mark": advice.saved if advice is not None else None,
        "decisions": [str(decision) for decision in record.decisions],
        "floor": str(record.floor),
        "evidence": {name: e.model_dump(exclude={"open", "past"}) for name, e in record.ways.items()},
        **ledger.summary(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows for people."""
    policies = [f"computed_tokens_{policy}" for policy in NAMES]
    heads = " | ".join(
        ["chunks", "way", "computed", "audits", *NAMES.values(), "of the best", "answers as a re-prefill"]
    )
    lines = [f"| {heads} |", "|---" * (len(policies) + 6) + "|"]
    for row in rows:
        opponents = [row[policy] for policy in policies]
        share = row["computed_tokens"] / min(opponents)
        cells = [row["chunks"], row["way"], row["computed_tokens"], row["audited_tokens"], *opponents, f"{share:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['agree']} of {row['compared']} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of a text model")
    parser.add_argument("--engine", default="vllm", choices=("vllm", "hf"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunks", type=int, nargs="+", default=[6, 12], help="most chunks that a window holds")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a chunk")
    parser.add_argument("--asks", type=int, default=40)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.model.is_dir():
        parser.error(f"--model must be the folder of a model, got {arguments.model}; run: make released")
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("ctxwin").setLevel(logging.INFO)
    options: dict[str, Any] = {"max_model_len": 4096} if arguments.engine == "vllm" else {}
    rows = []
    with (
        without_profile(str(arguments.model)) as model,
        open_engine(str(model), engine=arguments.engine, dtype=arguments.dtype, **options) as engine,
    ):
        auditor_of(engine, Options(quiet_s=0.0, queue=64))
        for way, chunks in itertools.product(arguments.ways, arguments.chunks):
            rows.append(run(engine, way, chunks, arguments.tokens, arguments.asks))
            sys.stderr.write(f"{way}, {chunks} chunks: {rows[-1]['computed_tokens']} tokens\n")
    result = {"model": arguments.model.name, "engine": arguments.engine, "dtype": arguments.dtype, "rows": rows}
    sys.stdout.write((json.dumps(result, indent=1) if arguments.json else table(rows)) + "\n")


if __name__ == "__main__":
    main()
