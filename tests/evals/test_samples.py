from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxwin.evals.samples import FORMAT, open_samples, read_samples
from ctxwin.evals.score import scores, table

CONFIG = {"format": FORMAT, "suite": "tiny", "seed": 0}


def row(arm: str, index: int, answer: str = "red", task: str = "multi_hop") -> dict[str, object]:
    return {
        "task": task, "arm": arm, "index": index, "frames": 2 + index % 2, "answer": answer, "reference": "red",
        "base": "blue", "truth": "red", "kl": 0.5 if answer != "red" else 0.0, "base_kl": 2.0, "stored": 1, "over": 10,
    }  # fmt: skip


def test_rows_are_appended_once_and_read_back(tmp_path: Path) -> None:
    samples = open_samples(tmp_path / "run", CONFIG)
    samples.add([row("blind", 0), row("blind", 1)])
    samples.add([row("blind", 1, "blue"), row("blind", 2)])
    lines = samples.path.read_text().splitlines()
    assert [json.loads(x)["index"] for x in lines] == [0, 1, 2]
    again = open_samples(tmp_path / "run", CONFIG)
    assert again.rows == samples.rows == read_samples(tmp_path / "run").rows
    assert again.rows["multi_hop", "blind", 1]["answer"] == "red"


def test_a_torn_last_line_is_a_missing_sample(tmp_path: Path) -> None:
    samples = open_samples(tmp_path, CONFIG)
    samples.add([row("blind", i) for i in range(3)])
    whole = samples.path.read_bytes()
    for keep in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        samples.path.write_bytes(whole[:keep])
        count = whole[:keep].count(b"\n")
        assert len(read_samples(tmp_path).rows) == count
        reopened = open_samples(tmp_path, CONFIG)
        reopened.add([row("blind", i) for i in range(3)])
        assert samples.path.read_bytes() == whole


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    open_samples(tmp_path, CONFIG)
    with pytest.raises(ValueError, match=r"seed 0 there, 1 now; choose another --output"):
        open_samples(tmp_path, {**CONFIG, "seed": 1})
    with pytest.raises(ValueError, match=r"must hold config\.json"):
        read_samples(tmp_path / "nothing")


def test_damage_in_the_middle_is_an_error_not_a_loss(tmp_path: Path) -> None:
    samples = open_samples(tmp_path, CONFIG)
    samples.add([row("blind", i) for i in range(3)])
    lines = samples.path.read_text().splitlines(keepends=True)
    samples.path.write_text(lines[0] + "{broken\n" + lines[2])
    with pytest.raises(ValueError, match="line 2"):
        open_samples(tmp_path, CONFIG)


def test_scores_by_hand(tmp_path: Path) -> None:
    samples = open_samples(tmp_path, CONFIG)
    samples.add([row("patched:8", 0), row("patched:8", 1), row("patched:8", 2, "pink"), row("patched:8", 3)])
    samples.add([{"task": "multi_hop", "arm": "patched:8", "index": 4, "frames": 2, "unscored": "no other order"}])
    made = scores(samples)["arms"]["patched:8"]["multi_hop"]
    assert (made["n"], made["unscored"], made["accuracy"]) == (4, 1, 0.75)
    assert made["eta"] == pytest.approx(1 - 0.5 / 8)
    assert made["flip_recover"] == 0.75
    assert made["harm_rate"] == 0.25
    assert made["bytes_share"] == pytest.approx(0.1)
    assert made["by_frames"] == {"2": {"n": 2, "accuracy": 0.5}, "3": {"n": 2, "accuracy": 1.0}}
    assert scores(samples, n=2)["arms"]["patched:8"]["multi_hop"]["accuracy"] == 1.0
    with pytest.raises(ValueError, match="samples of blind"):
        scores(samples, ["blind"])


def test_nothing_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one scored sample"):
        table([])
