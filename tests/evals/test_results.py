from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ctxwin_evals.results import version, write_lm_eval
from ctxwin_evals.samples import open_samples
from ctxwin_evals.score import scores
from ctxwin_evals.stats import standard_error
from eval_rows import CONFIG, Words, row, sweep, unserved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_samples(tmp_path / "run", CONFIG | {"name": "words-7b"}) as samples:
        samples.add(
            [*sweep(20), unserved("orbit:2", 0), row("orbit:2", 1, "two words"), row("blind", 3, task="made/b-c")]
        )
        write_lm_eval(samples, tmp_path / "lm", task_of=Words)
        (tmp_path / "scores.json").write_text(json.dumps(scores(samples, task_of=Words)))
    return tmp_path


def aggregated(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "lm").glob("results_*.json")
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def test_the_keys_are_lm_evals(folder: Path) -> None:
    made = aggregated(folder)
    assert {"results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "config", "git_hash", "date",
            "task_hashes"} <= made.keys()  # fmt: skip
    assert set(made["results"]) == set(made["versions"]) == set(made["configs"]) == {"made/words", "made/b-c"}
    assert made["n-samples"]["made/words"] == {"original": 20, "effective": 20}
    assert (made["config"]["model_args"], made["config"]["model_sha"]) == ("words-7b", "made/model")
    assert made["configs"]["made/words"]["metadata"] == {"seed": 0}
    assert isinstance(made["date"], float)
    assert re.fullmatch(r"[0-9a-f]{40}|\d+\.\d+\.\d+\S*", version())


def test_figures_are_the_scored_ones(folder: Path) -> None:
    made, own = aggregated(folder)["results"]["made/words"], json.loads((folder / "scores.json").read_text())["arms"]
    assert made["acc,none"] == own["reprefill"]["made/words"]["accuracy"] == 1.0
    for arm in ("blind", "patched:4", "first_k:20"):
        cell = own[arm]["made/words"]
        assert made[f"acc,{arm}"] == pytest.approx(cell["accuracy"])
        assert made[f"kl,{arm}"] == pytest.approx(cell["kl"])
        assert made[f"eta,{arm}"] == pytest.approx(cell["eta"])
        assert made[f"agreement,{arm}"] == pytest.approx(cell["agreement"])
    assert made["spent_share,patched:4"] == pytest.approx(0.04)
    assert "acc,orbit:2" not in made  # its only answer could not be scored
    assert made["kl,orbit:2"] == 0.5 and made["kl_stderr,orbit:2"] == "N/A"
    assert made["sample_count"] == {f"acc,{arm}": 20 for arm in ("none", *own) if arm not in ("reprefill", "orbit:2")}


def test_standard_errors_recompute_from_the_samples_alone(folder: Path) -> None:
    (path,) = (folder / "lm").glob("samples_made_words_*.jsonl")
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        by_arm[sample["filter"]].append(sample)
    made = aggregated(folder)["results"]["made/words"]
    for arm in ("none", "patched:1"):
        values, clusters = [s["acc"] for s in by_arm[arm]], [s["doc"]["cluster"] for s in by_arm[arm]]
        assert made[f"acc,{arm}"] == pytest.approx(sum(values) / len(values))
        assert made[f"acc_stderr,{arm}"] == pytest.approx(standard_error(values, clusters))
    sample = by_arm["patched:1"][3]
    assert {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "metrics", "doc_hash", "prompt_hash",
            "target_hash"} <= sample.keys()  # fmt: skip
    assert sample["doc_id"] == 3 and sample["doc"]["id"] == "d3" and sample["target"] == "red"
    assert sample["arguments"]["gen_args_0"]["arg_0"] == "color of 17?"
    assert sample["resps"] == [sample["filtered_resps"]]
    assert sample["target_hash"] == hashlib.sha256(b"red").hexdigest()
    assert set(sample["metrics"]) <= sample.keys()
    assert by_arm["orbit:2"][0]["acc"] is None and by_arm["orbit:2"][0]["filtered_resps"] == [""]
    assert "reprefill" not in by_arm and len(by_arm["none"]) == 20


def test_scoring_again_replaces_the_files(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in (folder / "lm").iterdir()}
    with open_samples(folder / "run", CONFIG | {"name": "words-7b"}) as samples:
        write_lm_eval(samples, folder / "lm", task_of=Words)
    assert {path.name: path.read_bytes() for path in (folder / "lm").iterdir()} == before
    assert len(before) == 3


def test_other_answers_have_other_figures_but_the_same_hashes(tmp_path: Path) -> None:
    made = []
    for name, answer in (("a", "red"), ("b", "blue")):
        with open_samples(tmp_path / name, CONFIG) as samples:
            samples.add([row("blind", i, answer) for i in range(3)])
            made.append(json.loads(write_lm_eval(samples, tmp_path / name / "lm", task_of=Words).read_text()))
    assert made[0]["task_hashes"] == made[1]["task_hashes"] != {}
    assert [m["results"]["made/words"]["acc,blind"] for m in made] == [1.0, 0.0]
