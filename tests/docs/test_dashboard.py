"""The Grafana dashboard: as its program writes it, over metrics that exist, and over all of ours."""

from __future__ import annotations

import json
import re

from prometheus_client import CollectorRegistry

import dashboard
from ctxwin_server.process.metrics import Metrics

VLLM = {"vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_running"}


def test_the_dashboard_shows_every_metric_that_exists_and_no_other() -> None:
    assert dashboard.TARGET.read_text() == dashboard.text(), "run tools/dashboard.py"
    registry = CollectorRegistry()
    Metrics(by_tenant=True, registry=registry)
    exist = set()
    labels = {"le"}
    for family in registry.collect():
        suffix = {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")
        exist.add(family.name + suffix)
    for metric in registry._collector_to_names:
        labels |= set(metric._labelnames)  # type: ignore[attr-defined]
    drawn = json.loads(dashboard.text())["panels"]
    shown = [target["expr"] for panel in drawn for target in panel.get("targets", ())]
    assert {name for expr in shown for name in re.findall(r"(?:ctxwin_|vllm:)\w+", expr)} == exist | VLLM
    grouped = {label for expr in shown for by in re.findall(r"by \(([^)]*)\)", expr) for label in re.split(r",\s*", by)}
    assert grouped <= labels
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in drawn]
    assert len(set(places)) == len(places) and len({p["id"] for p in drawn}) == len(drawn)
    for expr in shown:
        assert expr.count("(") == expr.count(")")
