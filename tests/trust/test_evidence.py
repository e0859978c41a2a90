"""The ledger: what promotes and what demotes, what lasts over restarts and processes, and what it is bound to."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from ctxwin.trust.confidence import trials_needed
from ctxwin.trust.evidence import PAUSE, Decision, Evidence, Ledger, Record, Trial, records


def record(binding: str = "b" * 64, weights: str = "w") -> Record:
    return Record(binding=binding, weights=weights, model="m", engine="hf", dtype="float32")


def good(count: int, way: str = "survivor", *, served: bool = False) -> list[Trial]:
    return [Trial(way, False, 1e-4, False, None, 10, 100, served)] * count


def bad(count: int, way: str = "survivor", *, served: bool = False) -> list[Trial]:
    return [Trial(way, True, 2.0, True, None, 10, 100, served)] * count


def test_a_way_is_promoted_once_the_bound_is_under_the_budget_and_not_before(tmp_path: Path) -> None:
    ledger = Ledger(record(), tmp_path)
    needed = trials_needed(0, 0.01, Evidence().level(0.95))
    assert ledger.take(good(needed - 1)) == []
    assert ledger.promoted() is None
    (decision,) = ledger.take(good(1))
    assert (decision.what, decision.way, decision.trials, decision.harms) == ("promoted", "survivor", needed, 0)
    assert decision.upper <= 0.01
    assert ledger.promoted() == "survivor"
    assert "survivor" not in ledger.tried()


def test_of_several_that_computes_least_is_served() -> None:
    ledger = Ledger(record(), None, budget=0.5)
    ledger.take([Trial("blind", False, 0.0, computed=0, exact_computed=100)] * 50)
    ledger.take([Trial("survivor", False, 0.0, computed=30, exact_computed=100)] * 50)
    assert ledger.promoted() == "blind"


def test_a_way_that_does_harm_is_rejected_soon_and_tried_again_later() -> None:
    ledger = Ledger(record(), None)
    decisions = [d for _ in range(50) for d in ledger.take([*bad(1, "blind"), *good(1, "blind")])]
    assert decisions[0].what == "rejected"
    assert decisions[0].trials <= 6
    ledger = Ledger(record(), None)
    ledger.take(bad(3, "blind"))
    assert "blind" not in ledger.tried()
    for _ in range(PAUSE):
        ledger.take(good(1))
    assert "blind" in ledger.tried()
    again = ledger.record.ways["blind"]
    assert again.attempt == 1
    assert again.level(0.95) > Evidence().level(0.95)  # the chance of error is shared among the attempts


def test_a_promoted_way_that_turns_is_demoted_and_says_what_was_served_meanwhile(tmp_path: Path) -> None:
    ledger = Ledger(record(), tmp_path)
    ledger.take(good(400))
    for _ in range(300):
        ledger.answered("survivor")
    assert ledger.take(good(15, served=True)) == []
    made: list[Decision] = []
    while not made:
        made = ledger.take(bad(1, served=True))
    assert made[0].what == "demoted"
    assert made[0].harmed <= 3
    assert (made[0].served, made[0].audited) == (300, 15 + made[0].harmed)
    assert "300 answers were served so meanwhile" in str(made[0])
    assert ledger.promoted() is None
    assert ledger.record.ways["survivor"].trials == 0  # what was true before the change promotes nothing after it


def test_a_harmed_answer_raises_suspicion_until_audits_have_settled_it() -> None:
    ledger = Ledger(record(), None)
    ledger.take(good(400))
    assert not ledger.suspected("survivor")
    ledger.take(bad(1, served=True))
    audits = 0
    while ledger.suspected("survivor"):
        ledger.take(good(1, served=True))
        audits += 1
    assert ledger.promoted() == "survivor"
    assert 5 <= audits <= 20


def test_who_wants_what_has_left_to_be_remembered_has_a_way_and_evidence_of_his_own() -> None:
    nearer = record().model_copy(update={"reference": "nearer"})
    assert "kept" in Ledger(nearer, None).tried()
    assert "kept" not in Ledger(record(), None).tried()


def test_evidence_lasts_and_is_shared(tmp_path: Path) -> None:
    first, second = Ledger(record(), tmp_path), Ledger(record(), tmp_path)
    first.take(good(200))
    second.take(good(200))
    assert second.promoted() == "survivor"
    assert Ledger(record(), tmp_path).promoted() == "survivor"
    (found,) = _read(tmp_path)
    assert found.ways["survivor"].trials == 400


def _add(folder: str, count: int) -> None:
    ledger = Ledger(record(), Path(folder))
    for _ in range(count):
        ledger.take(good(2))


def test_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    others = [spawn.Process(target=_add, args=(str(tmp_path), 25)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert _read(tmp_path)[0].ways["survivor"].trials == 150


def test_what_is_bound_to_something_else_or_broken_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Ledger(record(), tmp_path).take(good(400))
    (path,) = tmp_path.glob("*.trust.json")
    assert Ledger(record("c" * 64), tmp_path).promoted() is None
    moved = json.loads(path.read_text()) | {"binding": "d" * 64}
    path.write_text(json.dumps(moved))
    assert Ledger(record(), tmp_path).promoted() is None
    assert "bound to another" in caplog.text
    path.write_bytes(b"{")
    ledger = Ledger(record(), tmp_path)
    assert ledger.promoted() is None
    ledger.take(good(1))
    assert _read(tmp_path)[0].ways["survivor"].trials == 1


def test_a_folder_that_cannot_be_written_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    ledger = Ledger(record(), tmp_path / "file" / "below")
    ledger.take(good(400))
    assert ledger.promoted() == "survivor"
    assert "kept in memory" in caplog.text


def test_records_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path))
    Ledger(record(), tmp_path).take(good(400))
    Ledger(record("c" * 64), tmp_path).take(good(4))
    assert [len(found.decisions) for found in records()] == [1, 0]


def _read(folder: Path) -> list[Record]:
    return [Record.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*.trust.json"))]
