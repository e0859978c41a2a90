"""Elastic Cache's claims for a terminal, and as a picture: perplexity and ROUGE-L over KV budgets (its figure 2)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ablations import ABLATIONS

if TYPE_CHECKING:
    from rich.table import Table

NAMES = {"elastic": "Elastic Cache", "h2o": "H2O", "local": "Local"} | {name: f"- {name}" for name in ABLATIONS}


def quality_table(result: dict[str, Any]) -> Table:
    """Perplexity and ROUGE-L by method and budget."""
    from rich.table import Table

    config = result["config"]
    behind = "behind the question" if config["moment"] == "prompt" else "before the question"
    made = Table(
        title=f"{config['exchanges']} exchanges, {config['answer_tokens']} answer tokens; thinned out {behind}",
        title_justify="left",
    )
    for column in ("method", "budget", "PPL", "95 %", "ROUGE-L", "95 %", "same", "right", "KV held"):
        made.add_column(column, justify="left" if column == "method" else "right")
    rows = [("full cache", "", result["full"])]
    rows += [(NAMES[m], b, cell) for m, cells in result["methods"].items() for b, cell in cells.items()]
    for name, budget, cell in rows:
        made.add_row(
            name, budget, f"{cell['ppl']:.3f}", _interval(cell["ppl_ci95"]), f"{cell['rouge_l']:.3f}",
            _interval(cell["rouge_l_ci95"]), f"{cell['same']:.3f}", f"{cell['right']:.3f}", f"{cell['kv_share']:.1%}",
        )  # fmt: skip
    return made


def speed_table(result: dict[str, Any]) -> Table:
    """Latency, throughput and KV by shape; ratios are method over full cache."""
    from rich.table import Table

    config = result["config"]
    made = Table(
        title=f"{NAMES[config['method']]} at {config['budget']:g} against the full cache, median of {config['repeats']}",
        title_justify="left",
    )
    columns = ("batch x prompt + new", "", "prompt s", "generate s", "of the processor", "total s", "tokens/s", "KV MB")
    for column in columns:
        made.add_column(column, justify="right" if column and not column.startswith("batch") else "left")
    for shape, found in result["shapes"].items():
        for name in ("full", config["method"]):
            f = found[name]
            seconds = (f"{f[x]:.3f}" for x in ("prompt_s", "generate_s", "cpu_s", "total_s"))
            made.add_row(shape, name, *seconds, f"{f['tokens_s']:.1f}", f"{f['kv_peak_bytes'] / 1e6:.1f}")
        ratio = found["ratio"]
        shown = [f"{ratio[x]['median']:.2f}" for x in ("prompt_s", "generate_s", "cpu_s", "total_s")]
        made.add_row("", "ratio", *shown, f"{1 / ratio['total_s']['median']:.2f}", f"{ratio['kv_peak_bytes']:.2f}")
    return made


def plot_quality(result: dict[str, Any], path: Path) -> None:
    """Draws figure 2: perplexity (logarithmic) and ROUGE-L over budgets, with intervals of 95 %.

    Raises ModuleNotFoundError without matplotlib (``pip install 'ctxwin[evals]'``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, label in zip(axes, ("ppl", "rouge_l"), ("perplexity", "ROUGE-L F1"), strict=True):
        axis.axhline(result["full"][key], color="0.6", linestyle=":", label="full cache")
        for method, cells in result["methods"].items():
            budgets = sorted(map(float, cells))
            chosen = [cells[f"{b:g}"] for b in budgets]
            (line,) = axis.plot(budgets, [c[key] for c in chosen], marker="o", markersize=4, label=NAMES[method])
            bounds = [c[f"{key}_ci95"] for c in chosen]
            if all(bounds):
                axis.fill_between(
                    budgets, [b[0] for b in bounds], [b[1] for b in bounds], color=line.get_color(), alpha=0.15
                )
        axis.set_xlabel("KV budget")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[1].legend()
    figure.savefig(path, dpi=144)


def _interval(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
