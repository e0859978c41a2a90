from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxwin_evals.benchmarks import DataOptions, benchmark
from ctxwin_evals.samples import FORMAT, open_samples, read_samples
from eval_rows import CONFIG, row


def test_rows_are_appended_once_and_read_back(tmp_path: Path) -> None:
    with open_samples(tmp_path / "run", CONFIG) as samples:
        samples.add([row("blind", 0), row("blind", 1)])
        samples.add([row("blind", 1, "blue"), row("blind", 2)])
    lines = samples.path.read_text().splitlines()
    assert [json.loads(x)["index"] for x in lines] == [0, 1, 2]
    with open_samples(tmp_path / "run", CONFIG) as again:
        assert again.rows == samples.rows == read_samples(tmp_path / "run").rows
        assert again.created == samples.created == read_samples(tmp_path / "run").created != ""
    assert again.rows["made/words", "blind", 1].answer == "red"
    assert again.has("made/words", "blind", 2) and not again.has("made/words", "blind", 3)


def test_leaving_items_out_is_no_other_configuration(tmp_path: Path) -> None:
    """The remedy for missing media, ``--skip-missing``, continues a run that was begun without it."""
    configs = [benchmark("video-mme", DataOptions(str(tmp_path), skip_missing=skip)).config() for skip in (False, True)]
    assert configs[0] == configs[1]
    for config in configs:
        open_samples(tmp_path, CONFIG | {"tasks": {"video-mme": config}}).close()


def test_a_torn_last_line_is_a_missing_sample(tmp_path: Path) -> None:
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", i) for i in range(3)])
    whole = samples.path.read_bytes()
    for keep in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        samples.path.write_bytes(whole[:keep])
        count = whole[:keep].count(b"\n")
        assert len(read_samples(tmp_path).rows) == count
        with open_samples(tmp_path, CONFIG) as reopened:
            reopened.add([row("blind", i) for i in range(3)])
        assert samples.path.read_bytes() == whole


def test_another_configuration_is_refused_by_what_differs(tmp_path: Path) -> None:
    open_samples(tmp_path, CONFIG).close()
    changed = {**CONFIG, "kv": "bfloat16", "tasks": {"made/words": {"seed": 1}, "made/other": {}}}
    with pytest.raises(ValueError, match="choose another --output") as raised:
        open_samples(tmp_path, changed)
    assert "kv 'float32' there, 'bfloat16' now" in str(raised.value)
    assert "tasks.made/words.seed 0 there, 1 now" in str(raised.value)
    assert "tasks.made/other None there, {} now" in str(raised.value)
    assert "made/model" not in str(raised.value)
    open_samples(tmp_path, {**CONFIG}).close()
    with pytest.raises(ValueError, match=r"must hold config\.json"):
        read_samples(tmp_path / "nothing")


def test_tuples_in_a_configuration_are_the_lists_they_become(tmp_path: Path) -> None:
    open_samples(tmp_path, {**CONFIG, "frames": (2, 3)}).close()
    open_samples(tmp_path, {**CONFIG, "frames": (2, 3)}).close()


def test_samples_of_another_format_are_refused(tmp_path: Path) -> None:
    open_samples(tmp_path, {**CONFIG, "format": 1}).close()
    with pytest.raises(ValueError, match=f"must be of format {FORMAT}, got 1; run it into another folder"):
        open_samples(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{broken", "line 2"), ('{"task": "x"}', "line 2"), ("[]", "line 2"), (None, r"'blind', 0\) again in line 4")],
)
def test_damage_in_the_middle_is_an_error_not_a_loss(tmp_path: Path, line: str | None, message: str) -> None:
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", i) for i in range(3)])
    lines = samples.path.read_text().splitlines()
    samples.path.write_text("\n".join([*lines, lines[0]] if line is None else [lines[0], line, lines[2]]) + "\n")
    for opened in (read_samples, lambda folder: open_samples(folder, CONFIG)):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "must hold a JSON object, got list"), ("{", "must be JSON"), ("\udcff", "must be JSON")],
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [({"index": "7"}, "index"), ({"task": []}, "task"), ({"sttored": 1}, "sttored"),
     ({"kl": float("nan")}, "must be finite, got NaN")],
)  # fmt: skip
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    open_samples(tmp_path, CONFIG).close()
    lines = [row("blind", 0).line(), json.dumps(json.loads(row("blind", 1).line()) | more) + "\n"]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match=f"(?s)line 2.*{message}"):
        read_samples(tmp_path)


def test_a_figure_that_is_no_number_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", 0)])
        before = samples.path.read_bytes()
        with pytest.raises(ValueError, match=r"finite figures, got .*'blind', 1"):
            samples.add([row("blind", 1, meta={"depth": float("nan")})])
        assert samples.path.read_bytes() == before
        assert not samples.has("made/words", "blind", 1)


def test_a_full_disk_leaves_no_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", 0)])
        before = samples.path.read_bytes()

        def full(number: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
            patched.setattr(os, "fsync", full)
            samples.add([row("blind", 1)])
        assert samples.path.read_bytes() == before
        samples.add([row("blind", 1)])
    assert len(read_samples(tmp_path).rows) == 2


def test_half_a_line_is_taken_back_and_its_file_is_named(tmp_path: Path) -> None:
    """On the disk itself, which takes a part of what is written before it is full."""
    with open_samples(tmp_path, CONFIG) as samples:
        samples.add([row("blind", 0)])
        before = samples.path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
        try:
            with pytest.raises(OSError, match=r"samples\.jsonl"):
                samples.add([row("blind", 1)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert samples.path.read_bytes() == before
        samples.add([row("blind", 1)])
    assert len(read_samples(tmp_path).rows) == 2


def test_within_a_process_the_newer_one_writes(tmp_path: Path) -> None:
    older = open_samples(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="there, 'other' now"):
        open_samples(tmp_path, {**CONFIG, "model": "other"})
    older.add([row("blind", 0)])  # what was refused took nothing away
    newer = open_samples(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="opened anew"):
        older.add([row("blind", 1)])
    newer.add([row("blind", 1)])
    newer.close()
    with pytest.raises(ValueError, match="must be open for writing"):
        newer.add([row("blind", 2)])
    with pytest.raises(ValueError, match="must be open for writing"):
        read_samples(tmp_path).add([row("blind", 2)])


WRITER = """
import sys
from pathlib import Path
from ctxwin_evals.samples import open_samples
from eval_rows import CONFIG, row
try:
    samples = open_samples(Path(sys.argv[1]), CONFIG)
except ValueError as error:
    sys.exit(str(error))
samples.add([row("blind", 7)])
print("ready", flush=True)
sys.stdin.read()
"""


def writer(folder: Path, **options: Any) -> subprocess.Popen[str]:
    paths = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    mine = open_samples(tmp_path, CONFIG)
    refused = writer(tmp_path)
    assert f"got one that is being written by process {os.getpid()};" in refused.communicate()[1]
    assert refused.returncode == 1
    assert not mine.path.exists()
    del mine
    gc.collect()  # one that was forgotten holds nothing either
    theirs = writer(tmp_path)
    try:
        assert theirs.stdout is not None
        assert theirs.stdout.readline() == "ready\n", theirs.stderr.read() if theirs.stderr else ""
        with pytest.raises(ValueError, match=f"being written by process {theirs.pid}"):
            open_samples(tmp_path, CONFIG)
        assert len(read_samples(tmp_path).rows) == 1  # looking is allowed
    finally:
        theirs.kill()
        theirs.communicate()
    with open_samples(tmp_path, CONFIG) as samples:
        assert samples.has("made/words", "blind", 7)
