"""Strategies judged on passages: what is measured is what the evals' arms serve, and verdicts err as seldom as promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.audit import Options
from ctxwin.audit.confidence import units_like, units_needed
from ctxwin.audit.harm import CAP, Harm, value_of
from ctxwin.audit.replay import diverge
from ctxwin_evals.arms import parse_arm
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.generation import forced_logits
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item
from ctxwin_evals.patching import Patcher
from ctxwin_evals.probe.passages import (
    CHOOSING,
    NEXT,
    PLACED,
    OrderedTests,
    Passage,
    PassageReplays,
    Unit,
    Verdict,
    judge,
)
from engines.models import write_text_model

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

SYSTEM_PROMPT, BLOCK = "You read a manual.", 12
ORDER = ("patched:0.12", "survivor", "blind")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFEngine]:
    from ctxwin.engines.hf.engine import HFEngine

    with HFEngine(write_text_model(tmp_path_factory.mktemp("passages") / "text"), dtype="float32") as opened:
        yield opened


def drawn(engine: HFEngine, count: int, question: str = "") -> list[Passage]:
    """Passages of random words."""
    rng, words = (
        np.random.default_rng(7),
        engine.text_ids(" what color is the shape of a frame camera number now red blue"),
    )
    end = (PLACED + 1) * BLOCK
    rows = [[int(i) for i in rng.choice(words, end + 1 + NEXT)] for _ in range(count)]
    return [
        Passage(tuple(Chunk.tokens(row[at : at + BLOCK]) for at in range(0, end, BLOCK)), tuple(row[end:]), question)
        for row in rows
    ]


def nats_by_arm(engine: HFEngine, passage: Passage) -> dict[str, float]:
    """The same measure by the evals' batched decoder and arms."""
    decoder = Decoder(engine)
    item = Item(
        "text", 0, lambda: list(passage.chunks), PLACED + 1, tuple(range(1, PLACED + 1)), "", None, "0", "0", "0",
        before=tuple(range(PLACED + 1)), meta={"stream_window": PLACED},
    )  # fmt: skip
    group = Group(decoder, [item], Patcher(decoder.spec), SYSTEM_PROMPT)
    first, ids = engine.encode(Chunk.tokens(passage.following[:1])), passage.following[1:]

    def rows(arm: str) -> list[dict[int, float]]:
        served = parse_arm(arm).serve(group)[0]
        assert served is not None
        logits = forced_logits(decoder, group.memory([served.spans]), [first], group.begin, [ids])[0].log_softmax(-1)
        best = torch.topk(logits, 32, dim=-1)
        found = [dict(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        return [{**row, token: float(line[token])} for row, token, line in zip(found, ids, logits, strict=True)]

    exact = rows("reprefill")
    return {arm: diverge(exact, rows(arm), True).nats for arm in ("blind", "survivor")}


def test_a_passage_loses_what_the_arms_of_the_evals_lose_and_nothing_with_whole_patches(engine: HFEngine) -> None:
    passages = drawn(engine, 2)
    names = ["blind", "survivor", "patched:1", "removal:1", "patched:0.05"]
    replays = PassageReplays(engine, passages, SYSTEM_PROMPT)
    for index, passage in enumerate(passages):
        unit = replays.measure(index, names, True)
        nats = {name: harm.amount for name, (harm,) in unit.harms.items()}
        assert all(harm.kind == "text" for harms in unit.harms.values() for harm in harms)
        for arm, expected in nats_by_arm(engine, passage).items():
            assert nats[arm] == pytest.approx(expected, rel=0.02, abs=1e-5), arm
            assert nats[arm] > 1e-4, "something is lost"
        assert nats["patched:1"] < 0.1 * nats["blind"] and nats["removal:1"] < 0.1 * nats["survivor"]
        assert nats["patched:1"] < nats["patched:0.05"]
        assert unit.distances["cut"][0] < 1e-5 < unit.distances["references"][0]
        assert unit.distances["cut"][1] is None, "text that goes on has no value"
        assert unit.owed > nats["blind"]


def test_a_question_is_answered_as_a_window_does_and_judged_by_its_form(engine: HFEngine) -> None:
    question = "what color is it now"
    (passage,) = drawn(engine, 1, question)
    unit = PassageReplays(engine, [passage], SYSTEM_PROMPT, 4).measure(0, ["blind"])
    with Window(engine, SYSTEM_PROMPT, 1000, Fidelity("exact")) as window:
        window.extend(passage.chunks[1:])
        answer = window.ask(question, max_tokens=4)
    kind = "text" if value_of(answer.text, complete=len(answer.token_ids) < 4) is None else "scored"
    assert [harm.kind for harm in unit.harms["blind"]] == ["text", kind]


def test_a_strategy_is_safe_once_it_and_all_in_front_of_it_are_shown_to_be() -> None:
    options = Options()
    needed, scored = units_needed(options.excess_budget / CAP), units_needed(options.budget)
    tests, none = OrderedTests(ORDER, options), [Harm("text", -0.01)]
    for _ in range(needed):
        assert [tests.is_open(strategy) for strategy in ORDER] == [True, False, False], "one after the other"
        for strategy in ORDER[1:]:
            tests.add(strategy, none)
        tests.add(ORDER[0], [Harm("text", 0.3 * options.excess_budget)])
    assert not any(map(tests.is_safe, ORDER)), "the first is not shown yet"
    patched, survivor, _ = tests.rows()
    assert patched["units_like"] > needed == survivor["units_like"] and survivor["upper"] <= options.excess_budget
    for _ in range(patched["units_like"] - needed):
        assert not any(map(tests.is_safe, ORDER))
        tests.add(ORDER[0], [Harm("text", 0.3 * options.excess_budget)])
    assert all(map(tests.is_safe, ORDER)) and not any(map(tests.is_open, ORDER))
    both = OrderedTests(ORDER[:1], options)
    for _ in range(scored):
        assert not both.is_safe(ORDER[0]), "each kind of answer must be within its budget"
        both.add(ORDER[0], [*none, Harm("scored", 0.0)])
    assert both.is_safe(ORDER[0])


def test_what_is_given_up_ends_what_stands_behind_it() -> None:
    tests = OrderedTests(ORDER, Options())
    while tests.is_open("patched:0.12"):
        tests.add("patched:0.12", [Harm("text", CAP)])
    assert tests.is_given_up("patched:0.12") and not tests.is_open("survivor")
    assert tests.rows()[0]["units_like"] is None and tests.rows()[0]["share"] == 1
    assert units_like({1.0: 3}, 0.04) is None and units_like({0.0: 1}, 0.04) == units_needed(0.04)


@pytest.mark.parametrize("harmless", [0, 1])
@pytest.mark.parametrize("kind", ["rare", "even"])
def test_what_is_not_safe_is_seldom_called_safe(kind: str, harmless: int) -> None:
    """At 1.01 budgets, where it is hardest: no more often than 5 %, by an exact binomial test at 0.1 %."""
    streams, passages, mean = 40, 150, 1.01 * Options().excess_budget

    def is_wrong(rng: np.random.Generator) -> bool:
        tests = OrderedTests(ORDER, Options())
        for strategy in ORDER:
            for _ in range(passages):
                if not tests.is_open(strategy):
                    break
                nats = CAP * float(rng.random() < mean / CAP) if kind == "rare" else mean * int(rng.integers(5)) / 2
                tests.add(strategy, [Harm("text", 0.0 if ORDER.index(strategy) < harmless else nats)])
        return any(map(tests.is_safe, ORDER[harmless:]))

    wrong = sum(is_wrong(np.random.default_rng([harmless, stream])) for stream in range(streams))
    assert binomtest(wrong, streams, 0.05, alternative="greater").pvalue > 1e-3


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_fallback_adds_no_errors(share: float) -> None:
    """Patches are safe; survivors are not, and ``share`` of what they lose is lost behind removal patches, too."""
    streams, passages, lost = 60, 200, 1.01 * Options().excess_budget / CAP

    def is_wrong(rng: np.random.Generator) -> bool:
        tests = OrderedTests(ORDER, Options(), "removal:0.12")
        for strategy in (*ORDER, "removal:0.12"):
            for _ in range(passages):
                if not tests.is_open(strategy):
                    break
                harmed = 0.0 if strategy == ORDER[0] else lost * (share if strategy == "removal:0.12" else 1.0)
                tests.add(strategy, [Harm("text", CAP * float(rng.random() < harmed))])
        return tests.is_safe("survivor") or tests.is_safe("blind") or (share == 1 and tests.is_safe("removal:0.12"))

    wrong = sum(is_wrong(np.random.default_rng([7, stream])) for stream in range(streams))
    assert binomtest(wrong, streams, 0.05, alternative="greater").pvalue > 1e-3


def test_a_fallback_is_tried_once_survivors_are_not_shown_to_be_safe_and_takes_stricter_evidence() -> None:
    options, removal, none = Options(), "removal:0.12", [Harm("text", 0.0)]
    tests = OrderedTests(ORDER[:2], options, removal)
    assert not tests.is_open(removal), "patches are not shown yet"
    while tests.is_open(ORDER[0]):
        tests.add(ORDER[0], none)
    assert tests.is_open("survivor") and tests.is_open(removal), "where the passages end before survivors are shown"
    while tests.is_open("survivor"):
        tests.add("survivor", [Harm("text", CAP)])
    while tests.is_open(removal):
        tests.add(removal, none)
    assert tests.is_safe(removal) and not tests.is_safe("survivor")
    first, _, last = tests.rows()
    assert first["units"] == units_needed(options.excess_budget / CAP) < last["units"]
    shown = OrderedTests(ORDER[:2], options, removal)
    for strategy in ORDER[:2]:
        while shown.is_open(strategy):
            shown.add(strategy, none)
    assert shown.is_safe("survivor") and not shown.is_open(removal), "nothing is left to try"


def scripted(
    owed: float = 1.0, floor: float = 0.0, later: float | None = None, **nats: float
) -> tuple[Callable[..., Unit], list[tuple[object, ...]]]:
    """Measurements that are the same on every passage, and what was asked for; ``p12``: patches of 12 % of the bytes.

    ``later``: what survivors lose on the passages that prove.
    """
    calls: list[tuple[object, ...]] = []
    names = {"p6": "patched:0.06", "p12": "patched:0.12", "p24": "patched:0.24", "p48": "patched:0.48"}
    by_name = {names.get(name, name.replace("removal", "removal:0.12")): value for name, value in nats.items()}

    def measure(index: int, strategies: Sequence[str], exactness: bool) -> Unit:
        assert exactness == (index < CHOOSING and len(strategies) > 1)
        calls.append((index, *strategies))
        harms = {s: (Harm("text", by_name.get(s, 0.001) + floor),) for s in strategies}
        if later is not None and not exactness and "survivor" in harms:
            harms["survivor"] = (Harm("text", later + floor),)
        return Unit(harms, {"cut": (floor, None), "references": (0.0, None)}, owed) if exactness else Unit(harms)

    return measure, calls


@pytest.mark.parametrize("floor", [0.0, 0.02])
def test_verdicts_and_what_auto_then_means(floor: float) -> None:
    def judged(**nats: float) -> Verdict:
        return judge(scripted(floor=floor, **nats)[0], 500, Options())

    bad = {"p6": 0.008, "blind": 0.2}
    found = judged(**bad, survivor=0.002)
    assert (found.finding, found.fidelity.mode, found.fidelity.bytes_share) == ("binds", "patched", 0.12)
    assert found.fidelity.survivors == "slid", "as after a slide, which is what was measured"
    assert found.floor.cut.mean == pytest.approx(floor) and found.tests.order == ("patched:0.12", "survivor")
    assert found.trials["blind"].rows()[0]["mean"] == pytest.approx(0.2), "so much that it need not be tried further"
    assert "patches of 12% of the bytes" in str(found)
    assert judged(**bad, survivor=0.03).fidelity.survivors == "removal"
    assert judged(**bad, survivor=0.03, removal=0.03).fidelity.survivors == "refresh"
    turned = judged(**bad, survivor=0.002, later=0.05)
    assert turned.tests.order[1] == "survivor" and turned.fidelity.survivors == "removal", (
        "patches where they were needed"
    )
    assert judged(**bad, survivor=0.002, later=0.05, removal=0.03).fidelity.survivors == "refresh"
    lost = judged(**{f"p{n}": 0.02 for n in (6, 12, 24, 48)}, blind=0.2)
    assert (lost.finding, lost.fidelity.mode) == ("binds", "exact") and "no patch was shown to be safe" in str(lost)
    assert lost.tests.order[0] == "patched:0.48", "what loses least is tried where nothing seems to be enough"
    chains = judged()
    assert (chains.finding, chains.fidelity.mode) == ("chains", "blind") and str(chains).startswith("chains")


def test_without_evidence_there_is_no_verdict() -> None:
    measure, calls = scripted(owed=0.1)
    unread = judge(measure, 500, Options())
    assert (unread.finding, unread.fidelity.mode, len(calls)) == ("unread", "exact", CHOOSING)
    assert "no verdict" in str(unread)
    few = judge(scripted()[0], 60, Options())
    assert (few.finding, few.fidelity.mode) == ("unclear", "exact") and few.tests.rows()[0][
        "units_like"
    ] > 60 - CHOOSING
    measure, calls = scripted()
    assert judge(measure, 500, Options(), seconds=0.0).finding == "unread", "one passage tells no spread"
    assert len(calls) == 1
    with pytest.raises(ValueError, match="at least 2"):
        judge(measure, 1, Options())


def test_a_verdict_is_described_in_json_with_its_evidence() -> None:
    import json

    measure, calls = scripted(blind=0.2)
    result = judge(measure, 500, Options(excess_budget=0.02), progress=lambda *_: None).describe()
    assert json.loads(json.dumps(result)) == result
    assert result["verdict"]["limits"] == {"budget": 0.01, "excess_budget": 0.02, "level": 0.95}
    assert result["fidelity"] == {"mode": "patched", "bytes_share": 0.06, "survivors": "slid"}
    assert [row["strategy"] for row in result["strategies"]] == ["patched:0.06", "survivor"]
    assert result["verdict"]["reasons"][0].startswith("patched:0.06 loses 0.001 nats") and len(result["trials"]) == 6
    assert [call[0] for call in calls[:CHOOSING]] == list(range(CHOOSING)) and {len(c) for c in calls[:CHOOSING]} == {7}
    proving = [(CHOOSING + i, row["strategy"]) for row in result["strategies"] for i in range(row["units"])]
    assert calls[CHOOSING:] == proving, "one strategy after the other, on the passages that did not choose"
