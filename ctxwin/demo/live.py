"""The live table of the demo, and its last one (rich)."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ctxwin.demo.palette import ENCODES, LANES, POLICIES
from ctxwin.demo.record import Step

_BAR = 24
_WIDE = 118
_COLUMNS = [
    "time", "move", "window by lane", "question", "answer", "re-prefill", "computed", "naive", "trim", "ms",
]  # fmt: skip
_ONLY_WIDE = ("question", "re-prefill", "ms")


class LiveTable:
    """One row an ask while the demo runs. Without a terminal the rows are printed as they come.

    Args:
        console: where to.
        title: above the table.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, Text(title)  # a file name may look like markup
        self._rows: deque[Step] = deque(maxlen=max(5, console.height - 9))
        self._sums = [0, 0, 0]
        self._asks = 0
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, step: Step) -> None:
        """Shows a step."""
        self._rows.append(step)
        self._asks += 1
        costs = (step.computed_tokens, step.computed_tokens_naive, step.computed_tokens_trim)
        self._sums = [total + cost for total, cost in zip(self._sums, costs, strict=True)]
        if self._live is not None:
            self._live.update(self._table())
        else:
            mark = {True: "ok", False: "--", None: "  "}[right(step)]
            self._console.print(
                f"{step.time:6.1f} s  {step.op:<11} {step.query:<16.40} {step.answer:<10.40} {mark}  computed "
                f"{step.computed_tokens:>5} (naive {step.computed_tokens_naive}, trim {step.computed_tokens_trim})",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip

    def _table(self) -> Table:
        ours, naive, trim = self._sums
        table = Table(title=self._title, caption=legend(), caption_justify="left", expand=False, pad_edge=False)
        # A narrow terminal gets the columns that tell the story; the report has them all.
        wide = self._console.width >= _WIDE
        columns = _COLUMNS if wide else [c for c in _COLUMNS if c not in _ONLY_WIDE]
        for name in columns:
            left = name in ("move", "window by lane", "question", "answer", "re-prefill")
            table.add_column(name, justify="left" if left else "right", no_wrap=True, max_width=28)
        for step in self._rows:
            cells: dict[str, str | Text] = {
                "time": f"{step.time:g} s",
                "move": step.op,
                "window by lane": lane_bar(step),
                "question": Text(step.query),
                "answer": _answer(step),
                "re-prefill": Text(step.answer_reprefill),
                "computed": str(step.computed_tokens),
                "naive": str(step.computed_tokens_naive),
                "trim": str(step.computed_tokens_trim),
                "ms": f"{1000 * step.ttft_s:.0f}",
            }
            table.add_row(*(cells[name] for name in columns))
        table.add_section()
        share = f"{100 * ours / naive:.0f} % of naive" if naive else ""
        totals = {"move": f"{self._asks} asks", "window by lane": share, "computed": ours, "naive": naive, "trim": trim}
        table.add_row(*(str(totals.get(name, "")) for name in columns), style="bold")
        return table


def right(step: Step) -> bool | None:
    """Whether the answer is the truth; None where that is not known."""
    return None if step.truth is None else step.answer == step.truth


def _answer(step: Step) -> Text:
    style = {True: "green", False: "bold red", None: ""}[right(step)]
    return Text(step.answer, style=style)


def lane_bar(step: Step, width: int = _BAR) -> Text:
    """The window as a bar: one stretch a frame, coloured by lane."""
    bar = Text()
    total = sum(p["tokens"] for p in step.placed) or 1
    drawn = tokens = 0
    for placed in step.placed:
        tokens += placed["tokens"]
        end = round(width * tokens / total)
        bar.append("█" * max(0, end - drawn - 1) + "▊", style=LANES[placed["lane"]][0])
        drawn = max(end, drawn + 1)
    return bar


def legend() -> Text:
    """The lanes with their colours, in one line."""
    text = Text()
    for lane, (colour, _) in LANES.items():
        text.append("█ ", style=colour).append(f"{lane}  ")
    return text


def final_tables(summary: dict[str, Any]) -> Group:
    """What the run amounts to: costs beside the opponents', answers beside the yardsticks'."""
    title = f"{summary['asks']} asks on {summary['engine']}"
    costs = _titled(title, "", *(name for name, _ in POLICIES.values()))
    ours = summary["computed_tokens"]
    tokens = [summary[field] for field in POLICIES]
    costs.add_row("tokens computed", *(f"{t:,}" for t in tokens))
    costs.add_row("ctxwin's share", *(percent(ours / t if t else None) for t in tokens))
    costs.add_row("vision encodes", *(str(summary[ENCODES[field]]) for field in POLICIES))
    answers = _titled("", "", "n", "ctxwin", "re-prefill", "blind")
    names = ("accuracy", "accuracy_reprefill", "accuracy_blind")
    if summary["accuracy"] is not None:
        for kind, group in {**summary["by_kind"], "all": summary}.items():
            answers.add_row(f"right, {kind}", str(group["asks"]), *(percent(group[name]) for name in names))
    answers.add_row("same as re-prefill", str(summary["asks"]), percent(summary["agreement"]))
    answers.add_row("mean KL to re-prefill", "", nats(summary["kl_mean"]), "", nats(summary["kl_blind_mean"]))
    first = [summary["ttft_median_s"], summary["ttft_reprefill_median_s"]]
    answers.add_row("first token, median", "", *("" if t is None else f"{1000 * t:.0f} ms" for t in first))
    return Group(costs, answers)


def _titled(title: str, *names: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if name else "left", max_width=16 if name else None, no_wrap=not name)
    return table


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def nats(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
