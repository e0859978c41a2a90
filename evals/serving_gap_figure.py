"""What patches of several ranks cost beside what two engines differ by, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxwin.evals.report.figures import BASE, OTHER, PATCH, render
from ctxwin.evals.serving_gap import ENGINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST = 1e-12  # a logarithmic axis has no zero


def picture(result: dict[str, Any]) -> bytes:
    """A PNG of what `serving_gap.measure` returns; ModuleNotFoundError without matplotlib."""
    return render(draw(result), "png")


def draw(result: dict[str, Any]) -> Figure:
    """Median, p95 with its interval and maximum by rank; the engines' own median and p95 as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axis = figure.subplots()
    config, found = result["config"], result["kl"]
    ranks = sorted(config["ranks"])
    rows = [found[f"rank {rank}"] for rank in ranks]
    at = range(len(ranks))
    axis.set_yscale("log")
    for name, mark in (("max", "^"), ("p95", "o"), ("median", "s")):
        colour = OTHER if name == "max" else PATCH
        axis.plot(
            at, [max(row[name], _LEAST) for row in rows], mark, color=colour, linestyle="-", label=f"patches, {name}"
        )
    for x, row in zip(at, rows, strict=True):
        axis.plot([x, x], [max(end, _LEAST) for end in row["p95_interval"]], color=PATCH, linewidth=4, alpha=0.3)
    for name, style in (("p95", "--"), ("median", ":")):
        axis.axhline(
            max(found[ENGINES][name], _LEAST), color=BASE, linestyle=style, label=f"the engines' re-prefills, {name}"
        )
    axis.set_xticks(at, [f"rank {rank}\n{row['share']:.0%} of bytes" for rank, row in zip(ranks, rows, strict=True)])
    axis.set_ylabel("KL of the next token, nats")
    axis.set_title(
        f"{config['serving']} in {config['dtype']}, n = {config['n']}: windows of {config['layout']} patches against re-prefill",
        fontsize=10,
    )
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8)
    return figure
