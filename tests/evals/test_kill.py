"""Runs that are killed (SIGKILL) at random moments and continued end as undisturbed ones."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ctxwin_evals.samples import Key, read_samples

KILLS = 10

SCRIPT = """
import sys
import time
from pathlib import Path
from ctxwin_evals.samples import FORMAT, Sample, open_samples

base = {"doc_id": "d", "cluster": "c", "case": "x" * 6_000, "frames": 1, "tokens": 1, "placed": 1}
base |= {"question": "", "target": "", "meta": {}}  # long lines, so that kills tear some
with open_samples(Path(sys.argv[1]), {"format": FORMAT}) as samples:
    for index in range(int(sys.argv[2])):
        arms = [arm for arm in ("blind", "patched:8") if not samples.has("made/words", arm, index)]
        samples.add(Sample(task="made/words", arm=arm, index=index, kl=index / 7, **base) for arm in arms)
        time.sleep(0.001 if arms else 0)  # a fast disk must not be done before the last kill
"""


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(arguments: Sequence[str]) -> None:
    process = start(arguments)
    try:
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, said.decode()


def killed(arguments: Sequence[str], path: Path, delay: float) -> bool:
    """Runs until the file of samples has grown and ``delay`` seconds more, then kills; False where it was finished before."""
    size = path.stat().st_size if path.exists() else 0
    process = start(arguments)
    while process.poll() is None and (not path.exists() or path.stat().st_size <= size):
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    _, said = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), said.decode()
    return process.returncode != 0


def rows_of(folder: Path) -> dict[Key, dict[str, Any]]:
    """Every line of the file; each sample must stand there once."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    rows = {(line["task"], line["arm"], line["index"]): line for line in lines}
    assert len(rows) == len(lines)
    return rows


def check(arguments: Sequence[str], whole: Path, torn: Path, longest: float) -> None:
    """Kills ``arguments`` with ``torn`` for their folder `KILLS` times, and compares with one that was left alone."""
    rng = random.Random(20)
    finish([a.replace("{folder}", str(whole)) for a in arguments])
    again = [a.replace("{folder}", str(torn)) for a in arguments]
    sizes = []
    for _ in range(KILLS):
        assert killed(again, torn / "samples.jsonl", rng.uniform(0, longest)), "the run was done before it was killed"
        sizes.append(len(read_samples(torn).rows))
    assert sizes == sorted(set(sizes)), "each time something is kept"
    finish(again)
    assert rows_of(torn) == rows_of(whole)


def test_ten_kills_of_a_writer_lose_and_double_nothing(tmp_path: Path) -> None:
    check(["-c", SCRIPT, "{folder}", "1500"], tmp_path / "whole", tmp_path / "torn", longest=0.03)


@pytest.mark.slow
def test_ten_kills_of_a_run_change_no_sample(tmp_path: Path) -> None:
    """The command itself, on the bundled model: batches, patches and figures of a continued run are the same to the digit."""
    run = [
        "-m",
        "ctxwin",
        "eval",
        "run",
        "tiny",
        "--n",
        "80",
        "--arms",
        "reprefill,blind,patched:1,patched:4,first_k:4",
    ]
    check([*run, "--threads", "1", "--output", "{folder}"], tmp_path / "whole", tmp_path / "torn", longest=0.3)


@pytest.mark.slow
def test_a_probe_of_texts_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    from engines.models import write_text_model

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(" ".join(f"color of {i} is {i * i % 97} now" for i in range(2000)))
    command = ["-m", "ctxwin", "eval", "probe", str(write_text_model(tmp_path / "model")), "--no-profile"]
    command += ["--texts", str(tmp_path / "texts"), "--threads", "1", "--excess-budget", "1e-7", "--output"]
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    finish([*command, str(whole)])
    assert killed([*command, str(torn)], torn / "samples.jsonl", 0.1), "it was done before it was killed"
    assert 0 < len(rows_of(torn)) < len(rows_of(whole))
    finish([*command, str(torn)])
    results = [json.loads((folder / "probe.json").read_text()) for folder in (whole, torn)]
    for result in results:
        assert result.pop("date") and result.pop("seconds") > 0
    assert results[0] == results[1] and results[0]["strategies"]
    assert [{**row, "extra": 0} for row in rows_of(whole).values()] == [
        {**row, "extra": 0} for row in rows_of(torn).values()
    ]
