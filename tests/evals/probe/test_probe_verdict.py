"""The statistics of a verdict, on answers made up for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ctxwin.kv.deficit import Deficit
from ctxwin_evals.probe.contexts import normal
from ctxwin_evals.probe.reading import Competence, Reading, addressing, competence
from ctxwin_evals.probe.structure import energy_ranks, functional_rank
from ctxwin_evals.probe.verdict import (
    TRIES,
    Judgement,
    Limits,
    Setting,
    Summary,
    candidates,
    cheapest,
    judge,
    proven,
    sentence,
    smallest_safe,
    summary,
    survivor_mode,
    survivors_sentence,
    with_margin,
)
from ctxwin_evals.stats import Interval, share_interval
from eval_rows import Words, row

READS = [Competence("cross", 48, True, 0.5, 0.2, 1.0, 0.3, 0.4, moved=2.0)]


def heard(arm: str, flips: Sequence[bool], kl: float = 0.001, kind: str = "cross") -> Summary:
    """Figures of answers, some of which are other than re-prefill's."""
    rows = [
        row(arm, i, "blue" if flip else "red", kl=kl, forced_kl=kl * (1 + i % 3), base_kl=2.0, base_forced_kl=4.0,
            meta={"kind": kind}, stored=10, over=100)
        for i, flip in enumerate(flips)
    ]  # fmt: skip
    made = summary(rows, Words("made/words"))
    assert made is not None
    return made


def judged(found: Sequence[Competence], blind: Summary, noise: Summary, limits: Limits, *, last: bool) -> Judgement:
    return judge(found, {"cross": blind}, {"cross": noise}, limits, last=last)


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
    assert judged(READS, heard("blind", share(200, 150), 2.0), noise, Limits(), last=False).finding == "binds"
    still = heard("blind", share(200, 1))
    assert judged(READS, still, noise, Limits(), last=False).finding == "unclear"
    assert judged(READS, still, noise, Limits(), last=True).finding == "chains"


@pytest.mark.parametrize(("n", "flipped", "kl"), [(30, 0, 0.001), (200, 12, 0.001), (200, 1, 0.2)])
def test_too_few_answers_or_a_loss_that_moves_them_is_not_called_safe(n: int, flipped: int, kl: float) -> None:
    noise = heard("stepwise", share(n, 0), 0.0)
    found = judged(READS, heard("blind", share(n, flipped), kl), noise, Limits(), last=True)
    assert found.finding == "unclear"
    assert "keep exact" in sentence(found, None, heard("blind", share(n, flipped), kl))


def test_flips_that_arithmetic_makes_too_are_not_counted_against_reuse() -> None:
    blind = heard("blind", share(400, 40))
    assert judged(READS, blind, heard("stepwise", share(400, 0)), Limits(), last=True).finding == "binds"
    assert judged(READS, blind, heard("stepwise", share(400, 40)), Limits(), last=True).finding == "chains"


def test_without_reading_there_is_no_verdict_whatever_changes() -> None:
    blind_to_it = [replace(READS[0], reads=False), replace(READS[0], kind="one")]
    for flips in (0, 200):
        found = judged(
            blind_to_it, heard("blind", share(200, flips)), heard("stepwise", share(200, 0)), Limits(), last=True
        )
        assert found.finding == "unread" and found.evidence is None
        assert "depend on one chunk at most" in sentence(found, None, None)
    nothing = judged(blind_to_it[:1], heard("blind", share(9, 9)), heard("stepwise", share(9, 0)), Limits(), last=True)
    assert "do not depend on the context" in sentence(nothing, None, None)


def test_the_users_own_questions_count_and_make_no_loss_of_other_ones_safe() -> None:
    def found(yours: int, cross: int, reads: Sequence[Competence] = READS) -> tuple[str, str | None]:
        blind = {
            "cross": heard("blind", share(200, cross), 0.001 + cross / 50),
            "yours": heard("blind", share(200, yours)),
        }
        noise = heard("stepwise", share(200, 0))
        made = judge(reads, blind, {"cross": noise, "yours": noise}, Limits(), last=True)  # type: ignore[arg-type]
        return made.finding, made.evidence

    assert found(0, 0) == ("chains", "yours")
    assert found(0, 180) == ("binds", "cross"), "a profile is for every question"
    assert found(180, 0) == found(180, 180) == ("binds", "yours")
    assert found(0, 10) == ("unclear", "cross")
    own = Competence("yours", 48, True, moved=2.0, changed=0.5, changed_low=0.4)
    unread = [replace(READS[0], reads=False), own]
    assert found(180, 0, unread) == ("binds", "yours"), "also where the generic ones cannot be read"
    assert found(0, 180, unread) == ("chains", "yours")
    assert found(180, 180, [unread[0], replace(own, reads=False)]) == ("unread", None)


def test_own_questions_are_read_where_swapping_a_chunk_changes_their_answers() -> None:
    def asked(changed: int) -> Competence:
        made = [Reading(str(i), "yours", (), (0.1, 0.2), None, None, i < changed) for i in range(48)]
        found = competence(made, "yours")
        assert found is not None and found.moved == pytest.approx(0.15)
        return found

    assert asked(24).reads and not asked(0).reads
    assert not asked(6).reads, "one in eight may be less than one in ten"


def test_what_is_lost_is_held_against_what_the_same_questions_owe_to_their_context() -> None:
    reads = [replace(READS[0], moved=0.04), replace(READS[0], kind="one", moved=4.0)]
    blind, noise = heard("blind", share(200, 1), 0.01), heard("stepwise", share(200, 0), 0.0)
    found = judged(reads, blind, noise, Limits(), last=True)
    assert found.finding == "unclear" and "swapping a needed chunk moves it by 0.04" in found.reasons[1]
    assert judged([replace(reads[0], moved=4.0)], blind, noise, Limits(), last=True).finding == "chains"


def slid(
    slides: int,
    window: Interval,
    stream: Interval = (0.0, 0.01),
    removal: tuple[float, Interval | None, Interval] | None = None,
) -> dict[str, object]:
    """A row of `survival`; of removal patches the changed answers, the interval of their gain, and that of the answers."""
    shares = {"other_than_window": sum(window) / 2, "other_than_stream": sum(stream) / 2, "other_than_both": 0.0}
    stricter = "window" if sum(window) >= sum(stream) else "stream"
    intervals = {"other_than_window_ci95": window, "other_than_stream_ci95": stream}
    patched = removal and {"flips": removal[0], "eta_ci95": removal[1], "flips_ci95": removal[2]}
    return {"slides": slides, "n": 80, "stricter": stricter, "removal": patched, **shares, **intervals}


def test_survivors_are_kept_where_one_slide_is_safe_by_the_stricter_reference_and_no_later_one_is_seen_to_lose() -> (
    None
):
    def kept(*rows: dict[str, object]) -> bool:
        return survivor_mode(rows, Limits()) == "keep"

    assert kept(slid(1, (0.0, 0.04)), slid(8, (0.0, 0.2))), "few windows slide that far"
    assert not kept(slid(1, (0.0, 0.04)), slid(8, (0.3, 0.7)))
    assert not kept(slid(1, (0.0, 0.06)))
    assert not kept(slid(1, (0.0, 0.04), (0.2, 0.4))), "one reference that agrees is not enough"
    assert not kept(slid(2, (0.0, 0.01))) and not kept()
    said = survivors_sentence([slid(1, (0.3, 0.5))], "refresh")
    assert "40.0% of 80 questions" in said and "the former is the stricter reference" in said


def test_removal_patches_are_proposed_where_survivors_lose_and_patches_gain_and_are_safe() -> None:
    def mode(removal: tuple[float, Interval | None, Interval] | None, *more: dict[str, object]) -> str:
        return survivor_mode([slid(1, (0.1, 0.3), removal=removal), *more], Limits())

    good = (0.01, (0.5, 0.9), (0.0, 0.04))
    assert mode(good) == "removal"
    assert mode(None) == "refresh" == mode((0.01, None, (0.0, 0.04)))
    assert mode((0.01, (-0.1, 0.5), (0.0, 0.04))) == "refresh", "it may gain nothing"
    assert mode((0.03, (0.5, 0.9), (0.0, 0.07))) == "refresh", "too few answers to call it safe"
    assert mode(good, slid(4, (0.1, 0.3), removal=(0.3, (0.5, 0.9), (0.2, 0.5)))) == "refresh", "further slides lose"
    assert mode(good, slid(4, (0.1, 0.3), removal=(0.1, (0.5, 0.9), (0.0, 0.3)))) == "removal"
    assert survivor_mode([slid(1, (0.0, 0.04), removal=good)], Limits()) == "keep", "what costs nothing comes first"
    said = survivors_sentence([slid(1, (0.1, 0.3), removal=good)], "removal")
    assert "removal patches, formed while the engine idles" in said and "with removal patches 1.0%" in said


def test_a_setting_is_safe_by_the_ends_of_its_intervals() -> None:
    def tried(flipped: int, kl: float) -> Setting:
        made = heard("patched:8@deep", share(96, flipped), kl)
        return proven(8, "deep", "quantized", made, made, 0.0, Limits())

    assert tried(0, 0.001).safe and tried(0, 0.001).share == pytest.approx(0.1)
    said = sentence(Judgement("binds", "cross"), tried(0, 0.001), heard("blind", share(96, 96)))
    assert said.endswith("quantized patches of the deep layers are safe at 10.0% of the bytes")
    assert not tried(2, 0.001).safe, "2 of 96 may be more than 5 %"
    assert not tried(0, 0.4).safe, "a tenth of the loss is left"


def test_the_smallest_setting_below_which_one_fails_is_found_from_above() -> None:
    tried = [
        Setting(r, "deep", r / 100, safe, {}) for r, safe in ((3, True), (4, False), (6, True), (8, True), (11, True))
    ]
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


def test_the_layers_that_windows_serve_are_the_cheapest_range_that_is_enough() -> None:
    curve = [
        {"way": way, "rank": rank, "eta": eta, "flips": 0.0, "share": share}
        for way, rank, eta, share in (
            ("joint", 4, 0.99, 0.2), ("deep", 8, 0.99, 0.15), ("quantized", 4, 0.99, 0.12), ("75-100", 64, 0.1, 0.05),
            ("per_layer", 2, 0.99, 0.01), ("quantized+25-100", 2, 0.99, 0.05),
        )
    ]  # fmt: skip
    last = ("quantized", 64)
    assert candidates(curve, Limits(), last) == [("quantized+25-100", 2), ("quantized", 4)]
    assert candidates(curve[5:], Limits(), last) == [("quantized+25-100", 2), last], "the second leaves out no layer"
    assert candidates(curve[:5], Limits(), last) == [("quantized", 4)]
    assert candidates(curve[:2], Limits(), last) == [last], "joint factors are not chosen, however cheap"
    found = Setting(4, (0.25, 1.0), 0.12, True, {})
    blind = {"flips": 0.5, "flips_ci95": (0.4, 0.6)}
    assert "layers from 25% to 100% of the depth" in sentence(Judgement("binds", "cross"), found, blind)  # type: ignore[arg-type]


def test_two_tries_prove_what_is_not_safe_in_one_probe_of_twenty_at_most() -> None:
    """Every setting changes exactly as many answers as are allowed; ranks of one way share most of their errors."""
    rng, limits, wrong, runs = np.random.default_rng(5), Limits(), 0, 600
    for _ in range(runs):
        for _attempt in range(TRIES):
            shared = rng.random(240) < 0.8 * limits.flips
            answers = [shared | (rng.random(240) < 0.2 * limits.flips / (1 - 0.8 * limits.flips)) for _ in range(4)]
            settings = []
            for rank, changed in zip((4, 6, 8, 11), answers, strict=True):
                low, high = share_interval(1 - changed.astype(float), [str(i) for i in range(240)])
                figures = {"share": rank / 100, "eta": 0.99, "eta_ci95": (0.97, 1.0), "flips_ci95": (1 - high, 1 - low)}
                figures["flips"] = changed.mean()
                settings.append(proven(rank, "all", "quantized", figures, figures, 0.0, limits))  # type: ignore[arg-type]
            if smallest_safe(settings) is not None:
                wrong += 1
                break
    assert 0 < wrong <= runs * TRIES * 0.025


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
