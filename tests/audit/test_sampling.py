"""Draws are random, reproducible, more frequent at first and for what is new, and blind to rhythms."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import binomtest

from ctxwin.audit.sampling import FIRST, SPARSE, Sampler


def test_audits_fall_on_every_phase_of_a_periodic_stream() -> None:
    """Every 50th answer would fall on one phase of a stream of period 2, 5 or 10."""
    sampler = Sampler(seed=1)
    audited = [i for i in range(50_000) if sampler.draw(0.02)]
    assert binomtest(len(audited), 50_000, 0.02).pvalue > 1e-4
    for period in (2, 5, 10):
        phases = Counter(i % period for i in audited)
        assert all(binomtest(phases[p], len(audited), 1 / period).pvalue > 1e-4 for p in range(period))


def test_a_seed_gives_the_same_draws() -> None:
    first, second, other = Sampler(3), Sampler(3), Sampler(4)
    draws = [sampler.draw(0.5) for sampler in (first, second, other) for _ in range(64)]
    assert draws[:64] == draws[64:128] != draws[128:]


def test_the_first_answers_of_a_kind_are_audited_and_ever_fewer() -> None:
    sampler = Sampler(0)
    rates = [sampler.rate("multi", 0.02) for _ in range(5000)]
    assert rates[0] == 1
    assert rates[FIRST] == pytest.approx(0.5, abs=0.01)
    assert rates[-1] == 0.02
    assert sampler.rate("order", 0.02) == 1  # the mix has changed
    assert sampler.rate("multi", 0.02) == 0.02
    assert sampler.rate("order", 0.0) == 0


def test_trials_of_a_unit_reach_far_into_it() -> None:
    sampler = Sampler(0)
    tried = [sum(sampler.is_trial("survivor", f"window {w}", f"{w} {i}") for i in range(100)) for w in range(200)]
    assert min(tried) >= SPARSE
    assert 8 <= sum(tried) / len(tried) <= 11  # 2 + 2 log(100 / 2)


def test_the_same_question_over_the_same_chunks_is_a_trial_of_one_unit_only() -> None:
    sampler = Sampler(0)
    assert sampler.is_trial("survivor", "one", "asked")
    assert not any(sampler.is_trial("survivor", f"copy {i}", "asked") for i in range(50))
    assert sampler.is_trial("blind", "copy 1", "asked")
