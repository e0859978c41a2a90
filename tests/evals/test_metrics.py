from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.evals.metrics import (
    Outcome,
    cell,
    eta,
    flip_recover,
    harm_rate,
    kl_divergence,
    paired_difference,
    wilson,
)


def made(answer: str, reference: str, base: str, truth: str = "red", kl: float = 0.0, base_kl: float = 1.0) -> Outcome:
    return Outcome(answer, reference, base, truth, kl, base_kl, stored=10, over=100)


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


def test_kl_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="same vocabulary"):
        kl_divergence([0.0, 1.0], [0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="non-empty vector"):
        kl_divergence([], [])


def test_wilson_against_published_values() -> None:
    # Newcombe (1998), table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for right, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)
    with pytest.raises(ValueError, match="n must be >= 1"):
        wilson(0, 0)


def test_eta_by_hand_and_its_floor() -> None:
    assert eta([0.1, 0.3], [1.0, 3.0]) == pytest.approx(0.9)
    assert eta([4.0], [2.0]) == pytest.approx(-1.0)
    assert eta([0.0, 0.0], [0.019, 0.0]) is None
    assert eta([0.0, 0.0], [0.02, 0.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one"):
        eta([], [])


def test_flips_and_harm_by_hand() -> None:
    outcomes = [
        made("red", "red", "blue"),  # a flip, restored
        made("blue", "red", "blue"),  # a flip, not restored: harm
        made("red", "blue", "red"),  # a flip of a wrong answer; right, but not what re-prefill says
        made("pink", "red", "red"),  # no flip, but the arm breaks it: harm
        made("blue", "blue", "blue"),  # all wrong: no harm
    ]
    assert flip_recover(outcomes) == (pytest.approx(1 / 3), 3)
    assert harm_rate(outcomes) == pytest.approx(2 / 5)
    assert flip_recover(outcomes[-1:]) == (None, 0)


def test_paired_difference_by_hand() -> None:
    outcomes = [made("red", "red", "red"), made("blue", "red", "red"), made("red", "blue", "red"), made("x", "y", "z")]
    mean, low, high = paired_difference(outcomes)
    half = 1.959963984540054 * math.sqrt((1 + 1) / 3) / 2
    assert (mean, low, high) == pytest.approx((0.0, -half, half))


def test_cell_holds_every_figure() -> None:
    figures = cell([made("red", "red", "blue", kl=0.1), made("blue", "red", "red", kl=0.3)])
    assert figures["n"] == 2
    assert figures["accuracy"] == 0.5
    assert figures["kl"] == pytest.approx(0.2)
    assert figures["kl_p99"] == pytest.approx(0.298)
    assert figures["eta"] == pytest.approx(0.8)
    assert figures["bytes_share"] == pytest.approx(0.1)
    assert figures["delta"] == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="at least one sample"):
        cell([])
