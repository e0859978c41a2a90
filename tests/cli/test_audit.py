"""`ctxwin audit`: who was promoted or given up, when, on what evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ctxwin.audit.evidence import EvidenceFile, Trial
from ctxwin.audit.harm import Harm
from ctxwin.audit.record import Record
from ctxwin.cli.main import app

KEPT = Harm("scored", 0.0)


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EvidenceFile:
    monkeypatch.setenv("CTXWIN_PROFILES", str(tmp_path))
    return EvidenceFile(
        Record(binding="b" * 64, weights="w", model="some-model", engine="vllm", dtype="bfloat16"), tmp_path
    )


def test_json_says_who_when_and_why(evidence: EvidenceFile) -> None:
    evidence.measure("cut", "a", 0.0016, False)
    evidence.take([Trial("survivor", KEPT, 1e-3, 10, 100, unit=str(i)) for i in range(500)])
    evidence.take([Trial("blind", Harm("scored", 1.0), 2.0, unit=str(i)) for i in range(3)])
    told = json.loads(CliRunner().invoke(app, ["audit", "--json"]).stdout)
    (record,) = told["records"]
    survivor = record["ways"]["survivor"]
    assert (survivor["standing"], survivor["windows"], survivor["trials"]) == ("promoted", 437, 453)
    assert "past" not in survivor  # names of windows say nothing to anybody
    assert survivor["scored"]["upper"] < 0.01
    assert record["floor"]["cut"] == {"nats": 0.0016, "scored": 1, "disagreed": 0, "windows": 1, "mean": 0.0016}
    assert survivor["saved"] == pytest.approx(0.9)
    assert record["ways"]["blind"]["standing"] == "paused"
    assert [(d["way"], d["what"]) for d in record["decisions"]] == [("survivor", "promoted"), ("blind", "rejected")]
    assert record["decisions"][0]["date"]


def test_people_get_a_table(evidence: EvidenceFile) -> None:
    evidence.take([Trial("survivor", KEPT, 1e-3, unit=str(i)) for i in range(500)])
    evidence.take([Trial("partial", Harm("text", 0.003), 1e-3, unit=str(i)) for i in range(20)])
    shown = CliRunner().invoke(app, ["audit"], env={"COLUMNS": "80"}).stdout  # as in a pipe
    assert "some-model on vllm in bfloat16" in shown and "tokens saved" in shown
    assert "survivor promoted: 0 of 453 scored answers lost in 437 windows" in shown
    assert "text 0.01 nats a token beyond the floor" in " ".join(shown.split()) and "+0.003" in shown


def test_what_is_known_is_printed_even_where_a_line_is_odd(
    evidence: EvidenceFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evidence.take([Trial("survivor", KEPT, 1e-3, unit=str(i)) for i in range(500)])
    evidence.take([Trial("patched", KEPT, 1e-3)])
    (path,) = tmp_path.glob("*.trust.json")
    odd = json.loads(path.read_text())
    (tmp_path / "other.trust.json").write_text(json.dumps({**odd, "model": "other-model"}))
    (tmp_path / "format.trust.json").write_text(json.dumps({**odd, "model": "old-model", "format": 2}))
    odd["ways"]["patched"]["kl_sum"] = "many"
    odd["decisions"].insert(0, 7)
    path.write_text(json.dumps(odd))
    (tmp_path / "broken.trust.json").write_text("{")
    result = CliRunner().invoke(app, ["audit"])
    assert result.exit_code == 0
    assert "survivor promoted" in result.stdout
    assert "is not used (format must be 3, got 2)" in caplog.text and "pydantic" not in caplog.text
    told = json.loads(CliRunner().invoke(app, ["audit", "--json"]).stdout)
    assert {record["model"] for record in told["records"]} == {"some-model", "other-model"}


def test_nothing_yet_says_so(evidence: EvidenceFile) -> None:
    assert "nothing was audited yet" in CliRunner().invoke(app, ["audit"]).stdout
    assert json.loads(CliRunner().invoke(app, ["audit", "--json"]).stdout) == {"records": []}


def test_no_such_model_is_bad_input(evidence: EvidenceFile) -> None:
    result = CliRunner().invoke(app, ["audit", "nowhere"])
    assert result.exit_code == 2
    assert "a model must be a local folder" in result.stderr
