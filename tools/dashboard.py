"""Writes docs/assets/grafana.json, a Grafana dashboard over the server's metrics: ``python tools/dashboard.py``.

Every metric of `ctxwin_server.process.metrics` is on it once at least, and a few of vLLM's; the tests hold both lists together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docs" / "assets" / "grafana.json"
_RATE = "sum by ({by}) (rate({name}[$__rate_interval]))"


def rate(name: str, by: str = "tenant") -> str:
    """Of a counter, a second."""
    return _RATE.format(name=f"ctxwin_{name}_total", by=by)


def share(part: str, whole: str) -> str:
    """Of two counters."""
    return f"{rate(part, '')} / clamp_min({rate(whole, '')}, 1e-9)".replace(" by ()", "")


def quantile(q: float, name: str, prefix: str = "ctxwin_") -> str:
    """Of a histogram."""
    return f"histogram_quantile({q}, sum by (le) (rate({prefix}{name}_bucket[$__rate_interval])))"


def rates(*names: str) -> list[tuple[str, str]]:
    """A line for each counter and tenant."""
    return [(rate(name), name + " {{tenant}}") for name in names]


def by(name: str, *labels: str) -> list[tuple[str, str]]:
    """A line for each value of a counter's labels."""
    return [(rate(name, ", ".join(labels)), " ".join("{{" + label + "}}" for label in labels))]


ROWS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Answers": [
        ("Asks", "ops", rates("asks")),
        ("Plain chats by what stood behind them", "ops", by("chats", "behind")),
        ("Plain chats computed without their window", "ops", by("chats_alone", "reason")),
        ("Plain chats not served as sent", "ops", by("rewrites", "result")),
        ("Tokens kept or late in them, and pictures", "ops", [
            *by("rewrite_tokens", "result"), ("sum(rate(ctxwin_kept_pictures_total[$__rate_interval]))", "pictures"),
        ]),
        ("Their next prompts, ahead of time", "ops", by("prefills", "result")),
        ("Their records in the store", "ops", by("chat_records", "result")),
        ("First token", "s", [
            (quantile(0.5, "ttft_seconds"), "median"), (quantile(0.95, "ttft_seconds"), "95 %"),
            (quantile(0.5, "time_to_first_token_seconds", "vllm:"), "vLLM, median"),
        ]),
        ("Whole answer", "s", [(quantile(0.5, "answer_seconds"), "median"), (quantile(0.95, "answer_seconds"), "95 %")]),
        ("Errors", "ops", by("errors", "code")),
        ("Waiting, and running in vLLM", "short", [
            ("sum by (tenant) (ctxwin_requests_waiting)", "waiting {{tenant}}"), ("sum(vllm:num_requests_running)", "running"),
        ]),
        ("Window operations", "ops", [*by("window_operations", "op"), *by("window_records", "result")]),
        ("Frames pushed into live streams", "ops", by("live_frames", "result")),
        ("Open windows", "short", [("sum by (tenant) (ctxwin_windows_open)", "{{tenant}}")]),
        ("Memory of the server", "bytes", [
            ("sum(ctxwin_memory_bytes)", "resident"), ("sum(ctxwin_memory_limit_bytes)", "bound"),
        ]),
        ("Requests refused for memory", "ops", [(rate("memory_refused"), "{{tenant}}")]),
    ],
    "What was not computed again": [
        ("Prompt tokens by lane", "short", by("prompt_tokens", "lane")),
        ("Computed share of the prompt", "percentunit", [(share("computed_tokens", "prompt_tokens"), "computed")]),
        ("Tokens", "short", rates("prefix_cached_tokens", "prefilled_tokens", "answer_tokens")),
        ("Forwards and loads", "ops", rates("forwards", "loads")),
        ("KV loaded", "Bps", rates("loaded_bytes")),
        ("Recomputed after a miss or a failed load", "ops", rates("misses", "fallbacks")),
        ("Vision tower", "ops", rates("vision_encodes", "vision_encodes_saved")),
        ("Patches", "ops", rates("patches_formed", "patches_served", "patches_dropped")),
    ],
    "Audits": [
        ("Audits", "ops", rates(
            "audits", "audit_trials", "audits_stopped", "audits_dropped", "audit_fallbacks", "audits_undecided"
        )),
        ("Lost values", "percentunit", [(share("audits_lost", "audits"), "of the audited")]),
        ("Nats beyond the floor", "short", [(share("audit_excess_nats", "audit_texts"), "a token of text")]),
        ("What audits cost", "short", rates("audit_tokens", "audit_seconds")),
        ("Promoted strategies", "short", [("max by (strategy) (ctxwin_strategy_promoted)", "{{strategy}}")]),
        ("Strategies whose trials stopped", "short", [("max by (strategy) (ctxwin_strategy_stopped)", "{{strategy}}")]),
    ],
    "Store": [
        ("Reads", "ops", by("store_reads", "tier", "result")),
        ("Held", "bytes", [("sum by (tier) (ctxwin_store_bytes)", "{{tier}}")]),
        ("Values", "short", [("sum by (tier) (ctxwin_store_items)", "{{tier}}")]),
        ("Dropped and damaged", "ops", [*by("store_evictions", "tier"), *by("store_corrupt", "tier")]),
    ],
}  # fmt: skip
"""Panels by row: title, unit, and (PromQL, legend) of each line."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana 10 and later import it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, drawn in ROWS.items():
        panels.append(
            {
                "type": "row",
                "title": row,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "id": len(panels) + 1,
                "panels": [],
            }
        )
        for i, (title, unit, lines) in enumerate(drawn):
            place = {"h": 7, "w": 6, "x": 6 * (i % 4), "y": y + 1 + 7 * (i // 4)}
            targets = [
                {"expr": expr, "legendFormat": legend, "refId": chr(65 + n)} for n, (expr, legend) in enumerate(lines)
            ]
            panels.append({
                "type": "timeseries", "title": title, "gridPos": place, "id": len(panels) + 1, "targets": targets,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            })  # fmt: skip
        y += 1 + 7 * -(-len(drawn) // 4)
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "ctxwin", "uid": "ctxwin", "schemaVersion": 39, "version": 1, "refresh": "30s", "tags": ["ctxwin", "vllm"],
        "time": {"from": "now-3h", "to": "now"}, "templating": {"list": [source]}, "panels": panels,
    }  # fmt: skip


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"wrote {TARGET}\n")
