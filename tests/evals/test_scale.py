"""The simulated fleet: every ask is answered by the right owner, and what a window or a decision costs does not grow."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed; run pip install 'ctxwin[ray]'")

from ctxwin_ray.hints import TRIED
from evals.studies import scale


def run(**given: Any) -> dict[str, Any]:
    return scale.simulate(**{"replicas": 16, "windows": 400, "asks": 60, "seconds": 4.0, "seed": 0} | given)


def test_every_ask_is_answered_with_every_acknowledged_edit_however_replicas_are_lost() -> None:
    found = run()
    assert found["answered"] == 240 and found["replicas lost"] == 2
    assert found["sent to a replica that was killed"] > 0 and found["windows of killed replicas"] > 0
    timed = {"decision", "wall_s", "peak_mib"}
    again = run()
    assert {k: v for k, v in again.items() if k not in timed} == {k: v for k, v in found.items() if k not in timed}


def test_owners_that_were_overtaken_are_fenced_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lost replicas go on beside their successors, with long answers in hand."""
    monkeypatch.setattr(scale, "CUT_OFF", 1.0)
    monkeypatch.setattr(scale, "HOT_WINDOW", 0.5)
    monkeypatch.setattr(scale, "LOST", 0.5)
    found = run(windows=8, asks=80, seconds=6.0)
    assert found["fenced"] > 0


def test_a_store_that_does_not_fence_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the simulation is one: without tokens two owners answer."""
    monkeypatch.setattr(scale.Records, "token", lambda store, key: 1)
    for name, value in (("CUT_OFF", 1.0), ("HOT_WINDOW", 0.5), ("LOST", 0.5)):
        monkeypatch.setattr(scale, name, value)
    with pytest.raises(AssertionError, match=r"an answer must have version|acknowledged twice"):
        run(windows=8, asks=80, seconds=6.0)


def test_neither_a_decision_nor_a_window_costs_more_in_a_larger_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "EDITS", 0.0)  # which leave an evicted chunk each
    small, large = run(replicas=8, windows=50), run(replicas=64, windows=2000)
    for found in (small, large):
        assert found["decision"]["most_replicas_looked_at"] <= 2 * TRIED + 1
    assert large["record_bytes"] == small["record_bytes"]
    assert large["decision"]["bytes_a_replica"] < 1.5 * small["decision"]["bytes_a_replica"]


def test_what_did_not_move_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--unmoved", "8", "16"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["8", "16"]
    assert all(tuple(lanes) == scale.LANES for lanes in found.values())
    for took in (took for lanes in found.values() for took in lanes.values()):
        assert list(took) == ["plan behind an append", "ask behind an append", "plan behind an ask"]
        assert all(0 < each["least"] <= each["median"] for each in took.values())


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--replicas", "8", "--windows", "50", "--asks", "50", "--seconds", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["answered"] == 100
