from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from ctxwin_evals import stats
from ctxwin_evals.stats import (
    bootstrap_mean,
    bootstrap_ratio,
    difference_interval,
    effective_count,
    mcnemar,
    mean_interval,
    share_interval,
    standard_error,
    wilson,
)


def alone(n: int) -> list[str]:
    return [f"c{i}" for i in range(n)]


def test_wilson_against_published_values() -> None:
    # Newcombe (1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)
    with pytest.raises(ValueError, match="n must be > 0"):
        wilson(0, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_one_item_a_cluster_is_the_plain_interval(values: list[float]) -> None:
    assert standard_error(values, alone(len(values))) == pytest.approx(scipy_stats.sem(values), abs=1e-9)
    low, high = mean_interval(values, alone(len(values))) or (math.nan, math.nan)
    if scipy_stats.sem(values) > 1e-9:
        want = scipy_stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert (low, high) == pytest.approx((want.low, want.high), rel=1e-6, abs=1e-9)


def test_clustered_error_by_hand() -> None:
    # Two clusters of two: deviations from 0.5 sum to 1 and -1, so sqrt(2 / 1 * (1 + 1)) / 4.
    assert standard_error([1, 1, 0, 0], ["a", "a", "b", "b"]) == pytest.approx(0.5)
    # The same items in clusters that each hold one of either: the deviations cancel.
    assert standard_error([1, 1, 0, 0], ["a", "b", "a", "b"]) == 0.0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.integers(2, 6))
def test_copies_of_an_item_add_nothing(values: list[float], copies: int) -> None:
    once = standard_error(values, alone(len(values)))
    again = standard_error(values * copies, alone(len(values)) * copies)
    assert again == pytest.approx(once, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_shares_of_independent_items_get_wilson(right: list[bool]) -> None:
    assert share_interval([float(r) for r in right], alone(len(right))) == pytest.approx(wilson(sum(right), len(right)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from("abcdef")), min_size=1, max_size=40))
def test_a_share_lies_within_its_interval(items: list[tuple[float, str]]) -> None:
    scores, clusters = [s for s, _ in items], [c for _, c in items]
    low, high = share_interval(scores, clusters)
    assert 0 <= low <= np.mean(scores) + 1e-12
    assert np.mean(scores) - 1e-12 <= high <= 1


def test_alike_items_of_few_clusters_are_not_sure() -> None:
    scores, clusters = [1.0] * 90, [f"c{i // 30}" for i in range(90)]
    assert share_interval(scores, clusters) == pytest.approx(wilson(3, 3))
    assert share_interval(scores, ["one"] * 90) == pytest.approx(wilson(1, 1))
    # As many items in clusters that agree within: as wide as if each cluster were one item, or wider.
    half = [1.0] * 45 + [0.0] * 45
    low, high = share_interval(half, [f"c{i // 5}" for i in range(90)])
    assert high - low > 2 * (wilson(45, 90)[1] - wilson(45, 90)[0])


def test_items_of_two_clusters_may_be_worth_less_than_one() -> None:
    low, high = share_interval([1.0, 0.0, 0.0, 0.0], ["a", "a", "b", "b"])
    assert 0 <= low < 0.02
    assert 0.9 < high <= 1


def test_how_alike_clusters_are_may_be_known_from_other_scores_of_the_items() -> None:
    clusters = [f"c{i // 5}" for i in range(200)]
    some = [0.0] * 200
    some[7] = some[90] = 1.0
    worth = effective_count(some, clusters)
    assert worth is not None and 40 < worth <= 200
    assert effective_count([0.0] * 200, clusters) is None and effective_count([0.0] * 9, alone(9)) == 9
    # None of 200 changed is not less sure than two of them, as it would be on 40 clusters alone.
    assert share_interval([0.0] * 200, clusters, worth)[1] < share_interval(some, clusters)[1]
    assert share_interval([0.0] * 200, clusters)[1] > share_interval(some, clusters)[1]


def test_differences_that_are_all_alike_are_not_sure_either() -> None:
    for drawn in (False, True):
        assert difference_interval([0.0] * 20, alone(20), drawn=drawn) == pytest.approx((-0.1611, 0.1611), abs=5e-5)
        assert difference_interval([-1.0] * 20, alone(20), drawn=drawn) == pytest.approx((-1.0, -0.8389), abs=5e-5)
        assert difference_interval([0.0] * 20, ["one"] * 20, drawn=drawn) is None
    low, high = difference_interval([-1.0] * 19 + [0.0], alone(20)) or (0.0, 0.0)
    assert low == -1.0 < -0.95 < high < -0.8  # t alone would pass -1
    mixed = [1.0, 0.0, 0.0, -1.0, 0.0]
    assert difference_interval(mixed, alone(5)) == mean_interval(mixed, alone(5))
    assert difference_interval(mixed, alone(5), drawn=True) == bootstrap_mean(mixed, alone(5))


def test_graded_scores_that_are_all_alike_are_not_sure_either() -> None:
    low, high = share_interval([0.5] * 20, alone(20))
    assert (low, high) == pytest.approx((0.5 * (1 - 0.1611), 0.5 * (1 + 0.1611)), abs=5e-5)
    assert share_interval([0.5] * 20, [f"c{i // 2}" for i in range(20)])[0] < low
    assert share_interval([0.5] * 20, ["one"] * 20) == (0.0, 1.0)


def test_rounding_makes_no_difference() -> None:
    rounded = [0.1 + 0.2] * 5 + [0.3] * 15
    assert share_interval(rounded, alone(20)) == pytest.approx(share_interval([0.3] * 20, alone(20)))
    gaps = [3 * 0.1 - 0.3, *[0.0] * 19]
    assert difference_interval(gaps, alone(20), drawn=True) == difference_interval([0.0] * 20, alone(20), drawn=True)
    assert share_interval([1.0 - 2**-53] * 3 + [1.0 + 2**-52], alone(4)) == wilson(4, 4)


@pytest.mark.parametrize("clusters", [["a", ""], ["a"]])
def test_a_missing_cluster_is_an_error(clusters: list[str]) -> None:
    for figure in (standard_error, mean_interval, share_interval, bootstrap_mean):
        with pytest.raises(ValueError, match="every item must name its cluster"):
            figure([0.0, 1.0], clusters)


def test_no_data_and_bad_scores_are_errors() -> None:
    for figure in (standard_error, mean_interval, share_interval, bootstrap_mean):
        with pytest.raises(ValueError, match="non-empty vector"):
            figure([], [])
    with pytest.raises(ValueError, match=r"within 0\.\.1"):
        share_interval([0.0, 2.0], ["a", "b"])


def test_one_cluster_has_no_interval() -> None:
    assert standard_error([0.0, 1.0], ["a", "a"]) is None
    assert mean_interval([0.0, 1.0], ["a", "a"]) is None
    assert bootstrap_ratio([0.0, 1.0], [1.0, 1.0], ["a", "a"]) is None


def test_the_bootstrap_agrees_with_scipy_and_repeats() -> None:
    rng = np.random.default_rng(1)
    over, under = rng.exponential(1.0, 80), rng.exponential(2.0, 80)
    mine = bootstrap_ratio(over, under, alone(80))
    want = scipy_stats.bootstrap(
        (over, under), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, method="percentile",
        n_resamples=4000, rng=np.random.default_rng(2),
    ).confidence_interval  # fmt: skip
    assert mine == pytest.approx((want.low, want.high), abs=0.02)
    assert mine == bootstrap_ratio(over, under, alone(80))
    # Each item twice in its cluster changes nothing, since clusters are drawn whole.
    assert bootstrap_ratio(np.repeat(over, 2), np.repeat(under, 2), np.repeat(alone(80), 2).tolist()) == pytest.approx(
        mine
    )


def test_many_clusters_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(3).normal(size=50)
    whole = bootstrap_mean(values, alone(50))
    monkeypatch.setattr(stats, "_COUNTS_AT_ONCE", 999)
    stats._draws.cache_clear()
    assert bootstrap_mean(values, alone(50)) == pytest.approx(whole)


def test_a_draw_without_a_denominator_has_no_interval() -> None:
    assert bootstrap_ratio([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], alone(3)) is None


def test_mcnemar_against_a_textbook() -> None:
    # Agresti, Categorical Data Analysis, exact: 6 against 16 discordant of 50 gives 2 P(X <= 6), X ~ Bin(22, 1/2).
    first = [True] * 6 + [False] * 16 + [True] * 28
    second = [False] * 6 + [True] * 16 + [True] * 28
    want = 2 * sum(math.comb(22, k) for k in range(7)) / 2**22
    assert mcnemar(first, second) == pytest.approx(want)
    assert mcnemar([True, False], [True, False]) == 1.0
    with pytest.raises(ValueError, match="same items"):
        mcnemar([True], [])


def _clustered(
    rng: np.random.Generator, groups: int, share: float = 0.7, alike: float = 2.0
) -> tuple[list[float], list[str]]:
    """Answers to 1 to 6 questions each on ``groups`` videos, alike within a video; the mean over clusters is ``share``."""
    scores, clusters = [], []
    for g in range(groups):
        hard = rng.beta(share * alike, (1 - share) * alike)
        size = int(rng.integers(1, 7))
        scores += [float(x) for x in rng.random(size) < hard]
        clusters += [f"v{g}"] * size
    return scores, clusters


@pytest.mark.slow
@pytest.mark.parametrize("groups", [15, 60])
def test_intervals_cover_on_clustered_answers(groups: int) -> None:
    """Clustered intervals hold the true share in about 95 % of runs; one that takes items as independent does not."""
    rng = np.random.default_rng(groups)
    runs, share = 1000, 0.7
    held = {"share": 0, "mean": 0, "bootstrap": 0, "naive": 0}
    for _ in range(runs):
        scores, clusters = _clustered(rng, groups, share)
        found = {
            "share": share_interval(scores, clusters),
            "mean": mean_interval(scores, clusters),
            "bootstrap": bootstrap_mean(scores, clusters),
            "naive": wilson(int(sum(scores)), len(scores)),
        }
        for name, interval in found.items():
            assert interval is not None
            held[name] += interval[0] <= share <= interval[1]
    cover = {name: count / runs for name, count in held.items()}
    assert 0.92 <= cover["share"] <= 0.985, cover
    assert 0.91 <= cover["mean"] <= 0.985, cover
    assert cover["bootstrap"] >= (0.88 if groups < 30 else 0.92), cover  # percentiles are short with few clusters
    assert cover["naive"] < 0.9, cover
