"""Whether a soak's memory has a plateau, on curves whose answer is known."""

from __future__ import annotations

import pytest

from evals.studies.soak import Sample, slope, verdict

MB = 1_000_000


def curve(*megabytes: float) -> list[Sample]:
    return [Sample(float(minute), {"server 1": int(mb * MB)}, {}, {}) for minute, mb in enumerate(megabytes)]


@pytest.mark.parametrize(
    ("totals", "plateau"),
    [
        ([1000 + 500 * min(1, minute / 12) for minute in range(31)], True),  # fills its caches, then stands still
        ([1000 + 4 * minute for minute in range(31)], False),  # a leak of 4 MB a minute
        ([1500 + (400 if minute == 25 else 0) for minute in range(31)], True),  # one spike
        ([1000 + 30 * minute for minute in range(20)] + [1570 + 6 * minute for minute in range(11)], False),  # slower
        ([1500 - minute for minute in range(31)], True),
    ],
)
def test_a_plateau_is_told_from_a_leak(totals: list[float], plateau: bool) -> None:
    assert verdict(curve(*totals))["plateau"] is plateau


def test_a_slope_is_per_minute_and_no_spike_moves_it() -> None:
    minutes = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert slope(minutes, [1, 3, 5, 7, 9]) == (2, 2, 2)
    assert slope(minutes, [1, 3, 500, 7, 9])[0] == 2
