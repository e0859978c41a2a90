"""Malformed data: errors name file and line, and nothing is half loaded."""

from __future__ import annotations

import gc
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark_data import write_milebench, write_mm_niah, write_video_mme
from ctxwin.errors import BadMedia
from ctxwin_evals.benchmarks import DataOptions, Missing, benchmark
from ctxwin_evals.benchmarks.mm_niah import Row
from ctxwin_evals.items import Item

TASK = "mm-niah/retrieval-image"
Change = Callable[[dict[str, Any]], Any]


def items(root: Path, name: str = TASK, n: int | None = None, **options: Any) -> list[Item]:
    return list(benchmark(name, DataOptions(data=str(root), **options)).items(n))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated once; each test damages a copy."""
    root = tmp_path_factory.mktemp("whole")
    write_mm_niah(root / "niah", 3, lengths=(200,), image_size=56)
    write_video_mme(root / "mme", 6, seconds=(2, 2, 2), image_size=56)
    write_milebench(root / "mile", 2, steps=2, image_size=56)
    return root


@pytest.fixture
def niah(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole / "niah", tmp_path / "niah"))


@pytest.fixture
def mile(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole / "mile", tmp_path / "mile"))


@pytest.fixture
def lines(niah: Path) -> Path:
    return niah / "mm_niah_val" / "annotations" / "retrieval-image.jsonl"


def change(lines: Path, row: int, how: Change) -> None:
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    how(rows[row])
    lines.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_scoring_needs_no_data_but_items_do() -> None:
    task = benchmark(TASK)
    assert task.score("A", 0, {}).score == 1
    assert task.config()["data"] is None
    with pytest.raises(ValueError, match=r"mm-niah/retrieval-image must be given its data.*data=FOLDER or hub:"):
        task.items()


def test_unknown_names_and_options() -> None:
    with pytest.raises(ValueError, match="must be one of mm-niah/retrieval-text"):
        benchmark("mm-niah/retrieval")
    with pytest.raises(ValueError, match="split of video-mme must be one of test; got 'val'"):
        benchmark("video-mme", DataOptions(split="val"))
    for bad in ({"frames": 0}, {"frame_rule": "all"}, {"max_pixels": 1}, {"text_words": 0}, {"data": ""}):
        with pytest.raises(ValueError, match=r"must be"):
            DataOptions(**bad)  # type: ignore[arg-type]


def test_empty_and_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="official layout, got"):
        items(tmp_path)
    with pytest.raises(ValueError, match="official layout, got"):
        items(tmp_path / "nowhere")
    (tmp_path / "other").touch()
    for name in (TASK, "milebench/StateChange", "video-mme"):
        with pytest.raises(ValueError, match=r"must find its .*, got no file"):
            items(tmp_path, name)


def test_the_folder_of_a_split_is_taken_for_that_split_only(niah: Path) -> None:
    assert len(items(niah / "mm_niah_val")) == 3
    with pytest.raises(ValueError, match=r"got no file .*mm_niah_test"):
        items(niah / "mm_niah_val", split="test")


def test_an_empty_annotation_file(niah: Path, lines: Path) -> None:
    lines.write_text("")
    with pytest.raises(ValueError, match="must hold items of mm-niah/retrieval-image, got none"):
        items(niah)


def test_a_torn_line_is_named(niah: Path, lines: Path) -> None:
    raw = lines.read_bytes()
    lines.write_bytes(raw[:-20])
    with pytest.raises(ValueError, match=r"retrieval-image\.jsonl:3 must be one JSON object.*cut short"):
        items(niah)
    assert len(items(niah, n=2)) == 2  # the line is not reached


@pytest.mark.parametrize("damage", [lambda raw: raw.replace(b"\n", b"}\n", 1), lambda raw: b"\xff" + raw])
def test_a_line_that_is_no_json_is_left_out_and_named(
    niah: Path, lines: Path, damage: Callable[[bytes], bytes]
) -> None:
    raw = lines.read_bytes()
    lines.write_bytes(damage(raw))
    task = benchmark(TASK, DataOptions(data=str(niah)))
    assert len(task.items()) == 2
    (reason,) = task.odd
    assert "retrieval-image.jsonl:1 must be one JSON object" in reason
    lines.write_bytes(damage(raw.partition(b"\n")[0] + b"\n"))
    with pytest.raises(ValueError, match=r"jsonl:1 must be one JSON object"):
        items(niah)  # nothing else is there


def test_a_byte_order_mark_hides_no_row(niah: Path, lines: Path) -> None:
    count = len(items(niah))
    lines.write_bytes(b"\xef\xbb\xbf" + lines.read_bytes())
    marked = items(niah)
    assert len(marked) == count
    assert marked[0].load()  # read again at its offset


def test_a_last_line_without_its_end_is_whole_if_it_is_json(niah: Path, lines: Path) -> None:
    lines.write_bytes(lines.read_bytes().rstrip(b"\n"))
    assert len(items(niah)) == 3


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda r: r["images_list"].append("x.png"),
            r"jsonl:2: <image> must occur once a picture.*got 1 of them and 2",
        ),
        (lambda r: r.update(context=r["context"] + "<image>"), r"jsonl:2: <image> must occur once a picture"),
        (lambda r: r.pop("question"), r"jsonl:2: question must be given"),
        (
            lambda r: r.update(answer=None),
            r"jsonl:2: answer must be a valid integer or a valid string or a valid list, got None",
        ),
        (lambda r: r.update(answer=4), r"jsonl:2: the answer must be the index of a choice"),
        (lambda r: r.update(id=0), r"jsonl:2: ids must be unique"),
        (lambda r: r["meta"].update(choices=["a"]), r"jsonl:2: only one of choices"),
        (lambda r: r["meta"].update(placed_depth=[]), r"jsonl:2 meta: placed_depth"),
        (lambda r: r["meta"].update(placed_depth=1.5), r"jsonl:2 meta: placed_depth"),
        (lambda r: r["meta"].update(num_images=float("nan")), r"jsonl:2: meta.num_images.* must be a finite number"),
        (
            lambda r: r["images_list"].__setitem__(0, "../../x.png"),
            r"jsonl:2: a picture must be a relative path inside",
        ),
        (
            lambda r: r["images_list"].__setitem__(0, "/etc/passwd"),
            r"jsonl:2: a picture must be a relative path inside",
        ),
    ],
)
def test_wrong_rows_are_named_and_left_out(
    niah: Path, lines: Path, how: Change, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(lines, 1, how)
    task = benchmark(TASK, DataOptions(data=str(niah), skip_missing=True))
    if "unique" in message:  # the file is another one
        with pytest.raises(ValueError, match=message):
            task.items()
        return
    assert [item.index for item in task.items()] == [0, 2]
    (odd,) = task.odd
    assert re.search(message, odd)
    assert odd in caplog.text
    assert "1 rows left out" in caplog.text
    for row in (0, 2):
        change(lines, row, lambda r: r.pop("question"))
    with pytest.raises(ValueError, match=r"jsonl:1: question must be given"):  # nothing is left
        items(niah)


def test_counting_answers_must_be_lists(niah: Path) -> None:
    path = niah / "mm_niah_val" / "annotations" / "counting-text.jsonl"
    change(path, 0, lambda r: r.update(answer="[3, 4]"))
    assert items(niah, "mm-niah/counting-text")[0].target == [3, 4]
    for answer, message in (("three", "the answer must be a list of counts, got 'three'"), ("[3, 1e999]", "finite")):
        change(path, 0, lambda r, answer=answer: r.update(answer=answer))
        task = benchmark("mm-niah/counting-text", DataOptions(data=str(niah)))
        assert len(task.items()) == 2
        assert "jsonl:1: " in task.odd[0] and message in task.odd[0]


def test_missing_pictures(niah: Path) -> None:
    gone = niah / "mm_niah_val" / "images" / "retrieval-image" / "0001-choice-2.png"
    gone.unlink()
    with pytest.raises(Missing, match=r"jsonl:2 must find its media, got no file .*0001-choice-2\.png"):
        items(niah)
    task = benchmark(TASK, DataOptions(data=str(niah), skip_missing=True))
    assert [i.index for i in task.items()] == [0, 2]  # an index is the row's, whatever is left out
    assert task.skipped == ("1",)


def test_undecodable_pictures_are_named_when_read(niah: Path) -> None:
    (item, *_) = items(niah)
    path = niah / "mm_niah_val" / "images" / "retrieval-image" / "0000-choice-0.png"
    path.write_bytes(b"no picture")
    with pytest.raises(BadMedia, match=r"0000-choice-0\.png"):
        item.load()


def test_items_do_not_keep_their_documents(niah: Path) -> None:
    made = items(niah)
    gc.collect()
    assert len(made) > 1
    assert not [found for found in gc.get_objects() if type(found) is Row]


def test_one_folder_is_one_configuration_however_it_is_spelled(niah: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(niah.parent)
    spelled = [benchmark(TASK, DataOptions(data=data)).config() for data in (niah.name, str(niah), f"./{niah.name}/")]
    assert spelled[0] == spelled[1] == spelled[2]
    assert benchmark(TASK, DataOptions(data="hub:a/b")).config()["data"] == "hub:a/b"


def test_a_file_that_changes_under_its_items(niah: Path, lines: Path) -> None:
    (first, *_) = items(niah)
    change(lines, 0, lambda r: r.update(context="Other. <image>"))
    with pytest.raises(ValueError, match="must stay as it is"):
        first.load()


@pytest.fixture
def mme(tmp_path: Path, whole: Path) -> Path:
    return Path(shutil.copytree(whole / "mme", tmp_path / "mme"))


def test_missing_videos(mme: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = items(mme, "video-mme")[0]
    (mme / "video" / f"{first.cluster}.mp4").unlink()
    with pytest.raises(Missing, match=r"parquet row 0 must find its video, got none of video/.*skip_missing"):
        items(mme, "video-mme")
    task = benchmark("video-mme", DataOptions(data=str(mme), skip_missing=True))
    assert [i.index for i in task.items(2)] == [3, 4]
    assert len(task.skipped) == 3
    task.items(2)
    (named,) = (
        line for line in caplog.text.splitlines() if "3 items left out" in line
    )  # a run asks for its items twice
    assert named.endswith(f"their media are missing: {', '.join(task.skipped)}")
    for path in (mme / "video").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"got none \(6 without media\)"):
        task.items()


def test_no_subtitles_at_all(mme: Path) -> None:
    for path in (mme / "subtitle").iterdir():
        path.unlink()
    (mme / "subtitle").rmdir()
    assert len(items(mme, "video-mme")) == 6
    with pytest.raises(ValueError, match="with subtitles must find them, got no folder"):
        items(mme, "video-mme", subtitles=True)


def test_a_subtitle_file_that_is_none(mme: Path) -> None:
    item = items(mme, "video-mme", subtitles=True)[0]
    (mme / "subtitle" / f"{item.cluster}.srt").write_text("no\nsubtitles\n")
    with pytest.raises(ValueError, match=r"must be a subtitle file \(.srt"):
        item.load()


def test_videos_that_are_none(mme: Path) -> None:
    item = items(mme, "video-mme")[0]
    (mme / "video" / f"{item.cluster}.mp4").write_bytes(b"no video")
    with pytest.raises(BadMedia, match="must be decodable by OpenCV"):
        item.load()


def rewrite(path: Path, how: Callable[[list[dict[str, Any]]], Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    how(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda rows: [r.pop("domain") for r in rows], "must have the columns of Video-MME, got none named domain"),
        (lambda rows: rows[1].update(answer="E"), "row 1: answer must be 'A', 'B', 'C' or 'D', got 'E'"),
        (lambda rows: rows[1].update(answer=""), "row 1: answer must be 'A', 'B'"),
        (lambda rows: rows[1].update(question=None), "row 1: question must be a valid string"),
        (lambda rows: rows[1].update(duration="brief"), "row 1: duration must be 'short', 'medium' or 'long'"),
        (lambda rows: rows[1].update(options=["A. x", "B. y"]), "row 1: options must be"),
        (lambda rows: rows[1].update(videoID="../x"), "row 1: videoID must be a plain name"),
        (lambda rows: rows[1].update(question_id="001-1"), "row 1: ids must be unique"),
    ],
)
def test_wrong_parquet_rows_are_named(mme: Path, how: Any, message: str) -> None:
    """A row is left out; a column that lacks, or an id that is there twice, makes the file another one."""
    rewrite(mme / "videomme" / "test-00000-of-00001.parquet", how)
    task = benchmark("video-mme", DataOptions(data=str(mme)))
    if "must have the columns" in message or "unique" in message:
        with pytest.raises(ValueError, match=message):
            task.items()
    else:
        assert [item.index for item in task.items()] == [0, 2, 3, 4, 5]
        assert re.search(message, task.odd[0])


@pytest.mark.parametrize("keep", [0, 100, -9])
def test_a_torn_parquet_file(mme: Path, keep: int) -> None:
    path = mme / "videomme" / "test-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"must be a whole parquet file"):
        items(mme, "video-mme")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda d: d["data"][1]["task_instance"]["images_path"].pop(),
            "sample 1: the context must hold one placeholder a picture",
        ),
        (lambda d: d["data"][1]["task_instance"].pop("choice_list"), "sample 1.*choice_list must be given"),
        (lambda d: d["data"][1].update(response="Nothing."), "sample 1: response must be one of the choices"),
        (lambda d: d["data"][1].update(task_instruction_id=2), "sample 1: task_instruction_id must be one of 2"),
        (lambda d: d["data"][1].update(sample_id=0), "sample 0: ids must be unique"),
        (lambda d: d["meta_data"].update(question_type="open-ended"), "question_type must be 'multi-choice'"),
        (lambda d: d.pop("data"), "data must be given"),
    ],
)
def test_wrong_milebench_samples_are_named(mile: Path, how: Change, message: str) -> None:
    path = mile / "StateChange" / "StateChange.json"
    content = json.loads(path.read_text())
    how(content)
    path.write_text(json.dumps(content))
    task = benchmark("milebench/StateChange", DataOptions(data=str(mile)))
    if message.startswith("sample 1"):
        assert [item.index for item in task.items()] == [0]
        assert re.search(f"StateChange.json.*{message}", task.odd[0])
    else:
        with pytest.raises(ValueError, match=f"StateChange.json.*{message}"):
            task.items()


def test_milebench_files(mile: Path) -> None:
    base = mile / "StateChange"
    (base / "images" / "0001-0.png").unlink()
    with pytest.raises(Missing, match=r"sample 1 must find its media, got no file .*0001-0\.png"):
        items(mile, "milebench/StateChange")
    assert len(items(mile, "milebench/StateChange", skip_missing=True)) == 1
    (base / "StateChange-adv.json").write_text((base / "StateChange.json").read_text()[:-30])
    with pytest.raises(ValueError, match=r"StateChange-adv\.json must be JSON in UTF-8"):
        items(mile, "milebench/StateChange", split="adv")
