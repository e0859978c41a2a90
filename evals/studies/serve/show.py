"""The result in a terminal, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin.evals.console import new_table

from .figures import LEVEL
from .policies import POLICIES

if TYPE_CHECKING:
    from rich.table import Table

    from .sweep import Result

COLORS = {"ctxwin": "#0b6e4f", "naive": "#b23a48", "trim": "#c98a1b", "append": "#3a5a98"}


def serve_table(result: Result) -> Table:
    """One line a policy and rate; times in milliseconds."""
    settings = result["meta"]["settings"]
    slo = result["comparison"]["slo_s"]
    title = (
        f"{settings['windows']} sessions of {settings['frames']} frames of {settings['tokens']} tokens, one vLLM "
        f"({settings['processes']}), look-back trace; latency from when a request was due (ms)"
    )
    columns = (
        "rate|policy|done/s|goodput/s|TTFT p50|p95|p99|inter-token p50|p95|p99|"
        "computed|prefix hits|loads|CPU s/request|load"
    )
    table = new_table(title, columns, left=(1,))
    for row in result["rows"]:
        done, good, cpu = row["completed"], row["goodput_per_s"], row["cpu_s_per_request"]
        rates = [f"{row['requests_per_s']:.2f}", "" if good is None else f"{good:.2f}"]
        times = [_ms(row[kind][p]) for kind in ("ttft_s", "inter_token_s") for p in ("p50", "p95", "p99")]
        tokens = [_each(row[kind], done) for kind in ("computed_tokens", "cached_tokens")]
        busy = ["" if cpu is None else f"{cpu:.3f}", f"{row['load'][1]:.1f}"]
        table.add_row(f"{row['rate']:.3g}", row["policy"], *rates, *times, *tokens, str(row["loads"]), *busy)
    table.caption = "computed and prefix hits: tokens a request"
    if slo is not None:
        table.caption += f"; goodput: first token within {1e3 * slo:.0f} ms ({result['comparison']['slo_is']})"
    return table


def lines(result: Result) -> list[str]:
    """What follows from the table, a line each."""
    told = []
    at = result["comparison"]["at_slo"]
    if at is None and result["rows"]:
        told.append("no comparison: no prefix-cache policy was measured")
    elif at is not None:
        for compared in (at, *result["comparison"]["around"]):
            rates = ", ".join(
                f"{p} {'none' if compared['rates'][p] is None else format(compared['rates'][p], '.2f')}"
                + ("+" if p in compared["at_least"] else "")
                for p in POLICIES
                if p in compared["rates"]
            )
            ratio = "" if compared["ratio"] is None else f": {compared['ratio']:.2f}x ({compared['ratio_is']})"
            told.append(f"requests/s at p95 TTFT <= {1e3 * compared['bound_s']:.0f} ms: {rates}{ratio}")
    if (plain := result["plain"]) is not None:
        for side, row in plain["sides"].items():
            gap = row["inter_token_s"]
            told.append(
                f"plain traffic, {_SIDES[side]}: {row['burst_tokens_per_s']:.1f} tokens/s at once; inter-token p50 "
                f"{_ms(gap['p50'])}, p99 {_ms(gap['p99'])} ms; {1e3 * row['cpu_s_per_token']:.1f} ms of CPU a token"
            )
        for name, what in _RATIOS.items():
            if (found := plain["ratios"][name])["median"] is not None:
                low, high = found["quartiles"]
                between = f", {_PERCENT} interval {_range(found['interval'])}" if found["interval"] else ""
                told.append(
                    f"plain traffic, with the connector over without, {what}: median of {found['pairs']} pairs "
                    f"{found['median']:.3f}{between} (quartiles {low:.3f} to {high:.3f}), pooled {found['pooled']:.3f}"
                )
    for check in result["checks"]:
        of = f" ({_PERCENT} interval {_range(check['interval'])})" if check["interval"] else ""
        told.append(
            f"{_VERDICTS[check['verdict']]}: {_CHECKS[check['check']]} {check['value']:.3f}{of}, wanted {check['bound']:g}"
        )
    return told


def _range(interval: list[float]) -> str:
    low, high = interval
    return f"{low:.3f} to {high:.3f}"


_VERDICTS = {"holds": "holds", "fails": "FAILS", "not shown": "NOT SHOWN"}
_PERCENT = f"{100 * LEVEL:g} %"


_SIDES = {"without": "no connector", "with": "connector, no windows", "windows": "connector, windows beside"}
_RATIOS = {
    "inter_token_p50": "p50 between tokens",
    "inter_token_p99": "p99 between tokens",
    "throughput": "throughput",
    "cpu_per_token": "CPU a token",
}
_CHECKS = {
    "ratio": "requests/s over the best prefix-cache policy's at equal p95 TTFT:",
    "inter_token_p99": "p99 between tokens of plain traffic, with the connector over without:",
    "throughput": "throughput of plain traffic, with the connector over without:",
}


def picture(result: Result, path: Path) -> None:
    """p95 of the time to the first token over the request rate, a line a policy. The suffix says PNG or SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    for policy in POLICIES:
        points = [
            (row["rate"], row["ttft_s"]["p95"])
            for row in result["rows"]
            if row["policy"] == policy and row["ttft_s"]["p95"] is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=COLORS[policy], label=policy)
    at = result["comparison"]["at_slo"]
    if at is not None:
        axes.axhline(at["bound_s"], color="0.5", linestyle="--", linewidth=1)
        if at["ratio"] is not None:
            axes.set_title(f"at p95 = {at['bound_s']:.2f} s: {at['ratio']:.2f}x {at['best_prefix_cache']}", fontsize=10)
    axes.set(xlabel="requests a second (open loop)", ylabel="p95 time to first token (s)", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:.0f}"


def _each(total: int, count: int) -> str:
    return f"{total / count:.0f}" if count else ""
