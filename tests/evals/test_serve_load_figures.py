"""Figures of the serving study from records and curves that are known, and the trace; no engine."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxwin.evals.studies.serve import figures, plain, sweep
from ctxwin.evals.studies.serve.figures import median_interval, quantile
from ctxwin.evals.studies.serve.load import Record, Run, cell_of, open_loop
from ctxwin.evals.studies.serve.requests import Served
from ctxwin.evals.studies.serve.show import lines
from ctxwin.evals.studies.serve.trace import KINDS, Mix, Turn, arrivals, frames_of, trace


def turn(session: int = 0, number: int = 0) -> Turn:
    return Turn(session, number, "now", 0, (0,), 0)


class Takes:
    """Serves every turn in a fixed time: half of it to the first token, half to the second."""

    def __init__(self, seconds: float, fails: frozenset[int] = frozenset()) -> None:
        self.seconds, self.fails = seconds, fails
        self.most = self.now = 0
        self._lock = threading.Lock()

    def serve(self, turn: Turn, heard: Callable[[], None]) -> Served:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if turn.number in self.fails:
                raise RuntimeError("out of memory")
            for _ in range(2):
                time.sleep(self.seconds / 2)
                heard()
            return Served((1, 2), 10, 4, 6)
        finally:
            with self._lock:
                self.now -= 1


def test_trace_is_what_a_window_does() -> None:
    mix = Mix(sessions=3, frames=4, look_backs=0.4)
    turns = trace(mix, 300, seed=1)
    seen = {s: mix.past(s, 1) for s in range(3)}
    for t in turns:
        if t.kind == "now":
            assert t.frame == seen[t.session]
            seen[t.session] += 1
        view = list(range(seen[t.session] - 4, seen[t.session]))
        if t.kind == "back":
            assert t.placed == (t.frame, *view)
            assert 0 <= t.frame < view[0]
        elif t.kind == "reorder":
            assert t.placed == (*view[:-2], view[-1], view[-2])
        else:
            assert t.placed == tuple(view)
    assert seen == frames_of(turns, mix, 1)
    assert {t.kind for t in turns} == set(KINDS)
    assert abs(sum(t.kind == "back" for t in turns) / 300 - 0.4) < 0.1
    assert [t.number for t in turns if t.session == 1] == list(range(100))


def test_trace_is_the_seeds() -> None:
    mix = Mix(sessions=5)
    assert trace(mix, 40, 1) == trace(mix, 40, 1)
    assert trace(mix, 40, 1) != trace(mix, 40, 2)
    assert trace(mix, 40, 1)[:20] == trace(mix, 20, 1)
    # Every session has its turn in every round.
    assert sorted(t.session for t in trace(mix, 5, 9)) == [0, 1, 2, 3, 4]


def test_arrivals_are_poisson() -> None:
    times = arrivals(50.0, 100.0, seed=3)
    assert times == sorted(times)
    assert times[-1] < 100
    assert abs(len(times) / 5000 - 1) < 0.05
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert abs(deviation / mean - 1) < 0.1  # an exponential's deviation is its mean


def test_latency_counts_from_when_a_turn_was_due() -> None:
    """One session, three turns due at once, 0.1 s each: the second waits for the first, the third for both."""
    run = open_loop(Takes(0.1), [turn(0, n) for n in range(3)], [0.0] * 3, 0.0)
    first, second, third = (r.ttft for r in run.records)
    assert first >= 0.05
    assert second >= first + 0.1
    assert third >= second + 0.1
    assert third < 1.0
    assert all(0.05 <= gap < 0.3 for r in run.records for gap in r.gaps)
    assert run.seconds == run.records[-1].token_times[-1]


def test_sessions_do_not_wait_for_one_another() -> None:
    policy = Takes(0.6)
    run = open_loop(policy, [turn(s) for s in range(4)], [0.0, 0.01, 0.02, 0.03], 0.1)
    assert policy.most == 4
    assert all(0.3 <= r.ttft < 0.6 for r in run.records)
    assert cell_of(run, "p", 0, 1.0)["completed"] == 4


def test_requests_come_when_they_are_due_however_slow_the_answers_are() -> None:
    run = open_loop(Takes(0.8), [turn(s) for s in range(5)], [0.0, 0.05, 0.1, 0.15, 0.2], 0.25)
    for record in run.records:
        assert record.due <= record.begun < record.due + 0.2
    assert run.records[-1].begun < run.records[0].token_times[-1]  # the first was still being served


def test_failures_and_drops_are_counted_and_are_no_goodput() -> None:
    run = open_loop(Takes(0.3, frozenset({1})), [turn(0, n) for n in range(5)], [0.0] * 5, 0.0, patience=0.35)
    row = cell_of(run, "p", 0, 1.0)
    assert (row["requests"], row["completed"], row["failed"], row["dropped"]) == (5, 2, 1, 2)
    assert row["errors"] == ["RuntimeError: out of memory"]
    assert row["ttft_s"]["p95"] is None  # a first token that never came is later than any
    assert figures.goodput(row, 10.0) == pytest.approx(2 / row["seconds"])


def test_cpu_clock_skips_what_nobody_uses_and_sleeps() -> None:
    """Two turns due 30 s apart that take no processor time are over at once, by a clock that says 30 s."""
    began = time.perf_counter()
    run = open_loop(Takes(0.1), [turn(0, 0), turn(1, 1)], [0.0, 30.0], 40.0, clock="cpu")
    assert time.perf_counter() - began < 5
    assert run.records[1].begun == pytest.approx(30.0, abs=0.05)
    assert all(r.ttft < 0.05 for r in run.records)  # it slept; nobody computed


def test_cpu_clock_counts_computation() -> None:
    class Computes:
        def serve(self, turn: Turn, heard: Callable[[], None]) -> Served:
            until = time.process_time() + 0.2
            while time.process_time() < until:
                pass
            heard()
            return Served((1,), 1, 1, 0)

    run = open_loop(Computes(), [turn(0, 0), turn(0, 1)], [0.0, 0.0], 0.0, clock="cpu")
    assert run.records[0].ttft == pytest.approx(0.2, abs=0.08)
    assert run.records[1].ttft == pytest.approx(0.4, abs=0.12)


def test_quantiles() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert math.isinf(quantile([1.0, 2.0, math.inf], 0.6))
    assert math.isnan(quantile([], 0.5))


def test_row_adds_up() -> None:
    records = [
        Record(
            turn(s),
            float(s),
            float(s),
            [s + 0.5, s + 0.6, s + 0.8],
            Served((1, 2, 3), 100, 30, 70, 5, {"survivor": 64}),
        )
        for s in range(4)
    ]
    row = cell_of(Run(records, 8.0, 2.0, (0.1, 0.2)), "p", 0, 1.0)
    assert (row["requests_per_s"], row["cpu_s_per_request"]) == (0.5, 0.5)
    assert (row["prompt_tokens"], row["computed_tokens"], row["cached_tokens"]) == (400, 120, 280)
    assert (row["loads"], row["bytes_loaded"], row["tokens_by_lane"]) == (4, 20, {"survivor": 256})
    assert row["ttft_s"] == {name: pytest.approx(0.5) for name in ("p50", "p95", "p99")}
    assert row["inter_token_s"]["p50"] == pytest.approx(0.15)
    assert figures.goodput(row, 0.6) == 0.5
    assert figures.goodput(row, 0.4) == 0.0
    json.dumps(row, allow_nan=False)


def cells(**points: list[tuple[float, float | None]]) -> list[dict[str, object]]:
    return [
        {"policy": policy, "rate": rate, "ttft_s": {"p95": p95}}
        for policy, found in points.items()
        for rate, p95 in found
    ]


def test_highest_rate_lies_between_the_rates_around_the_bound() -> None:
    points = [(1.0, 0.1), (2.0, 0.4), (3.0, 1.6)]
    assert figures.highest_rate(points, 0.2).rate == pytest.approx(1.5)
    assert figures.highest_rate(points, 0.8).rate == pytest.approx(2.5)
    assert figures.highest_rate(points, 0.4).rate == pytest.approx(2.0)
    assert figures.highest_rate(points, 0.05).rate is None
    assert figures.highest_rate(points, 9.0) == figures.Highest(3.0, at_least=True)


def test_noise_is_evened_out_and_a_token_that_never_came_is_beyond_any_bound() -> None:
    # 0.4 at 2 and 0.1 at 3 are one level of 0.2.
    assert figures.highest_rate([(1.0, 0.1), (2.0, 0.4), (3.0, 0.1), (4.0, 0.8)], 0.4).rate == pytest.approx(3.5)
    found = figures.highest_rate([(1.0, 0.1), (2.0, None)], 1.0).rate
    assert found is not None
    assert 1.0 < found < 1.2


def test_ratio_is_over_the_best_of_the_others() -> None:
    made = cells(
        ctxwin=[(1.0, 0.1), (2.0, 0.1), (4.0, 0.1), (6.0, 1.6)],
        trim=[(1.0, 0.2), (2.0, 0.8)],
        append=[(1.0, 0.1), (2.0, 0.2), (4.0, 3.2)],
        naive=[(1.0, 2.0)],
    )
    found = figures.compare(made, 0.4)
    assert found["best_prefix_cache"] == "append"
    assert found["rates"]["append"] == pytest.approx(2.5)
    assert found["rates"]["ctxwin"] == pytest.approx(5.0)
    assert (found["ratio"], found["ratio_is"]) == (pytest.approx(2.0), "exact")
    assert found["rates"]["naive"] is None
    assert figures.base_p95(made) == 0.1


def test_a_ratio_whose_sides_were_not_driven_to_the_bound_says_so() -> None:
    ours = figures.compare(cells(ctxwin=[(1.0, 0.1), (4.0, 0.1)], trim=[(1.0, 0.1), (2.0, 1.0)]), 0.5)
    assert ours["ratio_is"] == "at least"
    assert ours["at_least"] == ["ctxwin"]
    theirs = figures.compare(cells(ctxwin=[(1.0, 0.1), (4.0, 0.1)], trim=[(1.0, 0.1), (2.0, 0.1)]), 0.5)
    assert theirs["ratio_is"] == "at most"
    assert not figures.checks(theirs, None)[0]["holds"]
    nobody = figures.compare(cells(ctxwin=[(1.0, 0.1)], trim=[(1.0, 9.0)]), 0.5)
    assert nobody["ratio"] is None
    assert figures.checks(nobody, None) == []


def test_slow_windows_are_no_ratio_of_theirs() -> None:
    found = figures.compare(cells(ctxwin=[(1.0, 3.0)], trim=[(1.0, 0.1), (2.0, 1.0)]), 0.5)
    assert found["ratio"] == 0.0
    assert not figures.checks(found, None)[0]["holds"]


def test_the_bound_comes_from_the_best_prefix_cache_policy() -> None:
    made = cells(ctxwin=[(1.0, 0.01), (2.0, 1.0)], trim=[(1.0, 0.3), (2.0, 1.0)], append=[(1.0, 0.2), (2.0, 2.0)])
    found = figures.comparisons(made, None)
    assert found["slo_s"] == pytest.approx(0.4)
    assert [c["bound_s"] for c in found["around"]] == pytest.approx([0.2 * f for f in figures.BOUNDS])
    assert figures.comparisons(made, 0.7)["slo_is"] == "given"
    assert figures.comparisons(cells(ctxwin=[(1.0, 0.01)]), None)["at_slo"] is None


def test_rates_must_ascend() -> None:
    with pytest.raises(ValueError, match="rates must ascend"):
        figures.highest_rate([(2.0, 0.1), (1.0, 0.2)], 1.0)


def piece(pair: int, side: str, gap: float, burst: float) -> dict[str, object]:
    return {
        "pair": pair, "side": side, "rate": 2.0, "gaps": [gap] * 10, "ttfts": [0.1], "tokens": 100, "seconds": 5.0,
        "burst_tokens_per_s": burst, "cpu_s_per_token": gap / 2, "window_asks": 0, "load": 1.0,
    }  # fmt: skip


def test_plain_ratios_are_of_pairs() -> None:
    """A machine that is twice as slow in one pair slows both of its sides."""
    slices = [
        piece(0, "without", 0.10, 50), piece(0, "with", 0.11, 49), piece(1, "without", 0.20, 25), piece(1, "with", 0.20, 25),
        piece(2, "without", 0.10, 50), piece(2, "with", 0.102, 50), piece(3, "without", 0.1, 50),
    ]  # fmt: skip
    found = figures.plain_figures(slices)
    assert found["ratios"]["inter_token_p99"]["median"] == pytest.approx(1.02)
    assert found["ratios"]["inter_token_p99"]["pairs"] == 3
    assert found["ratios"]["throughput"]["median"] == 1.0
    assert found["ratios"]["inter_token_p50"]["quartiles"] == pytest.approx([1.01, 1.06])
    assert found["sides"]["without"]["slices"] == 4
    assert "windows" not in found["sides"]
    # Three pairs show nothing, however near to 1 their median is.
    checked = figures.checks(None, found)
    assert {c["check"]: (c["verdict"], c["holds"]) for c in checked} == {
        "inter_token_p99": ("not shown", False),
        "throughput": ("not shown", False),
    }
    told = lines({"rows": [], "comparison": {"at_slo": None}, "plain": found, "checks": checked})
    assert any("p99 between tokens: median of 3 pairs 1.020 (quartiles 1.010 to 1.060)" in line for line in told)
    assert sum(line.startswith("NOT SHOWN") for line in told) == 2


def paired(*ratios: float) -> dict[str, Any]:
    """Figures of pairs in which the connector makes gaps this many times as long and throughput as much less."""
    sides = [
        piece(pair, side, 0.1 * slower, 50 / slower)
        for pair, ratio in enumerate(ratios)
        for side, slower in (("without", 1.0), ("with", ratio))
    ]
    return figures.plain_figures(sides)


@pytest.mark.parametrize(
    ("ratios", "verdict", "told"),
    [
        ((0.99, 1.0, 1.0, 1.01, 1.02, 1.03), "holds", "holds"),
        ((0.99, 1.0, 1.0, 1.01, 1.02, 1.15), "not shown", "NOT SHOWN"),
        ((1.06, 1.07, 1.07, 1.08, 1.1, 1.2), "fails", "FAILS"),
        ((1.0, 1.0, 1.0, 1.0, 1.0), "not shown", "NOT SHOWN"),
    ],
)
def test_plain_traffic_holds_where_the_whole_interval_does(ratios: tuple[float, ...], verdict: str, told: str) -> None:
    found = paired(*ratios)
    checked = figures.checks(None, found)
    assert {c["check"]: c["verdict"] for c in checked} == {"inter_token_p99": verdict, "throughput": verdict}
    assert all(c["holds"] == (verdict == "holds") for c in checked)
    shown = lines({"rows": [], "comparison": {"at_slo": None}, "plain": found, "checks": checked})
    assert sum(line.startswith(f"{told}: ") for line in shown) == 2
    if len(ratios) > 5:
        assert checked[0]["interval"] == pytest.approx([ratios[0], ratios[-1]])
        assert checked[1]["interval"] == pytest.approx([1 / ratios[-1], 1 / ratios[0]])
        assert any(f"95 % interval {ratios[0]:.3f} to {ratios[-1]:.3f}" in line for line in shown)


def test_median_interval_is_the_sign_tests() -> None:
    """Ranks from tables of the sign test; whether it covers is counted, over all ways in which values can lie."""
    for count, low in ((6, 1), (8, 1), (9, 2), (13, 3), (20, 6), (25, 8)):
        values = [float(v) for v in range(1, count + 1)]
        assert median_interval(values[::-1]) == [low, count + 1 - low], count
    assert median_interval([1.0] * 5) is None
    assert median_interval([]) is None
    covered = 0
    # Each value lies below or above the median, 0, as a coin falls.
    for signs in itertools.product((-1.0, 1.0), repeat=9):
        found = median_interval([sign * (i + 1) for i, sign in enumerate(signs)])
        assert found is not None
        covered += found[0] < 0 < found[1]
    assert 0.95 <= covered / 2**9 < 0.97


def test_a_pair_is_the_same_requests_on_both_sides_in_turn(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class Fake:
        def __init__(self, side: str) -> None:
            self.side = side

        def do(self, order: dict[str, Any]) -> dict[str, Any]:
            asked.append((self.side, order))
            found: dict[str, Any] = {"window_asks": 0}
            if order["rate"]:
                found |= {"gaps": [0.1], "ttfts": [0.1], "tokens": 24, "seconds": 2.0}
            if order["burst"]:
                number = len(asked)
                found |= {"burst_tokens_per_s": 100.0 + number, "cpu_s_per_token": 1.0 / number}
            return found

    workers: Any = {side: Fake(side) for side in figures.SIDES}
    asked_for = plain.PlainSettings(windows=0, bursts=3)
    settings = sweep.Settings()
    progress = sweep.Progress(tmp_path, sweep.settings_row(settings, "model"))
    rate = plain._warm(workers, asked_for, settings, progress)
    assert rate == progress.state["plain_rate"] == pytest.approx(0.5 * 103 / 24, rel=0.01)
    first: list[str] = []
    for pair in (0, 1):
        asked.clear()
        found = plain._pair(workers, pair, rate, asked_for, settings)
        assert {(s["pair"], s["side"]) for s in found} == {(pair, side) for side in figures.SIDES}
        sides = [side for side, _ in asked]
        assert sides[:2] == [sides[0], sides[1]] and sides[0] != sides[1]
        assert sides[2:] == [sides[1], sides[0], sides[0], sides[1], sides[1], sides[0]]  # what drifts meets both alike
        orders = {s: [order for side, order in asked if side == s] for s in figures.SIDES}
        assert orders["with"] == orders["without"]
        assert len({order["name"] for order in orders["with"]}) == 1 + asked_for.bursts
        mine = [100.0 + i + 1 for i, (side, order) in enumerate(asked) if side == "with" and order["burst"]]
        assert next(s for s in found if s["side"] == "with")["burst_tokens_per_s"] == sorted(mine)[1]
        first.append(sides[0])
    assert set(first) == set(figures.SIDES)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"windows": 0}, "sessions must be at least 1, got 0"),
        ({"frames": 1}, "frames must be at least 2"),
        ({"look_backs": 0.9}, "look_backs must be in 0..0.85"),
        ({"rates": (2.0, 1.0)}, "rates must be positive and rise"),
        ({"rates": (-1.0,)}, "rates must be positive and rise"),
        ({"policies": ("ctxwin", "best")}, "policies must be some of .*, got best"),
        ({"policies": ("ctxwin",)}, "rates must be given where append is not measured"),
        ({"duration": 0.0}, "duration must be positive"),
        ({"mode": "fast"}, "fidelity must be one of"),
        ({"processes": "many"}, "processes must be single, multi or async"),
        ({"clock": "cpu"}, "the cpu clock needs an engine in this process"),
        ({"answer": 1}, "answer must be at least 2"),
    ],
)
def test_settings_say_what_is_wrong(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sweep.Settings(**wrong)  # type: ignore[arg-type]


def test_progress_of_other_settings_is_not_continued(tmp_path) -> None:  # type: ignore[no-untyped-def]
    row = sweep.settings_row(sweep.Settings(), "model")
    first = sweep.Progress(tmp_path, row)
    first.cells.append({"policy": "trim", "index": 0})
    first.save()
    assert sweep.Progress(tmp_path, row).cell("trim", 0) is not None
    assert sweep.Progress(tmp_path, row).cell("trim", 1) is None
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        sweep.Progress(tmp_path, sweep.settings_row(sweep.Settings(seed=1), "model"))
    (tmp_path / sweep.STATE).write_text("{")
    with pytest.raises(ValueError, match="must be the state of a run"):
        sweep.Progress(tmp_path, row)
