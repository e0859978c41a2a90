from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ctxwin_evals.items import Scored
from ctxwin_evals.metrics import Setting, best_patched, eta, matched, paired
from ctxwin_evals.samples import Sample, Samples, open_samples
from ctxwin_evals.score import Scorer, Table, scores
from eval_rows import CONFIG, Words, row, sweep, unserved


def run(folder: Path, rows: list[Sample], config: dict[str, Any] = CONFIG) -> Samples:
    with open_samples(folder, config) as samples:
        samples.add(rows)
    return samples


def test_scores_by_hand(tmp_path: Path) -> None:
    rows = [row("patched:8", i, "Pink" if i == 2 else "Red", stored=100, kl=0.1) for i in range(4)]
    samples = run(tmp_path, [*rows, unserved("patched:8", 4), row("patched:8", 5, "red or blue", kl=0.5)])
    made = scores(samples, task_of=Words)["arms"]["patched:8"]["made/words"]
    assert (made["n"], made["unscored"], made["unparsed"], made["accuracy"]) == (5, 1, 1, 0.75)
    assert made["unscored_why"] == {"no other order exists": 1}
    assert made["eta"] == pytest.approx(1 - (4 * 0.1 + 0.5) / 10)
    assert made["flip_recover"] == 0.6
    assert made["harm_rate"] == 0.25
    assert made["bytes_share"] == made["spent_share"] == pytest.approx(400 / 5000)
    assert made["by_frames"] == {"2": {"n": 2, "accuracy": 0.5}, "3": {"n": 3, "accuracy": 1.0}}
    assert made["official"] == {"strict": pytest.approx(3 / 6)}, "what was not served is an empty answer there"
    assert scores(samples, n=2, task_of=Words)["arms"]["patched:8"]["made/words"]["accuracy"] == 1.0


def test_a_result_says_what_was_run(tmp_path: Path) -> None:
    result = scores(run(tmp_path, [row("blind", 0), row("blind", 0, task="made/control")]), task_of=Words)
    assert result["suite"] == "made"
    assert result["config"] == {k: v for k, v in CONFIG.items() if k != "format"}
    assert result["basis_bytes"] == 0
    assert result["tasks"]["made/control"] == {"about": "words", "setting": "window", "control": True, "version": 1}
    json.dumps(result, allow_nan=False)


def test_figures_of_an_arm_are_averaged_whatever_their_name() -> None:
    rows = [row("orbit:2", 0, orders=2, moved=0.5), row("orbit:2", 1, orders=5), row("orbit:2", 2)]
    made = Table(rows, Scorer(Words)).arms()["orbit:2"]["made/words"]
    assert made["own"] == {"orders": 3.5, "moved": 0.5}
    assert (made["tokens"], made["computed"], made["forwards"]) == (100, 0, 0)


def test_layers_and_grid() -> None:
    made = Table(sweep(10), Scorer(Words)).arms()
    assert made["patched:1"]["made/words"]["by_layer"] == pytest.approx([0.0, 0.45, 1.0])
    grid = made["blind"]["made/words"]["grid"]
    assert sum(cell["n"] for cell in grid) == 10
    # Lengths 500, 1000, ..., 3500 in a cycle of 7 items; item 0 alone with item 7 is under 1000.
    assert sum(cell["n"] for cell in grid if cell["length"] == 0) == 2
    assert sum(cell["n"] for cell in grid if cell["length"] == 2000) == 4
    # A needle in two places counts at the middle: 0.1 and 1.0 is 0.55, the third of five bins.
    assert {cell["depth"] for cell in grid} == {0, 1, 2}
    with pytest.raises(ValueError, match="one model's layers"):
        Table([row("blind", 0, by_layer=[1.0]), row("blind", 1, by_layer=[1.0, 2.0])], Scorer(Words)).arms()


def test_nothing_scored_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one scored sample"):
        Table([], Scorer(Words))
    with pytest.raises(ValueError, match="at least one scored sample"):
        Table([unserved("orbit:2", 0)], Scorer(Words))
    with pytest.raises(ValueError, match="must hold samples, got none"):
        scores(run(tmp_path, []), task_of=Words)


def test_unknown_arms_and_missing_clusters_are_errors(tmp_path: Path) -> None:
    samples = run(tmp_path, [row("blind", 0)])
    with pytest.raises(ValueError, match="samples of patched:8"):
        scores(samples, ["patched:8"], task_of=Words)
    with pytest.raises(
        ValueError, match=f"{tmp_path} must hold samples of patched:8 to compare with, got \\['blind'\\]"
    ):
        scores(samples, against="patched:8", task_of=Words)
    with pytest.raises(ValueError, match="sample 0 of 'made/words' must name its cluster"):
        Table([row("blind", 0, cluster="")], Scorer(Words))
    with pytest.raises(ValueError, match="unscored: no other order"):
        Scorer(Words).outcome(unserved("orbit:2", 0))


def test_an_arm_that_served_nothing_is_named_with_nothing(tmp_path: Path) -> None:
    result = scores(run(tmp_path, [row("blind", 0), unserved("orbit:2", 0)]), task_of=Words)
    assert result["arms"]["orbit:2"] == {}
    assert list(result["arms"]) == ["blind", "orbit:2"]


def test_answers_that_cannot_be_read_agree_only_where_they_are_the_same() -> None:
    """The rule reads nothing ("") in each, so that by it alone garbage would agree with other garbage."""

    class Letters(Words):
        def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
            return Scored(1.0, answer) if len(answer) == 1 else Scored(None, "")

    said = [("no idea", "no idea"), ("no idea", "what?"), ("A", "what?"), ("A", "A")]
    rows = [row("first_k:2", i, arm, reference=exact, base="zz") for i, (arm, exact) in enumerate(said)]
    figures = Table(rows, Scorer(Letters)).arms()["first_k:2"]["made/words"]
    assert figures["agreement"] == 0.5 and figures["flips"] == 4 and figures["flip_recover"] == 0.5
    assert figures["unparsed"] == 2


def test_every_text_is_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    score = Words.score

    def spy(self: Words, answer: str, target: Any, meta: Any) -> Any:
        seen.append(answer)
        return score(self, answer, target, meta)

    monkeypatch.setattr(Words, "score", spy)
    Table([row(arm, 0) for arm in ("blind", "patched:1", "patched:2")], Scorer(Words)).arms()
    assert sorted(seen) == ["blue", "red"]


def outcomes(rows: list[Sample], arm: str) -> dict[int, Any]:
    return Table(rows, Scorer(Words)).outcomes["made/words", arm]


def test_paired_by_hand() -> None:
    mine = [row("a", i, "red" if i < 3 else "blue", kl=0.1) for i in range(6)]
    theirs = [row("b", i, "red" if i < 1 or i == 5 else "blue", kl=0.4) for i in range(1, 7)]
    found = paired(outcomes(mine, "a"), outcomes(theirs, "b"))
    assert found is not None
    assert (found["n"], found["gained"], found["lost"]) == (5, 2, 1)  # items 1..5 are shared
    assert found["accuracy"] == pytest.approx(0.2)
    assert found["kl"] == pytest.approx(-0.3)
    assert found["kl_ci95"] == pytest.approx([-0.3, -0.3])
    assert found["eta"] == pytest.approx(0.15)
    assert found["mcnemar_p"] == 1.0
    assert found["accuracy_ci95"][0] < 0.2 < found["accuracy_ci95"][1]
    assert paired(outcomes(mine, "a"), outcomes([row("b", 9)], "b")) is None


def test_mcnemar_is_not_claimed_for_clustered_or_graded_answers() -> None:
    rows = sweep(20, per_cluster=2)
    found = paired(outcomes(rows, "patched:8"), outcomes(rows, "blind"))
    assert found is not None
    assert found["gained"] > 10
    assert found["mcnemar_p"] is None
    assert found["accuracy_ci95"] is not None


def test_the_best_patch_is_the_right_and_then_the_small_one() -> None:
    cells = {
        "blind": {"accuracy": 1.0, "bytes_share": 0.0},
        "patched:1": {"accuracy": 0.5, "bytes_share": 0.01},
        "patched:4": {"accuracy": 0.9, "bytes_share": 0.04},
        "patched:8": {"accuracy": 0.9, "bytes_share": 0.08},
        "patched:9": {"accuracy": None, "bytes_share": 0.08},
    }
    assert best_patched(cells) == "patched:4"
    assert best_patched({"blind": cells["blind"]}) is None


def test_results_pair_every_arm_with_the_chosen_one(tmp_path: Path) -> None:
    samples = run(tmp_path, [*sweep(), row("blind", 0, task="made/other")])
    found = scores(samples, task_of=Words)
    assert found["paired"]["made/words"]["against"] == "patched:8"
    assert set(found["paired"]["made/words"]["arms"]) == set(found["arms"]) - {"patched:8"}
    assert "made/other" not in found["paired"]  # it has no patch to be paired with
    chosen = scores(samples, against="blind", task_of=Words)["paired"]
    assert chosen["made/other"] == {"against": "blind", "arms": {}}
    delta = chosen["made/words"]["arms"]["reprefill"]["accuracy"]
    assert delta == pytest.approx(found["arms"]["reprefill"]["made/words"]["accuracy"] - 0.0)


def test_token_arms_are_compared_at_the_bytes_of_a_patch() -> None:
    rows = sweep(60)
    blind = {o.row.base_kl for o in outcomes(rows, "blind").values()}
    assert len(blind) == 60
    patch = outcomes(rows, "patched:4")
    token = [Setting(f"first_k:{k}", k / 100, outcomes(rows, f"first_k:{k}")) for k in (20, 2, 6)]
    found = matched(patch, 0.04, token)
    assert found is not None
    assert (found["settings"], found["interpolated"]) == (["first_k:2", "first_k:6"], True)
    assert found["shares"] == [0.02, 0.06]
    base = [o.row.base_kl for o in patch.values()]
    etas = [eta([o.row.kl for o in s.outcomes.values()], base) for s in token]
    mine = eta([o.row.kl for o in patch.values()], base)
    assert mine is not None and None not in etas
    middle = (etas[1] + etas[2]) / 2  # type: ignore[operator]
    assert found["eta"] == pytest.approx(mine - middle)
    assert found["above"]["eta"] == pytest.approx(mine - etas[2])  # type: ignore[operator]
    assert found["eta_ci95"][0] <= found["eta"] <= found["eta_ci95"][1]
    right = {
        name: sum(o.answer.score or 0 for o in s.outcomes.values()) / 60 for name, s in zip("cab", token, strict=True)
    }
    ours = sum(o.answer.score or 0 for o in patch.values()) / 60
    assert found["accuracy"] == pytest.approx(ours - (right["a"] + right["b"]) / 2)


def test_no_lead_is_made_of_rounding() -> None:
    """An answer of a third in both settings is a third between them."""

    class Thirds(Words):
        def score(self, answer: str, target: Any, meta: Mapping[str, Any]) -> Scored:
            return Scored(answer.count("!") / 3, answer)

    rows = [row(arm, i, "!" * (1 + i % 3)) for arm in ("patched:4", "first_k:2", "first_k:6") for i in range(12)]
    of = {arm: found for (_, arm), found in Table(rows, Scorer(Thirds)).outcomes.items()}
    for low, high, share in ((0.02, 0.06, 0.0537), (0.0113, 0.0999, 0.0345), (0.0207, 0.1034, 0.0359)):
        settings = [Setting("first_k:2", low, of["first_k:2"]), Setting("first_k:6", high, of["first_k:6"])]
        found = matched(of["patched:4"], share, settings)
        assert found is not None and found["accuracy"] == 0.0 and found["accuracy_ci95"] is not None
        assert found["accuracy_ci95"][0] < 0 < found["accuracy_ci95"][1]


def test_below_the_smallest_setting_is_the_base_and_above_the_largest_nothing() -> None:
    rows = sweep(30)
    patch = outcomes(rows, "patched:1")
    token = [Setting("first_k:20", 0.2, outcomes(rows, "first_k:20"))]
    low = matched(patch, 0.05, token)
    assert low is not None and low["settings"] == ["base", "first_k:20"]
    want = (
        sum(b.answer.score or 0 for b in patch.values()) / 30
        - 0.25 * sum(o.answer.score or 0 for o in token[0].outcomes.values()) / 30
    )
    assert low["accuracy"] == pytest.approx(want)
    exact = matched(patch, 0.2, token)
    assert exact is not None and not exact["interpolated"]
    assert exact["eta"] == pytest.approx(exact["above"]["eta"])
    high = matched(patch, 0.5, token)
    assert high is not None and (high["settings"], high["above"]) == (["first_k:20", None], None)
    assert high["eta"] == pytest.approx(exact["eta"])


def test_a_run_compares_all_patches_with_all_token_arms(tmp_path: Path) -> None:
    # The first chunk is never patched: patches are applied to half of what token arms are counted over here.
    rows = [r.model_copy(update={"over": 500}) if r.arm.startswith("patched") else r for r in sweep(20)]
    rows += [
        row("h2o:0.1@prompt", i, computed=80, kv_share=0.1) for i in range(20)
    ]  # computes, but not instead of a patch
    result = scores(run(tmp_path, rows), task_of=Words)
    cells = {arm: tasks["made/words"] for arm, tasks in result["arms"].items()}
    assert cells["patched:8"]["bytes_share"] == cells["patched:8"]["spent_share"] == pytest.approx(80 / 500)
    assert cells["first_k:6"]["recomputed_share"] == pytest.approx(0.06)
    assert cells["first_k:6"]["spent_share"] == pytest.approx(0.12)  # 60 bytes beside patches of 80 over 500
    found = result["matched"]["made/words"]
    assert [(f["patch"], f["family"]) for f in found] == [(f"patched:{m}", "first_k") for m in (1, 4, 8)]
    assert found[2]["settings"] == ["first_k:6", "first_k:20"]
    assert found[2]["shares"] == pytest.approx([0.12, 0.4])


def test_what_only_prepares_a_choice_costs_work_and_no_bytes(tmp_path: Path) -> None:
    """CacheBlend's first layer runs in full and replaces nothing: a quarter of a model of four layers."""
    rows = [row("patched:1", i, stored=100, over=1000) for i in range(4)]
    rows += [row("cacheblend:0.1", i, over=1000, recomputed=0.325, renewed=0.075) for i in range(4)]
    cells = {arm: tasks["made/words"] for arm, tasks in scores(run(tmp_path, rows), task_of=Words)["arms"].items()}
    assert cells["cacheblend:0.1"]["recomputed_share"] == pytest.approx(0.325)
    assert cells["cacheblend:0.1"]["spent_share"] == pytest.approx(0.075)
