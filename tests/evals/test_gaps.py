"""Gaps against moves: what the two have in common, and where they part."""

from __future__ import annotations

import pytest

from ctxwin import open_engine
from ctxwin.evals.studies.gaps import GapSettings, gaps_table, measure


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, int], dict[str, float]]:
    done: list[int] = []
    with open_engine("tiny:hf") as engine:
        result = measure(engine, GapSettings(streams=1, points=(1, 4), questions=3), done.append)  # type: ignore[arg-type]
    assert len(done) == 4 and gaps_table(result).row_count == 8
    return {(r["leaving"], r["arm"], r["slides"]): r for r in result["rows"]}


def test_gaps_grow_and_moved_windows_stay_where_they_are(rows: dict[tuple[str, str, int], dict[str, float]]) -> None:
    for leaving in ("front", "middle"):
        assert rows[leaving, "moved", 1]["span"] == rows[leaving, "moved", 4]["span"]
        frame = rows[leaving, "gaps", 1]["span"] - rows[leaving, "moved", 1]["span"]
        assert frame > 0, "one frame left, and its positions with it"
        assert rows[leaving, "gaps", 4]["span"] - rows[leaving, "moved", 4]["span"] == 4 * frame


def test_where_the_front_leaves_they_hardly_differ(rows: dict[tuple[str, str, int], dict[str, float]]) -> None:
    """Distances among survivors and from a question are the same; only the system prompt is further away."""
    moved, gaps = rows["front", "moved", 1], rows["front", "gaps", 1]
    assert gaps["kl_window"] == pytest.approx(moved["kl_window"], rel=0.05, abs=1e-3)
    assert gaps["kl_stream"] == pytest.approx(moved["kl_stream"], abs=1e-2)
    assert moved["kl_window"] > 10 * moved["kl_stream"], "what left was a legend: survivors remember it"
