"""``ctxwin bench``: what edits of a window cost in time, measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.cli.commands import disable_audits, quiet
from ctxwin_evals.console import Config, Json, Threads, new_table, preset

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Model = Annotated[str, typer.Option(help="A local model folder; by default a random Qwen2-VL, generated once.")]
ModelDir = Annotated[
    Path | None, typer.Option(help="Where to generate that. Default: ctxwin/bench in your cache folder.")
]


@app.callback()
def bench() -> None:
    """Measure what a window costs in time, on this machine."""


@app.command("reuse")
def reuse(
    engine: Annotated[str, typer.Option(metavar="vllm|hf", help="Engine to measure.")] = "vllm",
    model: Model = "",
    model_dir: ModelDir = None,
    ops: Annotated[str, typer.Option(help="Edits, comma-separated.")] = "slide,recall,reorder,toggle,ahead",
    tokens: Annotated[str, typer.Option(help="Reused tokens, comma-separated.")] = "256,512,1024,2048",
    rank: Annotated[int, typer.Option(help="Rank of the stored patches: the bytes of joint factors.")] = 16,
    runs: Annotated[int, typer.Option(help="Paired runs of each figure.")] = 5,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights and of the content.")] = 0,
    quick: Annotated[
        bool,
        preset(
            "--quick",
            "At most three minutes on 2 cores: 79M parameters instead of 494M, 256 and 512 tokens, two runs.",
            tokens="256,512",
            runs=2,
            rank=16,
        ),
    ] = False,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token after an edit: a window, the engine's own prefix cache, and the floor.

    The floor is the same prompt as a full hit of the prefix cache. Edits: the oldest chunk leaves (slide), an evicted one comes
    back with a stored patch (recall), one of three predecessors moves to the front (reorder), a chunk's clean view (toggle),
    the oldest leaves an exact window while the engine idles (ahead).
    """
    quiet()
    disable_audits()
    from ctxwin.opening import open_engine, require_vllm
    from ctxwin_evals.bench.model import SMALL, Sizes, check_model, open_model
    from ctxwin_evals.bench.reuse import Settings, measure
    from ctxwin_evals.console import numbers, prepare, show, stages

    names = tuple(dict.fromkeys(part.strip() for part in ops.split(",") if part.strip()))
    settings = Settings(ops=names, tokens=tuple(dict.fromkeys(numbers(tokens))), rank=rank, runs=runs, seed=seed)
    if engine not in ("vllm", "hf"):
        raise ValueError(f"--engine must be vllm or hf, got {engine!r}")
    check_model(model, model_dir)
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out must lie in a folder that exists, got {str(out)!r}")
    if engine == "vllm":
        require_vllm()  # before a model is written
    with stages() as on_progress:
        on_progress("model", 0, 0)
        prepare(threads)
        folder = open_model(model, SMALL if quick else Sizes(), seed, model_dir)
        opened = open_engine(f"{engine}:{folder}")
        try:
            result = measure(opened, settings, on_progress)
        finally:
            opened.close()
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result, as_json, reuse_table(result), *note_lines(result), *check_lines(result))


def reuse_table(result: Mapping[str, Any]) -> Table:
    """One line a move and size; times are milliseconds to the first token, medians."""
    machine, model = result["meta"]["machine"], result["meta"]["model"]
    runs = result["meta"]["settings"]["runs"]
    title = f"time to the first token behind an edit, {result['meta']['engine']}, medians of {runs} paired runs (ms)"
    columns = "op|tokens|rank|ctxwin|prefix cache|floor|speedup|over floor|by CPU|forward|lanes"
    table = new_table(title, columns, left=(0, 10))
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in result["rows"]:
        times = [_ms(row["ttft_s"]), _ms(row["ttft_prefix_cache_s"]), _ms(row["ttft_local_hit_s"])]
        by_cpu = (row["cpu_s"] or {}).get("over_floor_paired")  # a busy machine changes CPU seconds less
        ratios = [f"{row['speedup']:.1f}x", f"{row['over_floor']:.2f}x", f"{by_cpu:.2f}x" if by_cpu else ""]
        forward = "none" if row["forward_free"] else f"{row['computed_tokens']} tokens"
        lanes = ", ".join(f"{lane} {n}" for lane, n in row["lanes"].items())
        table.add_row(row["op"], str(row["tokens"]), str(row["rank"]), *times, *ratios, forward, lanes)
    load_before, load_after = machine["load_before"][0], machine["load_after"][0]
    table.caption = (
        f"{model['name']}: {model['layers']} layers, {model['kv_bytes_per_token']} bytes of KV a token, {model['dtype']}; "
        f"{machine['cpu']}, {machine['threads']} threads, load {load_before:.1f} before and {load_after:.1f} after"
    )
    return table


def check_lines(result: Mapping[str, Any]) -> list[str]:
    """Return one line for each check at the largest size."""
    lines = []
    for c in result["checks"]:
        verdict = "holds" if c["holds"] else "FAILS"
        if c["check"] == "speedup":
            what = f"speedup {c['value']:.1f}x, at least {c['bound']:.1f}x (0.75 of re-prefill / floor)"
        else:
            what = f"{c['value']:.2f} floors without a forward, at most {c['bound']:.1f}"
        lines.append(f"{verdict}: {c['op']} at {c['tokens']} tokens: {what}")
    return lines


def note_lines(result: Mapping[str, Any]) -> list[str]:
    """Return details of the largest size: what was formed beforehand, each chunk's lane, the cost of the way back."""
    most = max(row["tokens"] for row in result["rows"])
    lines = []
    for row in (r for r in result["rows"] if r["tokens"] == most):
        chunks = ", ".join(f"{c['chunk']} {c['lane']}" for c in row["chunks"])
        formed = f"{row['prepared']['tokens']:,} tokens in {row['prepared']['forwards']} forwards beforehand"
        back = f"; back again {_ms(row['ttft_back_s'])} ms" if row["ttft_back_s"] is not None else ""
        lines.append(f"{row['op']} at {most} tokens: {chunks}; {formed}{back}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def add_commands(to: typer.Typer) -> None:
    """Add ``bench`` to the command line of ctxwin."""
    to.add_typer(app, name="bench")
