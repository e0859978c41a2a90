from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from ctxwin_evals.items import Scored
from ctxwin_evals.metrics import Outcome, cell, eta, eta_interval, kl_divergence, rouge_l
from ctxwin_evals.stats import wilson
from eval_rows import row


def scored(answer: str, truth: str = "red") -> Scored:
    return Scored(None if answer == "?" else float(answer == truth), answer)


def made(answer: str, reference: str, base: str, kl: float = 0.0, base_kl: float = 1.0, cluster: str = "") -> Outcome:
    made.count += 1  # type: ignore[attr-defined]
    answers = (scored(a) for a in (answer, reference, base))
    number = made.count  # type: ignore[attr-defined]
    sample = row("patched:1", number, kl=kl, base_kl=base_kl, cluster=cluster or f"c{number}", stored=10, over=100)
    return Outcome(sample, *answers)


def changed(outcome: Outcome, **fields: Any) -> Outcome:
    return replace(outcome, row=outcome.row.model_copy(update=fields))


made.count = 0  # type: ignore[attr-defined]


def test_kl_of_two_known_distributions() -> None:
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    want = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert kl_divergence(p + 7.0, q - 3.0) == pytest.approx(want, rel=1e-12)
    assert kl_divergence(q, p) != pytest.approx(kl_divergence(p, [0.0, 0.0, 5.0]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.floats(-5, 5))
def test_kl_is_zero_for_the_same_and_never_negative(logits: list[float], shift: float) -> None:
    assert kl_divergence(logits, [x + shift for x in logits]) == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(logits, logits[::-1]) >= 0.0


def test_kl_of_what_is_no_distribution_is_no_figure() -> None:
    """Masked tokens add nothing; NaN is not a KL of 0."""
    no, both = -math.inf, kl_divergence([1.0, 5.0], [5.0, 1.0])
    assert kl_divergence([no, 1.0, 5.0], [no, 5.0, 1.0]) == both > 3
    assert kl_divergence([no, 1.0, 5.0], [0.0, 1.0, 5.0]) > 0
    for other in ([math.nan, math.nan], [math.inf, 1.0], [no, no], [no, 1.0]):
        with pytest.raises(FloatingPointError, match="must be numbers with a finite KL, got NaN or infinite"):
            kl_divergence([1.0, 5.0], other)
    for reference in ([math.nan, 1.0], [math.inf, 1.0], [no, no]):
        with pytest.raises(FloatingPointError, match="got NaN"):
            kl_divergence(reference, [1.0, 5.0])


def test_kl_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="same vocabulary"):
        kl_divergence([0.0, 1.0], [0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="not empty"):
        kl_divergence([], [])


def test_eta_by_hand_and_its_floor() -> None:
    assert eta([0.1, 0.3], [1.0, 3.0]) == pytest.approx(0.9)
    assert eta([4.0], [2.0]) == pytest.approx(-1.0)
    assert eta([0.0, 0.0], [0.019, 0.0]) is None
    assert eta([0.0, 0.0], [0.02, 0.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one"):
        eta([], [])


def test_eta_has_an_interval_where_it_is_a_figure() -> None:
    clusters = [f"c{i}" for i in range(6)]
    kls, base_kls = [0.1, 0.2, 0.1, 0.9, 0.1, 0.2], [1.0, 2.0, 3.0, 1.0, 2.0, 1.0]
    low, high = eta_interval(kls, base_kls, clusters) or (0.0, 0.0)
    assert low < 0.84 < high <= 1.0
    assert eta([0.1 * b for b in base_kls], base_kls) == pytest.approx(0.9)
    assert eta_interval([0.1 * b for b in base_kls], base_kls, clusters) == pytest.approx([0.9, 0.9])
    assert eta_interval([0.0] * 6, [0.0] * 6, clusters) is None


def test_flips_harm_and_agreement_by_hand() -> None:
    outcomes = [
        made("red", "red", "blue"),  # a flip, restored
        made("blue", "red", "blue"),  # a flip, not restored: harm
        made("red", "blue", "red"),  # a flip of a wrong answer; right, but not what re-prefill says
        made("pink", "red", "red"),  # no flip, but the arm breaks it: harm
        made("blue", "blue", "blue"),  # all wrong: no harm
    ]
    figures = cell(outcomes)
    assert (figures["flip_recover"], figures["flips"]) == (pytest.approx(1 / 3), 3)
    assert figures["harm_rate"] == pytest.approx(2 / 5)
    assert figures["agreement"] == pytest.approx(2 / 5)
    last = cell(outcomes[-1:])
    assert (last["flip_recover"], last["flips"]) == (None, 0)


def test_an_unscored_answer_is_neither_right_nor_wrong() -> None:
    outcomes = [made("red", "red", "red"), made("?", "red", "red"), made("red", "?", "red"), made("?", "?", "?")]
    figures = cell(outcomes)
    assert (figures["n"], figures["unparsed"], figures["accuracy"]) == (4, 2, 1.0)
    assert (figures["harm_rate"], figures["delta"], figures["reference_accuracy"]) == (0.0, 0.0, 1.0)
    assert figures["agreement"] == 0.5  # the reading of an answer can agree without a score
    none = cell(outcomes[-1:])
    assert (none["accuracy"], none["ci95"], none["harm_rate"], none["delta"]) == (None, None, None, None)
    assert none["kl"] == 0.0


def test_partial_credit_counts_as_far_as_it_goes() -> None:
    half = Scored(0.5, "1, 2")
    outcomes = [replace(made("red", "red", "blue"), answer=half), made("red", "red", "blue")]
    figures = cell(outcomes)
    assert figures["accuracy"] == 0.75
    assert figures["delta"] == -0.25
    assert figures["harm_rate"] == 0.5


def test_cell_holds_every_figure() -> None:
    figures = cell([made("red", "red", "blue", kl=0.1), made("blue", "red", "red", kl=0.3)])
    assert figures["n"] == figures["clusters"] == 2
    assert figures["accuracy"] == 0.5
    assert figures["ci95"] == pytest.approx(list(wilson(1, 2)))
    assert figures["kl"] == pytest.approx(0.2)
    assert figures["kl_ci95"] == pytest.approx([0.1, 0.3])
    assert figures["kl_p99"] == pytest.approx(0.298)
    assert figures["eta"] == pytest.approx(0.8)
    assert figures["bytes_share"] == pytest.approx(0.1)
    assert figures["delta"] == pytest.approx(-0.5)
    assert figures["harm_ci95"] == pytest.approx(list(wilson(1, 2)))
    assert figures["flip_ci95"] == pytest.approx(list(wilson(1, 1)))
    assert "forced_kl" not in figures
    with pytest.raises(ValueError, match="at least one sample"):
        cell([])


def test_the_difference_to_reprefill_is_paired() -> None:
    answers = [("red", "red"), ("blue", "red"), ("red", "blue"), ("x", "y"), ("blue", "red")] * 4
    figures = cell([made(answer, reference, "red") for answer, reference in answers])
    want = scipy_stats.ttest_1samp([0, -1, 1, 0, -1] * 4, 0.0).confidence_interval(0.95)
    assert figures["delta"] == pytest.approx(-0.2)
    assert figures["delta_ci95"] == pytest.approx([want.low, want.high])
    assert cell([made("red", "red", "red")])["delta_ci95"] is None


def test_clusters_widen_what_they_should() -> None:
    apart = [made("red" if i < 30 else "blue", "red", "blue", kl=0.1 * (i >= 30)) for i in range(60)]
    together = [changed(o, cluster=f"v{i // 10}") for i, o in enumerate(apart)]
    one, other = cell(apart), cell(together)
    assert other["clusters"] == 6
    for name in ("ci95", "kl_ci95", "eta_ci95", "delta_ci95", "harm_ci95", "agreement_ci95"):
        assert other[name][1] - other[name][0] > 1.5 * (one[name][1] - one[name][0]), name
    with pytest.raises(ValueError, match="must name its cluster"):
        cell([changed(apart[0], cluster="")])


def test_kl_of_whole_answers_where_any_is_longer_than_a_word() -> None:
    long = changed(made("red", "red", "blue", kl=0.9, base_kl=2.0), forced_kl=0.3, base_forced_kl=1.0)
    figures = cell([long, made("red", "red", "blue", kl=0.1, base_kl=3.0)])
    assert figures["kl"] == pytest.approx(0.5)
    assert figures["forced_kl"] == pytest.approx(0.2)
    assert figures["forced_eta"] == pytest.approx(0.9)


WORDS = st.lists(st.sampled_from(["red", "blue", "circle", "square", "17"]), max_size=8)


@settings(max_examples=60, deadline=None)
@given(WORDS, WORDS)
def test_rouge_l_is_the_longest_common_subsequence(first: list[str], second: list[str]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    common = table[-1][-1]
    expected = 2 * common / (len(first) + len(second)) if first or second else 1.0  # harmonic mean of both shares
    assert rouge_l(" ".join(first), " ".join(second)) == pytest.approx(expected)
