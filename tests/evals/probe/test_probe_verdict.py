"""The statistics of a verdict, on answers made up for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ctxwin.evals.probe.contexts import normal
from ctxwin.evals.probe.listen import Heard
from ctxwin.evals.probe.reading import Competence, Reading, addressing, competence
from ctxwin.evals.probe.structure import energy_ranks, functional_rank
from ctxwin.evals.probe.svg import _ticks as ticks
from ctxwin.evals.probe.svg import lines
from ctxwin.evals.probe.verdict import (
    Limits,
    Setting,
    cheapest,
    judge,
    may_keep,
    proven,
    sentence,
    smallest_safe,
    summary,
    with_margin,
)
from ctxwin.kv.deficit import Deficit

READS = [Competence("cross", 48, True, 0.5, 0.2, 1.0, 0.3, 0.4, moved=2.0)]


def heard(arm: str, flips: Sequence[bool], kl: float = 0.001, kind: str = "cross") -> list[Heard]:
    return [
        Heard(arm, str(i), kind, kl, kl * (1 + i % 3), flip, None, None, 10, 100)  # type: ignore[arg-type]
        for i, flip in enumerate(flips)
    ]


def share(n: int, flipped: int) -> list[bool]:
    return [i < flipped for i in range(n)]


def readings(rng: np.random.Generator, aimed: float, n: int = 48, places: int = 4) -> list[Reading]:
    """Answers moved by noise and by place, and ``aimed`` further by what they need."""
    made = []
    for i in range(n):
        needs = tuple(sorted(int(x) for x in rng.permutation(places)[:2]))
        moved = np.abs(rng.normal(size=places)) * np.array([0.1, 0.2, 0.3, 1.0])
        moved[list(needs)] += aimed
        made.append(Reading(str(i), "cross", needs, tuple(moved.tolist()), None, None))
    return made


def test_a_model_that_is_moved_by_place_only_passes_for_a_reader_hardly_ever() -> None:
    rng = np.random.default_rng(0)
    passed = sum(bool((c := competence(readings(rng, 0.0), "cross")) and c.reads) for _ in range(300))
    assert passed <= 3, "one in two hundred, at most"


def test_a_model_that_is_moved_by_what_is_needed_reads() -> None:
    rng = np.random.default_rng(1)
    found = competence(readings(rng, 1.0), "cross")
    assert found is not None and found.reads and found.addressed_low is not None and found.addressed_low > 0
    assert competence(readings(rng, 1.0), "one") is None


def test_being_moved_is_not_enough_where_the_truth_is_known() -> None:
    rng = np.random.default_rng(2)
    known = [replace(r, right=False, swapped=False) for r in readings(rng, 2.0)]
    never = competence(known, "cross")
    assert never is not None and not never.reads
    half = [replace(r, right=True, swapped=i % 2 == 0) for i, r in enumerate(known)]
    right = competence(half, "cross")
    assert right is not None and right.reads and right.accuracy == 1.0 and right.swapped == 0.5


def test_addressing_takes_out_what_a_place_does_to_every_answer() -> None:
    same = [Reading(str(i), "one", (i % 2,), (1.0, 4.0), None, None) for i in range(4)]
    np.testing.assert_allclose(addressing(same), 0.0, atol=1e-12)


def test_answers_that_change_bind_at_once_and_answers_that_do_not_only_at_the_end() -> None:
    noise = heard("stepwise", share(200, 0), 0.0)
    assert judge(READS, heard("blind", share(200, 150), 2.0), noise, Limits(), last=False).finding == "binds"
    still = heard("blind", share(200, 1))
    assert judge(READS, still, noise, Limits(), last=False).finding == "unclear"
    assert judge(READS, still, noise, Limits(), last=True).finding == "chains"


def test_ticks_of_a_chart_are_round() -> None:
    assert ticks(0, 3, log=False, whole=True) == [0, 1, 2, 3], "no half layers"
    assert ticks(1, 8, log=False, whole=True) == [2, 4, 6, 8]
    assert ticks(0, 0.75, log=False) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert ticks(0, 0.9, log=False)[-1] == pytest.approx(0.8)
    assert ticks(-6, -0.1, log=True) == [-6, -5, -4, -3, -2, -1]
    assert "<text x='58' y='" in lines("t", "x", "y", {"a": [(0, 1), (1, 128)]})
    assert ">100<" in lines("t", "x", "y", {"a": [(0, 1), (1, 128)]})


@pytest.mark.parametrize(("n", "flipped", "kl"), [(30, 0, 0.001), (200, 12, 0.001), (200, 1, 0.2)])
def test_too_few_answers_or_a_loss_that_moves_them_is_not_called_safe(n: int, flipped: int, kl: float) -> None:
    noise = heard("stepwise", share(n, 0), 0.0)
    found = judge(READS, heard("blind", share(n, flipped), kl), noise, Limits(), last=True)
    assert found.finding == "unclear"
    assert "keep exact" in sentence(found, None, summary(heard("blind", share(n, flipped), kl)))


def test_flips_that_arithmetic_makes_too_are_not_counted_against_reuse() -> None:
    blind = heard("blind", share(400, 40))
    assert judge(READS, blind, heard("stepwise", share(400, 0)), Limits(), last=True).finding == "binds"
    assert judge(READS, blind, heard("stepwise", share(400, 40)), Limits(), last=True).finding == "chains"


def test_without_reading_there_is_no_verdict_whatever_changes() -> None:
    blind_to_it = [replace(READS[0], reads=False), replace(READS[0], kind="one")]
    for flips in (0, 200):
        found = judge(
            blind_to_it, heard("blind", share(200, flips)), heard("stepwise", share(200, 0)), Limits(), last=True
        )
        assert found.finding == "unread" and found.evidence is None
        assert "depend on one chunk at most" in sentence(found, None, None)
    nothing = judge(blind_to_it[:1], heard("blind", share(9, 9)), heard("stepwise", share(9, 0)), Limits(), last=True)
    assert "do not depend on the context" in sentence(nothing, None, None)


def test_the_users_own_questions_count_and_make_no_loss_of_other_ones_safe() -> None:
    def judged(yours: int, cross: int) -> tuple[str, str | None]:
        mixed = heard("blind", share(200, cross), 0.001 + cross / 50) + heard("blind", share(200, yours), kind="yours")
        noise = heard("stepwise", share(200, 0)) + heard("stepwise", share(200, 0), kind="yours")
        found = judge(READS, mixed, noise, Limits(), last=True)
        return found.finding, found.evidence

    assert judged(0, 0) == ("chains", "yours")
    assert judged(0, 180) == ("binds", "cross"), "a profile is for every question"
    assert judged(180, 0) == judged(180, 180) == ("binds", "yours")
    assert judged(0, 10) == ("unclear", "cross")


def test_what_is_lost_is_held_against_what_the_same_questions_owe_to_their_context() -> None:
    reads = [replace(READS[0], moved=0.04), replace(READS[0], kind="one", moved=4.0)]
    blind, noise = heard("blind", share(200, 1), 0.01), heard("stepwise", share(200, 0), 0.0)
    found = judge(reads, blind, noise, Limits(), last=True)
    assert found.finding == "unclear" and "swapping a needed chunk moves it by 0.04" in found.reasons[1]
    assert judge([replace(reads[0], moved=4.0)], blind, noise, Limits(), last=True).finding == "chains"


def test_survivors_are_kept_where_one_slide_is_safe_and_no_later_one_is_seen_to_lose() -> None:
    def row(slides: int, low: float, high: float) -> dict[str, object]:
        return {"slides": slides, "other_than_both_ci95": [low, high]}

    assert may_keep([row(1, 0.0, 0.04), row(8, 0.0, 0.2)], Limits()), "few windows slide that far"
    assert not may_keep([row(1, 0.0, 0.04), row(8, 0.3, 0.7)], Limits())
    assert not may_keep([row(1, 0.0, 0.06)], Limits())
    assert not may_keep([row(2, 0.0, 0.01)], Limits()) and not may_keep([], Limits())


def test_a_setting_is_safe_by_the_ends_of_its_intervals() -> None:
    blind, noise = heard("blind", share(96, 80), 2.0), heard("stepwise", share(96, 0), 0.0)

    def tried(flipped: int, kl: float) -> Setting:
        return proven(8, "deep", heard("patched:8@deep", share(96, flipped), kl), blind, noise, "cross", Limits())

    assert tried(0, 0.001).safe and tried(0, 0.001).share == pytest.approx(0.1)
    assert not tried(2, 0.001).safe, "2 of 96 may be more than 5 %"
    assert not tried(0, 0.2).safe, "a tenth of the loss is left"


def test_the_smallest_setting_below_which_one_fails_is_found_from_above() -> None:
    tried = [Setting(r, "deep", r / 100, safe) for r, safe in ((3, True), (4, False), (6, True), (8, True), (11, True))]
    chosen = smallest_safe(tried)
    assert chosen is not None and chosen.rank == 6
    served = with_margin(chosen, tried)
    assert served is not None and served.rank == 11
    assert smallest_safe([replace(t, safe=t.rank < 11) for t in tried]) is None
    assert with_margin(None, tried) is None


def test_the_cheapest_way_is_the_smallest_share_that_is_enough() -> None:
    rows = [
        {"way": "joint", "rank": r, "share": r / 100, "eta": e, "flips": f, "flips_ci95": [0, 1]}
        for r, e, f in ((1, 0.5, 0.0), (2, 0.96, 0.1), (4, 0.97, 0.01), (8, 0.99, 0.0))
    ]
    best = cheapest(rows, Limits())["joint"]
    assert best is not None and best["rank"] == 4
    assert cheapest(rows[:1], Limits()) == {"joint": None}


def test_energy_ranks_of_a_deficit_of_known_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.linalg.qr(torch.randn(20, 3, generator=generator)).Q @ torch.randn(3, 24, generator=generator)
    k, v = torch.zeros(2, 20, 2, 6), torch.zeros(2, 20, 2, 6)
    k[1], v[1] = wide[:, :12].reshape(20, 2, 6), wide[:, 12:].reshape(20, 2, 6)
    lost = Deficit(k, v, torch.full((2,), 100.0, dtype=torch.float64), 1e-6)
    joint, single = energy_ranks(lost, 0.999999)
    assert (joint, single) == (3, [0, 3])
    one = torch.zeros(2, 20, 2, 6)
    one[0] = 1.0
    assert energy_ranks(Deficit(one, torch.zeros_like(one), lost.reference, 1e-6)) == (1, [1, 0])
    assert energy_ranks(Deficit(torch.zeros_like(one), torch.zeros_like(one), lost.reference, 1e-6)) == (0, [0, 0])


def test_functional_rank_is_where_the_plateau_begins() -> None:
    blind = np.full(20, 1.0)
    kls = np.stack([np.full(20, x) for x in (0.5, 0.2, 0.02, 0.01)])
    found = functional_rank((1, 4, 16, 64), kls, blind, [str(i) for i in range(20)])
    assert found == {"rank": 16, "ci95": [16, 16], "plateau": pytest.approx(0.01)}
    assert functional_rank((1, 2), np.ones((2, 20)), blind, [str(i) for i in range(20)]) is None


def test_an_answer_is_compared_by_its_first_word() -> None:
    assert [normal(x) for x in (" Red.", "yes, both do", "**Blue**", "", "'green'!")] == [
        "red",
        "yes",
        "blue",
        "",
        "green",
    ]


@pytest.mark.parametrize("bad", [{"flips": 0.0}, {"eta": 1.0}, {"lost": -0.1}])
def test_limits_are_shares(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Limits(**bad)
