"""Linking in one step: gaps of stored chunks computed at once, each behind stored KV alone (`ctxwin.engines.segments.gap_runs`).

The same files are linked in other orders on vLLM: a random model of half a billion parameters, whose answers are noise and whose
cost is real.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from ctxwin.engines.base import Engine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment, partial_ranges
from ctxwin_evals.console import Json, errors, show

SHARE = 0.15


def ranges_of(chosen: Sequence[int], join: int = 0) -> tuple[tuple[int, int], ...]:
    """Return tokens as ascending ranges; those that at most ``join`` others separate are one."""
    ranges: list[tuple[int, int]] = []
    for token in sorted(chosen):
        if ranges and token - ranges[-1][1] <= join:
            ranges[-1] = ranges[-1][0], token + 1
        else:
            ranges.append((token, token + 1))
    return tuple(ranges)


def speed(engine: Engine, files: int, size: int, runs: int) -> list[dict[str, Any]]:
    """First tokens, side by side: each run takes an order of its own and asks every arm for it."""
    from ctxwin_evals.bench.moves import QUERY, SYSTEM_PROMPT, make_chunk

    header, query = engine.encode_system_prompt(SYSTEM_PROMPT), engine.encode_query(QUERY)
    front = Segment(header, 0, span=engine.prefill([], header, 0), span_key="header")
    encoded = [engine.encode(make_chunk(engine, size, 700_000 + i)) for i in range(files)]
    spans = [engine.prefill([front], each, header.advance) for each in encoded]
    names = ["prefix cache", "full reuse", "MPIC-8", "MPIC-16", "MPIC-32", "in a row"]
    names += [f"apart, joined over {join}" for join in (0, 3, 8)]
    found: dict[str, list[Any]] = {name: [] for name in names}
    rng = np.random.default_rng(files)
    for run in range(runs + 1):  # the first one learns what calls cost
        order = rng.permutation(files).tolist()
        picks = [rng.permutation(each.tokens)[: round(SHARE * each.tokens)].tolist() for each in encoded]
        for name in names:
            layout, start, word = [front], header.advance, name.split()[-1]
            for i in order:
                each = encoded[i]
                ranges = ranges_of(range(len(picks[i])))
                if name.startswith("apart"):
                    ranges = ranges_of(picks[i], int(word))
                elif name.startswith("MPIC"):
                    ranges = partial_ranges(each.media_ranges, int(name[5:]), each.tokens)
                linked = Segment(each, start, spans[i], span_key=f"{name}-{run}-{i}", approximate=True)
                if name == "prefix cache":
                    linked = Segment(each, start)
                elif name != "full reuse":
                    linked = replace(linked, recompute=ranges)
                layout.append(linked)
                start += each.advance
            salt = "" if name == "prefix cache" else f"{name}-{run}"
            answer = engine.generate(layout, query, Sampling(max_tokens=1), salt=salt)
            gaps = sum(len(segment.recompute) for segment in layout)
            found[name] += [(answer.ttft_s, answer.computed_tokens, gaps, answer.forwards)] * bool(run)
    rows = []
    for name, asks in found.items():
        ratios = [ask[0] / base[0] for ask, base in zip(asks, found["prefix cache"], strict=True)]
        first, computed, gaps, steps = (median(ask[i] for ask in asks) for i in range(4))
        rows.append({
            "arm": name, "gaps": gaps, "steps": steps, "computed": computed, "first_token_ms": 1e3 * first,
            "ratio": median(ratios), "least": min(ratios), "most": max(ratios),
        })  # fmt: skip
    return rows


def main(
    files: Annotated[int, typer.Option(help="Files in a prompt.", min=2)] = 8,
    size: Annotated[int, typer.Option(help="Tokens of a file.", min=64)] = 256,
    runs: Annotated[int, typer.Option(help="Orders that are timed.", min=1)] = 5,
    as_json: Json = False,
) -> None:
    """Time linked files on vLLM beside a prefix cache."""
    from ctxwin.opening import open_engine
    from ctxwin_evals.bench.model import Sizes, ensure_model

    with errors():
        folder, _ = ensure_model(Sizes(), 0)
        with open_engine(f"vllm:{folder}", dtype="bfloat16") as engine:
            rows = speed(engine, files, size, runs)
        lines = ["| arm | gaps | steps | computed | first token | of a prefix cache's |", "|---|---|---|---|---|---|"]
        for row in rows:
            cells = f"{row['first_token_ms']:.0f} ms | {row['ratio']:.2f} [{row['least']:.2f}, {row['most']:.2f}]"
            lines.append(f"| {row['arm']} | {row['gaps']:.0f} | {row['steps']:.0f} | {row['computed']:.0f} | {cells} |")
        show({"files": files, "size": size, "runs": runs, "rows": rows}, as_json, "\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
