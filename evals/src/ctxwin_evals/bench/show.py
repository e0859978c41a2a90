"""The figures of `ctxwin bench reuse` for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxwin_evals.console import new_table

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin_evals.bench.reuse import Result


def reuse_table(result: Result) -> Table:
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


def check_lines(result: Result) -> list[str]:
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


def note_lines(result: Result) -> list[str]:
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
