"""Promotions err as seldom as promised on simulated streams, and the simulation is of the evidence that serves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.stats import binomtest

from ctxwin.audit.evidence import EvidenceFile, Trial
from ctxwin.audit.harm import CAP, Harm
from ctxwin.audit.record import Record
from evals.studies import promotions

STREAMS = 60


@pytest.mark.parametrize("kind", promotions.KINDS)
def test_a_harmful_way_is_seldom_promoted(kind: str) -> None:
    """At 1.01 budgets, where it is hardest: no more often than 5 %, by an exact binomial test at 0.1 %."""
    row = promotions.cell(kind, 1.5 if kind == "drift" else 1.01, STREAMS, 500, seed=0)
    assert binomtest(round(row["promoted"] * STREAMS), STREAMS, 0.05, alternative="greater").pvalue > 1e-3


@pytest.mark.parametrize(("kind", "windows"), [("clustered", 453), ("text", 124), ("mixed", 453)])
def test_a_harmless_way_is_promoted(kind: str, windows: int) -> None:
    row = promotions.cell(kind, 0.0, 5, 600, seed=0)
    assert row["promoted"] == 1
    assert windows <= row["windows"] <= windows * (1.1 if kind == "mixed" else 1)  # not every window has both kinds


def test_a_way_that_turns_is_given_up_soon() -> None:
    assert promotions.demotions(1.0, 50, 0, onset=0) == 2
    assert promotions.demotions(0.1, 50, 0, onset=0) < 60


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("harm", [0.0, 0.004, 0.05, 0.4])
def test_the_ledger_decides_as_the_simulation_does(harm: float, texts: bool) -> None:
    """Windows of three asks, whose trials all stay below what makes a unit count early; up to the first decision."""
    streams, windows, asks = 4, 700, 3
    rng = np.random.default_rng(5)
    harms = (rng.random((windows, streams, asks)) < harm).astype(float) - 0.1 * texts
    kinds = (rng.random((windows, streams, asks)) < 0.5) & texts
    harms = np.where(kinds, harms, harms + 0.1 * texts)
    by_stream = []
    for stream in range(streams):
        evidence = EvidenceFile(Record(binding="b" * 64, weights="w", model="m", engine="hf", dtype="float32"), None)
        by_stream.append(_first(evidence, harms[:, stream], kinds[:, stream]))

    class Always:
        """Draws that try every ask."""

        def random(self, count: int) -> np.ndarray:
            return np.zeros(count)

    each = zip(harms, kinds, strict=True)
    found = promotions.by_windows(each, Always(), "survivor", once=True)  # type: ignore[arg-type]
    assert [(what == "promoted", at) for what, at in by_stream] == [
        (bool(promoted), int(at if promoted else rejected))
        for promoted, at, rejected in zip(found.promoted, found.windows, found.rejected, strict=True)
    ]


def _first(evidence: EvidenceFile, harms: np.ndarray, texts: np.ndarray) -> tuple[str, int]:
    """The first decision on trials in windows, and the number of its window."""
    for index, window in enumerate(zip(harms, texts, strict=True), 1):
        for harm, text in zip(*window, strict=True):
            found = Harm("text", float(harm) * CAP) if text else Harm("scored", float(harm))
            if made := evidence.take([Trial("survivor", found, unit=str(index))]):
                return made[0].verdict, index
    return "none", -1


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    promotions.main(["--streams", "2", "--windows", "3", "--answers", "20"])
    assert "| clustered | 1.01 |" in capsys.readouterr().out
    promotions.main(["--streams", "2", "--windows", "3", "--answers", "20", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["cells"]) == 27 and found["budget"] == found["excess_budget"] == 0.01
