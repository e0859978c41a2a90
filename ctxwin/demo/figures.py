"""The output of the demo: a line for each ask while it runs, the final tables, and `timeline.png`."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ctxwin.demo.agent import Step
from ctxwin.view.palette import LANES

NAMES = {
    "computed_tokens": "ctxwin",
    "computed_tokens_naive": "prefix cache: slide",
    "computed_tokens_trim": "prefix cache: trim",
    "computed_tokens_append": "trim, look back at the end",
}
"""Display name of each token count in a step."""
ENCODES = {
    "computed_tokens": "vision_encodes",
    "computed_tokens_naive": "vision_encodes_prefix_cache",
    "computed_tokens_trim": "vision_encodes_trim",
    "computed_tokens_append": "vision_encodes_append",
}
"""Fields of vision encodes, by the field of the matching token count."""
_COLOURS = ("#2e86ab", "#d1495b", "#ee964b", "#a0862f")
_BAR, _WIDE = 24, 110


def step_line(step: Step, console: Console) -> Text:
    """Return a step as a line of ``console``: a terminal gets coloured answers and, if it is wide enough, the window's lanes."""
    verdict = is_right(step)
    line = Text(f"{step['time']:6.1f} s  {step['op']:<11} {step['query']:<16.40} ")
    line.append(f"{step['answer']:<10.40}", style={True: "green", False: "bold red", None: ""}[verdict])
    line.append({True: " ok  ", False: " --  ", None: "     "}[verdict])
    if console.is_terminal and console.width >= _WIDE:
        line.append(lane_bar(step)).append("  ")
    ours, naive, trim = (step[name] for name in list(NAMES)[:3])
    return line.append(f"computed {ours:>5} (naive {naive}, trim {trim})")


def is_right(step: Step) -> bool | None:
    """Return True if the answer is the truth; None if the truth is not known."""
    return None if step["truth"] is None else bool(step["answer"] == step["truth"])


def lane_bar(step: Step, width: int = _BAR) -> Text:
    """Return the window as a bar: one segment for each frame, coloured by lane."""
    bar = Text()
    total = sum(p["tokens"] for p in step["placed"]) or 1
    drawn = tokens = 0
    for frame in step["placed"]:
        tokens += frame["tokens"]
        end = round(width * tokens / total)
        bar.append("█" * max(0, end - drawn - 1) + "▊", style=LANES[frame["lane"]][0])
        drawn = max(end, drawn + 1)
    return bar


def final_tables(summary: Mapping[str, Any]) -> Group:
    """Return the summary: costs beside those of prefix-cache users, answers beside a re-prefill and blind reuse."""
    costs = _titled(f"{summary['asks']} asks on {summary['engine']}", "", *NAMES.values())
    tokens = [summary[name] for name in NAMES]
    costs.add_row("tokens computed", *(f"{count:,}" for count in tokens))
    costs.add_row("ctxwin's share", *(_percent(tokens[0] / count if count else None) for count in tokens))
    costs.add_row("vision encodes", *(str(summary[name]) for name in ENCODES.values()))
    answers = _titled("", "", "n", "ctxwin", "re-prefill", "blind")
    if summary["accuracy"] is not None:
        for kind, group in {**summary["by_kind"], "all": summary}.items():
            shares = (group[name] for name in ("accuracy", "accuracy_reprefill", "accuracy_blind"))
            answers.add_row(f"right, {kind}", str(group["asks"]), *map(_percent, shares))
    answers.add_row("same as re-prefill", str(summary["asks"]), _percent(summary["agreement"]))
    kl = ["" if summary[name] is None else f"{summary[name]:.4f}" for name in ("kl_mean", "kl_blind_mean")]
    answers.add_row("mean KL to re-prefill", "", kl[0], "", kl[1])
    trust = summary.get("trust", {"served": {}, "decisions": []})
    earned = _titled("computed an ask, audits included", "", "asks", *NAMES.values(), "of it audits")
    for strategy, sums in trust["served"].items():
        shares = (f"{sums[name] / sums['asks']:.0f}" for name in (*NAMES, "audit_tokens"))
        earned.add_row(f"served {strategy}", str(sums["asks"]), *shares)
    first = [summary["ttft_median_s"], summary["ttft_reprefill_median_s"]]
    answers.add_row("first token, median", "", *("" if t is None else f"{1000 * t:.0f} ms" for t in first))
    if not trust["served"]:
        return Group(costs, answers)
    return Group(costs, answers, earned, Text("\n".join([*trust["decisions"], trust.get("note", "")])))


def _titled(title: str, *names: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name else "left", max_width=16 if name else None, no_wrap=not name)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def can_draw() -> bool:
    """Return True if matplotlib is installed, which `timeline` needs and the demo does not."""
    return find_spec("matplotlib") is not None


def timeline(path: Path, steps: Sequence[Step], *, dark: bool = False) -> None:
    """Draw tokens by lane at every ask, and the cumulative computed tokens beside those of prefix-cache users (PNG).

    The text is large enough to be read on a phone.
    """
    from matplotlib import rc_context, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {"font.size": 15, "axes.facecolor": "none"}
    with style.context("dark_background" if dark else "default"), rc_context(settings):
        figure = Figure(figsize=(8, 8.5), layout="constrained", facecolor="#0d1117" if dark else "white")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True)
        at, floor = list(range(len(steps))), [0] * len(steps)
        for lane, (colour, _) in reversed(LANES.items()):
            heights = [step["tokens_by_lane"].get(lane, 0) for step in steps]
            if any(heights):
                upper.bar(at, heights, bottom=floor, width=0.9, color=colour, label=lane)
                floor = [low + high for low, high in zip(floor, heights, strict=True)]
        upper.set_ylabel("tokens in the window, by lane")
        upper.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        for (field, name), colour in zip(NAMES.items(), _COLOURS, strict=True):
            sums = list(accumulate(step[field] for step in steps))
            lower.plot(at, sums, color=colour, linewidth=4 if field == "computed_tokens" else 2.5, label=name)
        lower.set_ylabel("tokens computed so far")
        lower.set_xlabel("ask")
        lower.set_ylim(bottom=0)
        lower.margins(x=0.01)
        lower.legend(loc="upper left", frameon=False)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=100)
