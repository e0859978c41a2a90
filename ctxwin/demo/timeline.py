"""`timeline.png`: tokens by lane at every ask, and the tokens computed so far beside those of prefix-cache users."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from ctxwin.demo.palette import LANES, POLICIES
from ctxwin.demo.record import Step


def draw(path: Path, steps: Sequence[Step]) -> None:
    """Writes the picture (PNG, 11 x 7 inches)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    at = list(range(len(steps)))
    floor = [0] * len(steps)
    for lane, (colour, _) in reversed(LANES.items()):
        heights = [step.tokens_by_lane.get(lane, 0) for step in steps]
        if any(heights):
            upper.bar(at, heights, bottom=floor, width=0.9, color=colour, label=lane)
            floor = [low + high for low, high in zip(floor, heights, strict=True)]
    upper.set_ylabel("tokens of system prompt and frames, by lane")
    upper.legend(ncols=len(LANES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for field, (name, colour) in POLICIES.items():
        sums = list(accumulate(getattr(step, field) for step in steps))
        lower.plot(at, sums, color=colour, linewidth=2.4 if field == "computed_tokens" else 1.6, label=name)
    lower.set_ylabel("tokens computed so far")
    lower.set_ylim(bottom=0)
    lower.legend(loc="upper left", frameon=False)
    if len(steps) <= 80:
        lower.set_xticks(at, [step.op for step in steps], rotation=90, fontsize=7)
    else:
        lower.set_xlabel("ask")
    lower.margins(x=0.01)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
