"""`ctxwin audit`: who was promoted or given up, when, on what evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxwin.cli.main import app
from ctxwin.trust.evidence import Ledger, Record, Trial


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path))
    return Ledger(Record(binding="b" * 64, weights="w", model="some-model", engine="vllm", dtype="bfloat16"), tmp_path)


def test_json_says_who_when_and_why(ledger: Ledger) -> None:
    ledger.take([Trial("survivor", False, 1e-3, False, None, 10, 100)] * 400)
    ledger.take([Trial("blind", True, 2.0, True)] * 3)
    told = json.loads(CliRunner().invoke(app, ["audit", "--json"]).stdout)
    (record,) = told["records"]
    survivor = record["ways"]["survivor"]
    assert (survivor["standing"], survivor["trials"], survivor["harms"]) == ("promoted", 400, 0)
    assert survivor["upper"] < 0.01
    assert survivor["saved"] == pytest.approx(0.9)
    assert record["ways"]["blind"]["standing"] == "paused"
    assert [(d["way"], d["what"]) for d in record["decisions"]] == [("survivor", "promoted"), ("blind", "rejected")]
    assert record["decisions"][0]["date"]


def test_people_get_a_table(ledger: Ledger) -> None:
    ledger.take([Trial("survivor", False, 1e-3)] * 400)
    shown = CliRunner().invoke(app, ["audit"]).stdout
    assert "some-model on vllm in bfloat16" in shown
    assert "survivor promoted: 0 of 349 audited answers changed" in shown


def test_nothing_yet_says_so(ledger: Ledger) -> None:
    assert "nothing was audited yet" in CliRunner().invoke(app, ["audit"]).stdout
    assert json.loads(CliRunner().invoke(app, ["audit", "--json"]).stdout) == {"records": []}


def test_no_such_model_is_bad_input(ledger: Ledger) -> None:
    result = CliRunner().invoke(app, ["audit", "nowhere"])
    assert result.exit_code == 2
    assert "a model must be a local folder" in result.stderr
