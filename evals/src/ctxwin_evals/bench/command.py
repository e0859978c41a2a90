"""``ctxwin bench``: what edits of a window cost in time, measured here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxwin.cli.commands import disable_audits, quiet
from ctxwin.files import check_writable
from ctxwin_evals.console import Config, EngineOptions, Json, Threads, new_table, quick_option

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_OPS = "slide,steady,recall,fork,toggle,untried,reorder,oldest,newest,copy"
_DIR = "Where to generate that. Default: ctxwin/bench in your cache folder."
_MODEL = "A local model folder; by default a random Qwen2.5-VL, generated once."


@app.callback()
def bench() -> None:
    """Measure what a window costs in time, on this machine."""


@app.command("reuse")
def reuse(
    engine: Annotated[str, typer.Option(metavar="vllm|hf", help="Engine to measure.")] = "vllm",
    engine_options: EngineOptions = "{}",
    peers: Annotated[str, typer.Option(help="vLLM with other connectors, too: offloading,lmcache.")] = "",
    model: Annotated[str, typer.Option(help=_MODEL)] = "",
    model_dir: Annotated[Path | None, typer.Option(help=_DIR)] = None,
    ops: Annotated[str, typer.Option(help="Edits to measure.")] = _OPS,
    tokens: Annotated[str, typer.Option(help="Reused tokens, comma-separated.")] = "512,2048,4096",
    rank: Annotated[int, typer.Option(help="Rank of the stored patches: the bytes of joint factors.")] = 16,
    runs: Annotated[int, typer.Option(help="Repetitions of each figure.")] = 7,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of the model's weights, the content and the order.")] = 0,
    quick: Annotated[
        bool, quick_option("Three minutes on 2 cores: 79M parameters, 512 tokens.", tokens="512", runs=12)
    ] = False,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token after an edit: a window, four users of the engine's own prefix cache, and the floor.

    The floor is the same prompt, of which the prefix cache holds all that is not new. Users send the same prompt, trim it by
    half when it is full, append only, or both (look back). Edits: the oldest chunk leaves (slide), and another comes (steady), an
    evicted one comes back with its patch (recall), a branch gets 32 tokens (fork), a chunk's clean view (toggle, untried), one of
    three predecessors moves to the front (reorder), the oldest to the end (oldest, copy), the newest to the front (newest).
    """
    quiet()
    disable_audits()
    from ctxwin.opening import open_engine, require_vllm
    from ctxwin.progress import stages
    from ctxwin_evals.bench.model import SMALL, Sizes, check_model, open_model
    from ctxwin_evals.bench.peers import Peer, check_peers
    from ctxwin_evals.bench.reuse import Settings, measure
    from ctxwin_evals.console import engine_keywords, names, numbers, prepare, show

    settings, sizes = Settings(names(ops), tuple(numbers(tokens)), rank, runs, seed), SMALL if quick else Sizes()
    options, others = engine_keywords(engine, engine_options), names(peers)
    check_peers(others, engine)
    check_model(model, model_dir)
    if not model:
        settings.check(sizes.max_tokens)  # before one is generated
    if out is not None and (not out.parent.is_dir() or out.is_dir()):
        raise ValueError(f"--out must be a file in a folder that exists, got {str(out)!r}")
    if out is not None:
        check_writable(out.parent)  # before minutes of measuring
    if engine == "vllm":
        require_vllm()  # before a model is written
    if others:  # they share the GPU
        options = {"gpu_memory_utilization": 0.9 / (1 + len(others))} | options
    with stages() as on_progress:
        on_progress("model", 0, 0)
        prepare(threads)
        folder = open_model(model, sizes, seed, model_dir)
        opened, running, refused = open_engine(f"{engine}:{folder}", **options), dict[str, Peer](), dict[str, str]()
        try:
            for name in others:
                try:
                    running[name] = Peer(name, opened, folder, options)
                except RuntimeError as error:
                    refused[name] = f"cannot run here: {error}"
            result = measure(opened, settings, on_progress, running) | {"refused": refused}
        finally:
            for peer in running.values():
                peer.close()
            opened.close()
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [f"{name}: {reason}" for name, reason in refused.items()]
    show(result, as_json, reuse_table(result), *check_lines(result), *lines)


def reuse_table(result: Mapping[str, Any]) -> Table:
    """One line a move and size; times are milliseconds to the first token, medians."""
    machine, model = result["meta"]["machine"], result["meta"]["model"]
    runs, others = result["meta"]["settings"]["runs"], list(result["rows"][0]["arms"])[2:]
    engine = result["meta"]["engine"]
    title = f"ms to the first token behind an edit (tokens computed), {engine}, medians of {runs} runs"
    columns = ["op", "tokens", "ctxwin", "floor", *others, "over floor", "by CPU", "over cleverest"]
    table = new_table(title, "|".join(columns))
    for row in result["rows"]:
        arms, best = row["arms"], row["arms"][row["cleverest"]]
        times = [f"{_ms(arm['ttft_s']['median'])} ({arm['computed_tokens']:,.0f})" for arm in arms.values()]
        by_cpu = arms["floor"]["cpu_ratio"]  # a busy machine changes CPU seconds less
        ratios = [_ratio(arms["floor"]["ratio"]), by_cpu and _ratio(by_cpu), _ratio(best["ratio"])]
        table.add_row(row["op"], str(row["tokens"]), *times, *ratios)
    load_before, load_after = machine["load_before"][0], machine["load"][0]
    table.caption = (
        f"{model['name']}: {model['layers']} layers, {model['kv_bytes_per_token']} bytes of KV a token, {model['dtype']}; "
        f"{machine['cpu']}, {machine['threads']} threads, load {load_before:.1f} before and {load_after:.1f} after"
    )
    return table


def check_lines(result: Mapping[str, Any]) -> list[str]:
    """Return one line for each row that has a bound."""
    return [
        f"{c['verdict']}: {c['op']} at {c['tokens']} tokens: {_ratio(c)} of {c['against']}, at most {c['bound']}"
        for c in result["checks"]
    ]


def _ratio(figure: Mapping[str, Any]) -> str:
    interval = figure["interval"]
    return f"{figure['median']:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def add_commands(to: typer.Typer) -> None:
    """Add ``bench`` to the command line of ctxwin."""
    to.add_typer(app, name="bench")
