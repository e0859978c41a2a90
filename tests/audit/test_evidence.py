"""The evidence: what promotes and what demotes, what lasts over restarts and processes, and what it is bound to."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ctxwin.audit import Options
from ctxwin.audit.confidence import units_needed
from ctxwin.audit.evidence import BEHIND, PAUSE, QUESTIONS, UNIT_TRIALS, EvidenceFile, Trial
from ctxwin.audit.harm import CAP, FLOOR_UNITS, Harm
from ctxwin.audit.record import Decision, Evidence, Record, records
from ctxwin.audit.strategies import STRATEGIES, attempt_share, error_of

NEEDED = units_needed(0.01, error_of("survivor", 0, 0.95))
NUMBERS = itertools.count()
KEPT, LOST = Harm("scored", 0.0), Harm("scored", 1.0)
TEXT_NEEDED = units_needed(0.01 / CAP, error_of("survivor", 0, 0.95))


def record(binding: str = "b" * 64, weights: str = "w") -> Record:
    return Record(binding=binding, weights=weights, model="m", engine="hf", dtype="float32")


def good(count: int, way: str = "survivor", *, served: bool = False, unit: str | None = None) -> list[Trial]:
    """Trials without harm, each of a unit of its own unless one is named."""
    names = (f"window {next(NUMBERS)}" if unit is None else unit for _ in range(count))
    return [Trial(way, KEPT, 1e-4, 10, 100, is_audit=served, unit=name) for name in names]


def bad(count: int, way: str = "survivor", *, served: bool = False, unit: str | None = None) -> list[Trial]:
    return [replace(t, harm=LOST, kl=2.0) for t in good(count, way, served=served, unit=unit)]


def text(count: int, excess: float, way: str = "survivor", *, served: bool = False) -> list[Trial]:
    """Trials of text that exceeds the floor by so many nats a token, each of a unit of its own."""
    return [replace(t, harm=Harm("text", excess)) for t in good(count, way, served=served)]


def test_a_way_is_promoted_once_the_bound_is_under_the_budget_and_not_before(tmp_path: Path) -> None:
    evidence = EvidenceFile(record(), tmp_path)
    assert evidence.take(good(NEEDED + BEHIND - 1)) == []
    assert evidence.promoted() is None
    (decision,) = evidence.take(good(1))
    assert (decision.verdict, decision.strategy, decision.units, decision.harms) == ("promoted", "survivor", NEEDED, 0)
    assert decision.upper <= 0.01
    assert evidence.promoted() == "survivor"
    assert "survivor" not in evidence.candidates()


def test_one_window_is_one_unit_however_much_is_asked() -> None:
    """With all its forks and restored snapshots, which have its `State.unit`."""
    evidence = EvidenceFile(record(), None)
    for _ in range(3000):
        assert evidence.take(good(1, unit="camera")) == []
    assert evidence.promoted() is None
    found = evidence.record.strategies["survivor"]
    assert (found.trials, found.units) == (UNIT_TRIALS, 1)
    assert not evidence.accepts_trial("survivor", "camera")
    assert evidence.accepts_trial("survivor", "another")


def test_a_units_harm_is_the_mean_of_its_trials_and_counts_in_the_order_of_its_beginning() -> None:
    evidence = EvidenceFile(record(), None)
    evidence.take([*good(3, unit="one"), *bad(1, unit="one"), *good(UNIT_TRIALS, unit="two")])
    assert evidence.record.strategies["survivor"].scored.units == {}  # the second is full, but the first may go on
    evidence.take(good(BEHIND - 1))
    assert evidence.record.strategies["survivor"].scored.units == {210: 1, 0: 1}  # of 840 parts
    evidence.take(bad(1, unit="one"))
    assert evidence.record.strategies["survivor"].scored.units[210] == 1  # it is too late
    assert evidence.record.strategies["survivor"].scored.harm == 1


def test_excess_counts_as_what_it_is_up_to_the_cap() -> None:
    evidence = EvidenceFile(record(), None)
    for excess, parts in ((0.1 * CAP, 84), (-0.1, 0), (2 * CAP, 840)):
        unit = f"exceeds by {excess}"
        evidence.take([replace(t, harm=Harm("text", excess)) for t in good(UNIT_TRIALS, unit=unit)])
        assert evidence.record.strategies["survivor"].text.units[parts] == 1


def test_text_is_judged_by_its_mean_excess_over_the_floor() -> None:
    for excess, outcome in ((-0.002, "promoted"), (0.004, "promoted"), (0.015, "rejected"), (0.2, "rejected")):
        evidence = EvidenceFile(record(), None)
        made = [d.verdict for _ in range(400) for d in evidence.take(text(1, excess))]
        assert made[:1] == [outcome], excess
    evidence = EvidenceFile(record(), None)
    assert evidence.take(text(TEXT_NEEDED + BEHIND - 1, -0.002)) == []
    (decision,) = evidence.take(text(1, -0.002))
    assert (decision.texts, decision.text_units, decision.trials) == (TEXT_NEEDED + BEHIND, TEXT_NEEDED, 0)
    assert decision.excess_upper <= 0.01 and "-0.002 nats a token beyond the floor" in str(decision)


def test_a_unit_may_exceed_here_and_fall_below_there() -> None:
    evidence = EvidenceFile(record(), None)
    for excess in (0.05, -0.05) * 4:
        evidence.take([replace(t, unit="one") for t in text(1, excess)])
    assert evidence.record.strategies["survivor"].text.units == {0: 1}


def test_each_kind_of_answer_that_occurred_must_be_shown_harmless() -> None:
    evidence = EvidenceFile(record(), None)
    evidence.take(text(1, 0.0))
    assert evidence.take(good(NEEDED + BEHIND)) == []
    assert [d.verdict for d in evidence.take(text(TEXT_NEEDED + BEHIND, 0.0))] == ["promoted"]
    mixed = EvidenceFile(record(), None)
    for _ in range(NEEDED + BEHIND):
        mixed.take([*good(1, unit=(unit := f"mixed {next(NUMBERS)}")), replace(text(1, 0.3)[0], unit=unit)])
    assert "promoted" not in {d.verdict for d in mixed.record.decisions}


def test_text_that_turns_is_demoted_though_values_are_kept() -> None:
    evidence = EvidenceFile(record(), None)
    evidence.take(good(NEEDED + BEHIND))
    made: list[Decision] = []
    answers = 0
    while not made:
        made = evidence.take([*good(1, served=True), *text(1, 0.3, served=True)])
        answers += 1
    assert made[0].verdict == "demoted" and answers <= 5


def test_the_floor_is_measured_on_few_units_and_kept(tmp_path: Path) -> None:
    evidence = EvidenceFile(record(), tmp_path)
    for number in range(2 * FLOOR_UNITS):
        unit = f"unit {number // 2}"
        assert evidence.lacks("cut", unit) == (number % 2 == 0)
        evidence.measure("cut", unit, 0.002 * (1 + number // 2 % 2), number // 2 % 4 == 0 if number % 4 < 2 else None)
    assert not evidence.lacks("cut", "another") and evidence.lacks("references", "unit 0")
    floor = EvidenceFile(record(), tmp_path).record.floor
    assert (len(floor.cut.units), floor.cut.mean) == (FLOOR_UNITS, pytest.approx(0.003))
    assert (floor.cut.scored, floor.cut.disagreed) == (FLOOR_UNITS // 2, FLOOR_UNITS // 4)
    assert floor.nats(remembers=True) == floor.nats(remembers=False) == pytest.approx(0.003)
    evidence.measure("references", "unit 0", 0.02, None)
    floor = EvidenceFile(record(), tmp_path).record.floor
    assert (floor.nats(remembers=True), floor.nats(remembers=False)) == (0.02, pytest.approx(0.003))
    assert "0.003 nats a token, 4 of 8 values differ (16 windows) by the cut" in str(floor)


def test_trials_stop_where_a_promotion_would_cost_too_much_and_go_on_when_something_changes(tmp_path: Path) -> None:
    def dear(count: int) -> list[Trial]:
        return [replace(t, tokens=1000) for t in good(count)]

    evidence = EvidenceFile(record(), tmp_path, Options(token_limit=100_000))
    made = evidence.take(dear(3 * BEHIND))
    assert [d.verdict for d in made] == ["stopped"]
    assert "17,000 tokens" in str(made[0])
    assert "survivor" not in evidence.candidates() and "blind" in evidence.candidates()
    assert evidence.take(dear(1)) == evidence.take([]) == []  # said once
    again = EvidenceFile(record(), tmp_path, Options(token_limit=100_000))
    assert again.take([]) == [] and "survivor" not in again.candidates()
    richer = EvidenceFile(record(), tmp_path, Options(token_limit=10_000_000))
    assert [d.verdict for d in richer.take([])] == ["resumed"]
    assert "survivor" in richer.candidates()
    promoted = richer.take(dear(NEEDED + BEHIND))
    assert [d.verdict for d in promoted] == ["promoted"]


def test_another_mix_of_answers_resumes_trials() -> None:
    evidence = EvidenceFile(record(), None, Options(token_limit=1))
    for _ in range(50):
        evidence.count_kind("scored")
    evidence.take([replace(t, tokens=10) for t in good(BEHIND + 1)])
    assert evidence.take([]) == [] and "survivor" not in evidence.candidates()
    for _ in range(20):
        evidence.count_kind("text")
    assert [d.verdict for d in evidence.take([])] == ["resumed"]


def test_the_chance_of_error_is_spent_over_ways_and_attempts() -> None:
    assert sum(way.share for way in STRATEGIES.values()) == pytest.approx(1)
    attempts = np.arange(1, 10**6)
    assert 0.999 < attempt_share(0) + float((0.2 * 6 / (np.pi * attempts) ** 2).sum()) <= 1
    assert attempt_share(7) == pytest.approx(0.2 * 6 / (np.pi * 7) ** 2)
    assert 0 < error_of("blind", 10**9, 0.95) < error_of("blind", 10, 0.95) < error_of("blind", 0, 0.95)
    assert units_needed(0.01, error_of("survivor", 10_000, 0.95)) < 3000  # it may still earn trust


def test_a_ledger_survives_ten_thousand_rejections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxwin.audit.evidence.PAUSE", 0)
    before = record().model_copy(update={"strategies": {"blind": Evidence(attempt=9_800)}})
    evidence = EvidenceFile(before, None)
    monkeypatch.setattr("ctxwin.audit.evidence.PAST", 100)
    while (found := evidence.record.strategies["blind"]).attempt < 10_000:
        evidence.take(bad(1, "blind"))
        assert len(found.past) <= 100
    assert "blind" in evidence.candidates()
    assert all(d.verdict == "rejected" and d.upper == 1 for d in evidence.record.decisions)
    needed = units_needed(0.01, error_of("blind", 10_000, 0.95))
    assert [d.verdict for d in evidence.take(good(needed + BEHIND, "blind"))] == ["promoted"]
    (tmp_path / "record.trust.json").write_text(evidence.record.model_dump_json(by_alias=True))
    assert Record.read(tmp_path / "record.trust.json") == evidence.record


def test_odd_entries_are_left_out_and_the_rest_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evidence = EvidenceFile(record(), tmp_path)
    evidence.take([*good(NEEDED + BEHIND), *good(3, "patched"), *good(3, "blind")])
    (path,) = tmp_path.glob("*.trust.json")
    for way, name, value in (("patched", "answers", -1), ("blind", "wealth", ["x"]), ("blind", "units", {"900": 1})):
        odd = json.loads(evidence.record.model_dump_json(by_alias=True))
        odd["ways"][way]["scored"][name] = value
        odd["decisions"].append({"what": "?"})
        odd["ways"]["orbit"] = None
        path.write_text(json.dumps(odd))
        found = Record.read(path)
        assert found.strategies["survivor"].promoted
        assert way not in found.strategies
        assert [d.verdict for d in found.decisions] == ["promoted"]
        assert f"strategy {way} is left out" in caplog.text
    for odd_text in ("[]", "{", '{"format": 3, "ways": []}', "\0", json.dumps({**odd, "format": 2})):
        path.write_text(odd_text)
        with pytest.raises(ValueError):  # whatever is wrong with it
            Record.read(path)


def test_of_several_that_computes_least_is_served() -> None:
    evidence = EvidenceFile(record(), None, Options(budget=0.5))
    evidence.take([replace(t, computed=0) for t in good(60, "blind")])
    evidence.take([replace(t, computed=30) for t in good(60, "survivor")])
    assert evidence.promoted() == "blind"


def test_a_way_that_does_harm_is_rejected_soon_and_tried_again_later() -> None:
    evidence = EvidenceFile(record(), None)
    (decision,) = [d for _ in range(2) for d in evidence.take(bad(1, "blind"))]
    assert (decision.verdict, decision.trials) == ("rejected", 2)
    assert "blind" not in evidence.candidates()
    for _ in range(PAUSE):
        evidence.take(good(1, unit="other"))
    assert "blind" in evidence.candidates()
    assert evidence.record.strategies["blind"].attempt == 1
    evidence.take(bad(3, "blind"))
    assert evidence.record.strategies["blind"].pause == 2 * PAUSE


def test_one_bad_window_rejects_nothing() -> None:
    evidence = EvidenceFile(record(), None)
    assert evidence.take(bad(UNIT_TRIALS, unit="dark")) == []
    assert evidence.take(good(NEEDED)) == []
    assert evidence.record.strategies["survivor"].attempt == 0


def test_units_of_an_attempt_are_no_evidence_of_the_next() -> None:
    evidence = EvidenceFile(record(), None)
    evidence.take([*good(1, unit="kind"), *bad(3)])
    assert evidence.record.strategies["survivor"].attempt == 1
    assert not evidence.accepts_trial("survivor", "kind")


def test_a_promoted_way_that_turns_is_demoted_and_says_what_was_served_meanwhile(tmp_path: Path) -> None:
    evidence = EvidenceFile(record(), tmp_path)
    evidence.take(good(NEEDED + BEHIND))
    for _ in range(300):
        evidence.count_answer("survivor")
    assert evidence.take(good(15, served=True)) == []
    made: list[Decision] = []
    while not made:
        made = evidence.take(bad(1, served=True, unit="one window is enough"))
    assert made[0].verdict == "demoted"
    assert made[0].harmed <= 2
    assert (made[0].served, made[0].audited) == (300, 15 + made[0].harmed)
    assert "300 answers were served so meanwhile" in str(made[0])
    assert evidence.promoted() is None
    assert (
        evidence.record.strategies["survivor"].trials == 0
    )  # what was true before the change promotes nothing after it


def test_trials_that_come_late_are_of_the_phase_before() -> None:
    evidence = EvidenceFile(record(), None)
    evidence.take(bad(2, served=True))
    assert evidence.record.strategies.get("survivor", Evidence()).trials == 0
    evidence.take(good(NEEDED + BEHIND))
    evidence.take(bad(5))  # tried by another process that had not read of the promotion
    assert evidence.promoted() == "survivor"


def test_a_harmed_answer_raises_suspicion_until_audits_have_settled_it() -> None:
    evidence = EvidenceFile(record(), None)
    evidence.take(good(NEEDED + BEHIND))
    evidence.take(good(200, served=True))
    assert not evidence.is_suspected("survivor")
    evidence.take(bad(1, served=True))
    audits = 0
    while evidence.is_suspected("survivor"):
        evidence.take(good(1, served=True))
        audits += 1
    assert evidence.promoted() == "survivor"
    assert 15 <= audits <= 35


def test_who_wants_what_has_left_to_be_remembered_has_a_way_and_evidence_of_his_own() -> None:
    nearer = record().model_copy(update={"reference": "nearer"})
    assert "kept" in EvidenceFile(nearer, None).candidates()
    assert "kept" not in EvidenceFile(record(), None).candidates()


def test_evidence_lasts_and_is_shared(tmp_path: Path) -> None:
    first, second = EvidenceFile(record(), tmp_path), EvidenceFile(record(), tmp_path)
    first.take(good(NEEDED - 100))
    second.take(good(100 + BEHIND))
    assert second.promoted() == "survivor"
    assert EvidenceFile(record(), tmp_path).promoted() == "survivor"
    (found,) = _read(tmp_path)
    assert found.strategies["survivor"].trials == NEEDED + BEHIND


def test_a_failed_write_ends_neither_reading_nor_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = EvidenceFile(record(), tmp_path), EvidenceFile(record(), tmp_path)
    first.take(good(NEEDED + BEHIND))
    monkeypatch.setattr("ctxwin.audit.evidence.REREAD_S", 0.0)
    with monkeypatch.context() as disk:
        disk.setattr("ctxwin.audit.evidence.atomic_write", mock.Mock(side_effect=OSError("disk full")))
        first.take(good(1, served=True))
    second.take(bad(2, served=True))
    assert second.promoted() is first.promoted() is None
    monkeypatch.setattr(first, "_retry", 0.0)
    first.take(good(1, "edited"))
    assert _read(tmp_path)[0].strategies["edited"].trials == 1


def test_a_question_is_evidence_once_in_all_processes(tmp_path: Path) -> None:
    evidence = EvidenceFile(record(), tmp_path)
    evidence.take([replace(t, question="q") for t in good(1, unit="window")])
    again = EvidenceFile(record(), tmp_path)
    assert again.accepts_question("q", "window") and again.accepts_question("other", "another")
    assert not again.accepts_question("q", "another")
    again.take([replace(t, question=str(i)) for i, t in enumerate(good(QUESTIONS))])
    assert len(_read(tmp_path)[0].questions) == QUESTIONS


def _add(folder: str, count: int) -> None:
    evidence = EvidenceFile(record(), Path(folder))
    for index in range(count):
        evidence.take([replace(t, unit=f"{os.getpid()} {index}") for t in good(2)])


def test_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    others = [spawn.Process(target=_add, args=(str(tmp_path), 25)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert _read(tmp_path)[0].strategies["survivor"].trials == 150


def test_what_is_bound_to_something_else_or_broken_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    EvidenceFile(record(), tmp_path).take(good(NEEDED + BEHIND))
    (path,) = tmp_path.glob("*.trust.json")
    assert EvidenceFile(record("c" * 64), tmp_path).promoted() is None
    moved = json.loads(path.read_text()) | {"binding": "d" * 64}
    path.write_text(json.dumps(moved))
    assert EvidenceFile(record(), tmp_path).promoted() is None
    assert "bound to another" in caplog.text
    path.write_bytes(b"{")
    evidence = EvidenceFile(record(), tmp_path)
    assert evidence.promoted() is None
    evidence.take(good(1))
    assert _read(tmp_path)[0].strategies["survivor"].trials == 1


def test_a_folder_that_cannot_be_written_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    evidence = EvidenceFile(record(), tmp_path / "file" / "below")
    evidence.take(good(NEEDED + BEHIND))
    assert evidence.promoted() == "survivor"
    assert "kept in memory" in caplog.text


def test_records_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path))
    EvidenceFile(record(), tmp_path).take(good(NEEDED + BEHIND))
    EvidenceFile(record("c" * 64), tmp_path).take(good(4))
    assert [len(found.decisions) for found in records()] == [1, 0]


def _read(folder: Path) -> list[Record]:
    return [Record.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*.trust.json"))]
