"""A user's own pictures, videos, texts and questions; and the command around them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from ctxwin.cli.main import app
from ctxwin.fidelity import Fidelity
from ctxwin.profiles import PROFILES_VARIABLE, find_profile, resolve
from ctxwin_evals.probe.contexts import PLACED
from ctxwin_evals.probe.folder import FILES, Images, read_questions
from ctxwin_evals.probe.passages import NEXT
from ctxwin_evals.probe.passages import PLACED as WINDOW
from ctxwin_evals.probe.probe import Sizes
from ctxwin_evals.probe.texts import CHARACTERS, read_passages

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Nine noisy pictures of two sizes."""
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(9):
        size = (84, 84) if i % 3 else (56, 84)
        where = folder / "more" if i > 6 else folder
        Image.fromarray(rng.integers(256, size=(*size, 3), dtype=np.uint8)).save(where / f"{i}.png")
    (folder / "notes.txt").write_text("not a picture")
    return folder


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    from engines.models import write_text_model

    return write_text_model(tmp_path / "text")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Commands measure a little only, and nobody's own profiles are touched."""
    from ctxwin_evals.probe import probe

    little = Sizes(
        reading=4,
        looks=(4,),
        choosing=2,
        proving=2,
        fitting=2,
        survivors=1,
        streams=1,
        slides=1,
        moving=2,
        chunks=(16,),
    )
    monkeypatch.setattr(probe, "Sizes", lambda: little)
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    yield


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, ["eval", "probe", *map(str, args)])


def refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


def test_sequences_go_by_name_or_are_shuffled_and_strangers_have_the_size_of_whom_they_replace(pictures: Path) -> None:
    source = Images(pictures, [], 4, None)
    assert [p.name for p in source.pieces] == [f"{'more/' if i > 6 else ''}{i}.png" for i in range(9)]
    names = [p.name for p in source.pieces]
    for index in range(4):
        context = source.context("reading", index)
        chunks = context.load()
        assert len(chunks) == 2 * PLACED
        shapes = [chunk.media[0].shape for chunk in chunks]
        assert shapes[:PLACED] == shapes[PLACED:]
        assert len({chunk.id for chunk in chunks}) == 2 * PLACED or index % 2, "a stranger is another picture"
        labels = [chunk.parts[0].text for chunk in chunks]  # type: ignore[union-attr]
        assert labels[:PLACED] == labels[PLACED:] and labels[0].startswith("Picture A")
        assert context.cluster in names
        assert [q.kind for q in context.questions] == ["cross", "one"]
    assert [i.digest for i in source.items(2)] == [i.digest for i in source.items(3)][:4], (
        "an item depends on its index alone"
    )
    in_order = [p.content for chunk in source.context("choosing", 0).load()[:PLACED] for p in chunk.media]
    every = [c.media[0].content for c in (source.chunk(p, p.size, "A") for p in source.pieces)]
    at = every.index(in_order[0])
    assert in_order == [every[(at + i) % 9] for i in range(PLACED)]


def test_files_that_cannot_be_read_are_left_out_and_named(
    pictures: Path, engine: HFEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (pictures / "._0.png").write_bytes(b"what another system keeps beside a file")
    (pictures / "empty.mp4").touch()
    Image.fromarray(np.full((84, 84), 1000, np.uint16)).save(pictures / "more" / "0.png")  # 16 bits a channel
    Image.new("RGB", (84, 84)).save(pictures / "scan.tif")  # of a format that is never read
    source = Images(pictures, [], 4, None)
    assert len(source.pieces) == 9 and source.notes[1].startswith("3 of 12 files cannot be read and are left out")
    assert all(name in caplog.text for name in ("._0.png", "empty.mp4", "more/0.png")) and "scan" not in caplog.text
    text, folder = "color of 17 now " * 40, tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(text, encoding="utf-16")
    (folder / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"must be readable UTF-8, got .*a\.txt.*; convert it"):
        read_passages(engine, folder, [], block=4)
    (folder / "c.txt").write_text(text, encoding="utf-8-sig")  # as editors on Windows begin a file
    passages, notes = read_passages(engine, folder, [], block=4)
    assert "2 of 3 files cannot be read" in notes[0]
    found = {token for p in passages for chunk in p.chunks for token in engine.encode(chunk).token_ids}
    assert found and found <= {*engine.encoder.tokens.document(text)}


def test_the_users_questions_are_asked_beside_the_generic_ones(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_bytes("\ufeff# mine\r\nWho is it?\r\n\r\nWhere?\r\n".encode())
    source = Images(pictures, read_questions(tmp_path / "q.txt"), 4, None)
    kinds = [q.kind for q in source.context("reading", 0).questions]
    assert kinds == ["cross", "one", "yours"]
    assert {source.context("reading", i).questions[2].text for i in range(12)} == {"Who is it?", "Where?"}


def test_pictures_are_scaled_down_and_videos_give_frames(tmp_path: Path) -> None:
    import cv2

    folder = tmp_path / "clips"
    folder.mkdir()
    writer = cv2.VideoWriter(str(folder / "a.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 8.0, (96, 64))
    for i in range(24):
        writer.write(np.full((64, 96, 3), 10 * i, dtype=np.uint8))
    writer.release()
    source = Images(folder, [], 4, 48 * 32)
    assert len(source.pieces) == 8
    chunk = source.context("reading", 0).load()[0]
    assert chunk.media[0].shape == (1, 32, 48)
    first, last = (source.chunk(source.pieces[i], (32, 48), "A").media[0].content for i in (0, 7))
    assert first != last


def test_enough_pictures_leave_some_for_fitting(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(8 * PLACED):
        Image.fromarray(np.full((28, 28, 3), 7 * i % 256, dtype=np.uint8)).save(folder / f"{i:03d}.png")
    source = Images(folder, [], 4, None)
    assert source.fits
    fit = {source.context("fitting", i).cluster for i in range(30)}
    probed = {source.context(split, i).cluster for split in ("choosing", "proving") for i in range(30)}  # type: ignore[arg-type]
    assert fit and probed and not fit & probed


def test_a_large_folder_takes_no_longer_than_a_smaller_one(engine: HFEngine, tmp_path: Path) -> None:
    for i in range(FILES + 44):
        Image.new("RGB", (28, 28), (i % 256, 0, 0)).save(tmp_path / f"{i:03d}.png")
    found = Images(tmp_path, [], 4, None)
    assert len(found.pieces) == FILES and found.pieces[0].name == "000.png" and found.pieces[-1].name == "298.png"
    assert "256 of 300 files, evenly by name" in found.notes
    (tmp_path / "long.txt").write_text("color of 17 now " * (CHARACTERS // 8))
    passages, notes = read_passages(engine, tmp_path, [], block=16)
    read = len(engine.encoder.tokens.document("color of 17 now " * (CHARACTERS // 16)))
    assert len(passages) == read // (5 * 16 + 1 + NEXT) > 100, "half of the file is beyond what is read"
    assert notes[-1] == f"at most the first {CHARACTERS:,} characters of a file"


def test_texts_are_passages_that_share_nothing_in_an_order_of_their_own(engine: HFEngine, tmp_path: Path) -> None:
    text = " ".join(f"color of {i}" for i in range(400))
    (tmp_path / "a.txt").write_text(text)
    passages, _ = read_passages(engine, tmp_path, ["Who?", "Where?"], block=12)
    ids, size, found = engine.encoder.tokens.document(text), (WINDOW + 1) * 12 + 1 + NEXT, []
    for passage in passages:
        chunks = [engine.encode(chunk).token_ids for chunk in passage.chunks]
        assert [len(chunk) for chunk in chunks] == [12] * (WINDOW + 1) and len(passage.following) == 1 + NEXT
        found.append([*(token for chunk in chunks for token in chunk), *passage.following])
    whole = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    assert sorted(found) == sorted(whole) and found != whole and len(whole) > 10
    assert [passage.question for passage in passages[:3]] == ["Who?", "Where?", "Who?"]
    assert read_passages(engine, tmp_path, [], block=10_000)[0] == []


def test_the_command_writes_a_report_a_result_and_a_profile(model_dir: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke(model_dir, "--images", pictures, "--output", out, "--max-tokens", 2, "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed["verdict"]["finding"] == "unread" and printed["fidelity"] == {"mode": "exact"}
    assert printed["source"]["name"] == "images"
    files = printed.pop("files")
    assert json.loads((out / "probe.json").read_text()) == printed
    assert {Path(path).name for path in files.values()} == {p.name for p in out.iterdir()}
    assert "no verdict" in (out / "probe.html").read_text()
    assert (out / "ctxwin-profile.json").is_file() and not (model_dir / "ctxwin-profile.json").exists()
    (model_dir / "ctxwin-profile.json").write_text((out / "ctxwin-profile.json").read_text())
    try:
        found = find_profile(model_dir)
        assert found is not None and found.finding == "unread"
        assert resolve(Fidelity(), str(model_dir)).mode == "exact"
    finally:
        (model_dir / "ctxwin-profile.json").unlink()


def test_the_summary_begins_with_the_verdict(text_model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.md").write_text("what color is the shape of a frame now " * 200)
    result = invoke(text_model, "--texts", texts, "--no-profile", "--max-tokens", 2)
    assert result.exit_code == 0, result.stderr
    assert "keep exact" in result.stdout.splitlines()[0] and "0.01 nats a token of text lost" in result.stdout
    assert "no profile was written" in result.stdout and "now means" not in result.stdout
    assert not (text_model / "ctxwin-profile.json").exists()
    assert (tmp_path / "probe-output" / "probe.html").is_file()


def test_a_text_model_needs_no_texts_of_yours(text_model: Path) -> None:
    result = invoke(text_model, "--json", "--no-profile", "--minutes", 0.001, "--excess-budget", 0.02)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["source"]["name"], printed["source"]["about"]) == (
        "texts",
        "Python's reference, in blocks of 64 tokens",
    )
    assert printed["verdict"]["limits"] == {"budget": 0.01, "excess_budget": 0.02, "level": 0.95}
    assert "exact answers differ" in printed["floor"]


def test_bad_input_is_one_line(model_dir: Path, text_model: Path, pictures: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(invoke(model_dir, "--images", empty), "must hold pictures or videos", "empty")
    refused(invoke(model_dir, "--images", tmp_path / "nowhere"), "must lie in a folder")
    refused(invoke(model_dir, "--images", pictures, "--texts", pictures), "got both")
    refused(invoke(model_dir, "--questions", pictures / "notes.txt"), "need --images or --texts")
    refused(invoke(model_dir, "--images", pictures, "--questions", empty), "readable text file")
    refused(invoke(model_dir, "--minutes", 0), "minutes must be > 0")
    refused(invoke(model_dir, "--flips", 1.5), "flips must be between 0 and 1")
    refused(invoke(model_dir, "--excess-budget", 0.5), "excess_budget must be between 0 and 0.25")
    refused(invoke(empty), "config.json")
    refused(invoke(text_model, "--images", pictures), "reads text only", "--texts")
    refused(invoke("vllm:some/model"), "some/model")
    refused(invoke("hf:some/model", "--engine", "vllm"), "must agree")
    refused(invoke(model_dir, "--device", "nowhere"), "device must be")
    (empty / "broken.png").write_bytes(b"not a png")
    refused(invoke(model_dir, "--images", empty), "broken.png")


def test_a_model_the_engine_refuses_is_one_line(tmp_path: Path) -> None:
    from engines.models import edit_config, write_text_model

    folder = write_text_model(tmp_path / "refused")
    edit_config(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    refused(invoke(folder), "dynamic")


def test_only_a_profile_that_windows_find_is_said_to_be_followed(text_model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.md").write_text("what color is the shape of a frame now " * 200)
    made = invoke(text_model, "--texts", texts, "--output", tmp_path / "[out]", "--max-tokens", 2)
    assert made.exit_code == 0, made.stderr
    assert "once this lies beside the weights: " in made.stdout and "now means" not in made.stdout
    assert str(tmp_path / "[out]" / "ctxwin-profile.json") in made.stdout, "a path is printed as it is"
    assert find_profile(text_model) is None
    bad = invoke(text_model, "--texts", texts, "--output", tmp_path / "[out]", "--max-tokens", 3)
    refused(bad, "must hold samples of this configuration, got max_tokens 2 there, 3 now")
    made = invoke(text_model, "--texts", texts, "--max-tokens", 2)
    assert f"now means mode=exact: {text_model / 'ctxwin-profile.json'}" in made.stdout, made.stdout
    assert find_profile(text_model) is not None


def test_what_was_measured_outlives_a_profile_that_cannot_be_written(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.md").write_text("what color is the shape of a frame now " * 200)
    out = tmp_path / "out"
    (out / "ctxwin-profile.json").mkdir(parents=True)
    made = invoke(text_model, "--texts", texts, "--output", out, "--max-tokens", 2)
    assert made.exit_code == 2
    progress, error = made.stderr.strip().splitlines()
    assert progress.startswith("what exact answers differ by: 1 of "), "how far it has come, off a terminal too"
    assert error.startswith("error: ") and "ctxwin-profile.json" in error
    assert json.loads((out / "probe.json").read_text())["fidelity"] == {"mode": "exact"}
    # A bad folder is found before anything is measured.
    monkeypatch.setattr("ctxwin_evals.probe.texts.judge", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    refused(invoke(text_model, "--texts", texts, "--output", tmp_path / "file"), "file")
