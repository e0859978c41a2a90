"""What the generators wrote is what the loaders give, and both do the same twice."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmark_data import write_egoschema, write_milebench, write_mm_niah, write_musique, write_video_mme
from benchmark_data.prose import PICTURE, Needle, write_document
from benchmark_data.reading import as_text
from ctxwin_evals.benchmarks import BENCHMARKS, DataOptions, benchmark
from ctxwin_evals.benchmarks.mm_niah import cell_of
from ctxwin_evals.items import Item

SIZE = 56
NIAH = [name for name in BENCHMARKS if name.startswith("mm-niah/")]
MILE = [name for name in BENCHMARKS if name.startswith("milebench/")]


@pytest.fixture(scope="module")
def niah(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    root = tmp_path_factory.mktemp("niah")
    return root, write_mm_niah(root, 4, seed=1, lengths=(200, 1500), image_size=SIZE)


@pytest.fixture(scope="module")
def mme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("mme")
    return root, write_video_mme(root, 10, seed=1, seconds=(2, 2.5, 3), image_size=SIZE)


@pytest.fixture(scope="module")
def mile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("mile")
    return root, write_milebench(root, 3, seed=1, image_size=SIZE)


def shown(item: Item) -> tuple[str, list[np.ndarray]]:
    chunks = item.load()
    pixels = [p for c in chunks for m in c.media for p in (c.pixels(m) if c.pixels(m) is not None else ())]
    assert [c.id for c in item.load()] == [c.id for c in chunks]
    return as_text(chunks, item.query), pixels


def right(item: Item) -> str:
    """The right answer in words that the rules accept."""
    if isinstance(item.target, int):
        return chr(ord("A") + item.target)
    if isinstance(item.target, dict):
        return str(item.target["response"])
    return str(item.target)


@pytest.mark.parametrize("name", NIAH)
def test_mm_niah(niah: tuple[Path, dict[str, list[dict[str, Any]]]], name: str) -> None:
    root, rows = niah
    task = benchmark(name, DataOptions(data=str(root), text_words=40))
    items = task.items()
    assert [i.doc_id for i in items] == [str(r["id"]) for r in rows[name]]
    for item, row in zip(items, rows[name], strict=True):
        text, pixels = shown(item)
        assert text.startswith(f"{row['context']}\n{row['question']}")
        assert item.target == row["answer"]
        names = row["images_list"] + (row["meta"]["choices_image_path"] or [])
        images = [np.asarray(Image.open(root / "mm_niah_val" / "images" / n)) for n in names]
        assert len(images) == len(pixels)
        assert all(np.array_equal(a, b) for a, b in zip(images, pixels, strict=True))
        assert task.score(right(item), item.target, item.meta).score == 1
        assert task.score("I do not know", item.target, item.meta).score == 0
        held = [item.load()[i] for i in item.meta["needle_chunks"]]
        assert held and (item.asked is None) == (len(held) != 1)
        for needle in row["meta"]["needles"]:
            assert needle in as_text(held, "") or needle in names
        length = row["meta"]["context_length"]
        assert length == row["meta"]["context_length_text"] + row["meta"]["context_length_image"]
        # Small ones are as long as their needles need; long ones are as long as was asked for.
        assert item.index % 2 == 0 or abs(length - 1500) < 200
    assert len({i.cluster for i in items}) == len(items)
    assert task.control == (name == "mm-niah/retrieval-text")


def test_mm_niah_depths_are_spread(tmp_path: Path) -> None:
    rows = write_mm_niah(tmp_path, 5, lengths=(1100,), image_size=SIZE)
    for found in rows.values():
        cells = [cell_of(r["meta"]["context_length"], r["meta"]["placed_depth"]) for r in found]
        assert {c[0] for c in cells} == {1}
        assert len({c[1] for c in cells}) >= 4


@pytest.mark.parametrize("budget", [3000, 40_000])
def test_documents_are_as_long_and_needles_as_deep_as_wanted(budget: int) -> None:
    wanted = [0.0, 0.3, 0.5, 0.99]
    needles = [Needle(d, f"Needle {i}.") for i, d in enumerate(wanted[:3])] + [Needle(wanted[3], picture="n.png")]
    document = write_document(np.random.default_rng(3), budget, needles, 64)
    assert abs(document.text_tokens + document.picture_tokens - budget) < 200
    assert np.abs(np.subtract(document.depths, wanted)).max() < 0.05
    assert document.context.count(PICTURE) == len(document.pictures) == document.picture_tokens // 64
    assert "n.png" in document.pictures[-3:]
    at = [document.context.index(f"Needle {i}.") / len(document.context) for i in range(3)]
    assert at == sorted(at)


def test_questions_about_one_document_share_a_cluster(tmp_path: Path) -> None:
    from ctxwin_evals.benchmarks.mm_niah import document_of, parse_row

    def row(context: str, images: list[str], needles: list[str]) -> str:
        meta = {"placed_depth": 0.5, "context_length": 100, "needles": needles}
        line = {"id": 0, "context": context, "question": "?", "answer": "x", "images_list": images, "meta": meta}
        return document_of(parse_row(line, "here"))

    assert row("a X <image> b <image>", ["1", "2"], ["X"]) == row("a <image> Y b <image>", ["1", "2"], ["Y"])
    assert row("<image><image>", ["1", "n"], ["n"]) == row("<image><image>", ["m", "1"], ["m"])
    assert row("<image>", ["1"], []) != row("<image>", ["2"], [])
    assert row("one two X", [], ["X"]) == row("one Y two", [], ["Y"])
    assert row("one two", [], []) != row("one three", [], [])


@pytest.mark.parametrize(
    "options",
    [
        {"frames": 4},
        {"frames": 5, "subtitles": True, "frame_rule": "qwen-vl-utils"},
        {"as_video": True, "max_pixels": 1000},
    ],
)
def test_video_mme(mme: tuple[Path, list[dict[str, Any]]], options: dict[str, Any]) -> None:
    root, rows = mme
    task = benchmark("video-mme", DataOptions(data=str(root), **options))
    items = task.items()
    assert [i.doc_id for i in items] == [r["question_id"] for r in rows]
    assert [i.cluster for i in items] == [r["videoID"] for r in rows]
    for item, row in zip(items, rows, strict=True):
        text, pixels = shown(item)
        assert f"{row['question']}\n" + "\n".join(row["options"]) in text
        assert task.score(right(item), row["answer"], item.meta).score == 1
        frames = 4 if options.get("frames") else 8
        assert len(pixels) == len(item.meta["frame_indices"]) == item.meta["frames"] == frames
        side = 31 if "max_pixels" in options else SIZE
        assert {p.shape for p in pixels} == {(side, side, 3)}
        assert item.meta["frame_size"] == [side, side]
    if "subtitles" in options:
        assert [i.meta["subtitles"] for i in items] == ["used"] * 9 + ["missing"]
        assert "Now you see a " in as_text(items[0].load(), items[0].query)
    assert task.config()["frame_rule"] == options.get("frame_rule", "vlmevalkit")


@pytest.mark.parametrize("name", MILE)
def test_milebench(mile: tuple[Path, dict[str, Any]], name: str) -> None:
    root, made = mile
    task = benchmark(name, DataOptions(data=str(root)))
    items = task.items()
    assert len(items) == 3 and len(made[name]["data"]) == 3
    for item, sample in zip(items, made[name]["data"], strict=True):
        text, pixels = shown(item)
        folder = root / name.partition("/")[2] / "images"
        images = [np.asarray(Image.open(folder / n)) for n in sample["task_instance"]["images_path"]]
        assert all(np.array_equal(a, b) for a, b in zip(images, pixels, strict=True))
        assert text.startswith(made[name]["meta_data"]["task_instruction"][sample["task_instruction_id"]])
        assert all(c in text for c in sample["task_instance"]["choice_list"])
        assert task.score(right(item), item.target, item.meta).score == 1
        wrong = next(c for c in sample["task_instance"]["choice_list"] if c != sample["response"])
        assert task.score(wrong, item.target, item.meta).score == 0


def files(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()
    }


def write_all(root: Path, seed: int) -> None:
    write_mm_niah(root, 2, seed, lengths=(200,), image_size=SIZE)
    write_video_mme(root, 3, seed, (2, 2, 2), SIZE)
    write_milebench(root, 1, seed, 2, SIZE)
    write_egoschema(root / "ego", 2, seed, image_size=SIZE)
    write_musique(root / "musique", 2, seed)


def test_generators_depend_on_their_seed_only(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_all(tmp_path / name, seed)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    first, other = files(tmp_path / "a"), files(tmp_path / "c")
    assert not {first[f] for f in first if not f.endswith(".png")} & set(other.values())
    # The picture of a single thing can come up twice.
    assert sum(other.get(f) == h for f, h in first.items()) < len(first) / 20


def test_a_row_depends_on_its_index_only(tmp_path: Path) -> None:
    few = write_mm_niah(tmp_path / "few", 1, lengths=(200,), image_size=SIZE)
    many = write_mm_niah(tmp_path / "many", 3, lengths=(200,), image_size=SIZE)
    assert {k: v[0] for k, v in few.items()} == {k: v[0] for k, v in many.items()}


def test_items_change_their_digest_with_what_is_shown(niah: tuple[Path, Any], mme: tuple[Path, Any]) -> None:
    def one(root: Path, name: str, **options: Any) -> str:
        return benchmark(name, DataOptions(data=str(root), **options)).items(1)[0].digest

    assert one(niah[0], NIAH[0]) == one(niah[0], NIAH[0], max_tokens=3)
    assert (
        len({one(niah[0], NIAH[0]), one(niah[0], NIAH[0], max_pixels=800), one(niah[0], NIAH[0], text_words=50)}) == 3
    )
    settings: list[dict[str, Any]] = [{}, {"frames": 3}, {"as_video": True}, {"times": True}, {"subtitles": True}]
    assert len({one(mme[0], "video-mme", **s) for s in settings}) == len(settings)


def test_exports_go_by_the_task(niah: tuple[Path, Any], mme: tuple[Path, Any], mile: tuple[Path, Any]) -> None:
    for root, name in ((niah[0], NIAH[3]), (mme[0], "video-mme"), (mile[0], MILE[0])):
        task = benchmark(name, DataOptions(data=str(root), frames=2))
        rows = [
            {"doc_id": i.doc_id, "answer": right(i), "target": i.target, "meta": dict(i.meta), "score": 1.0}
            for i in task.items()
        ]
        assert json.dumps(rows[-1]["answer"], ensure_ascii=False) in task.export(rows)
        assert {task.official(rows).get(k) for k in ("mean", "accuracy")} == {1.0, None}


def test_pictures_are_scaled_down_to_the_budget(niah: tuple[Path, Any]) -> None:
    for item in benchmark(NIAH[1], DataOptions(data=str(niah[0]), max_pixels=30 * 30)).items():
        assert {p.shape for p in shown(item)[1]} == {(30, 30, 3)}


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: write_mm_niah(p, 0), "n must be"),
        (lambda p: write_mm_niah(p, 1, split="train"), "split val or test"),
        (lambda p: write_video_mme(p, 1, seconds=(1, 1)), "three numbers"),
        (lambda p: write_milebench(p, 1, steps=1), "steps >= 2"),
        (lambda p: write_egoschema(p, 0), "n must be"),
        (lambda p: write_musique(p, 0), "n must be"),
    ],
)
def test_bad_numbers_write_nothing(tmp_path: Path, write: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from benchmark_data.__main__ import app

    run = CliRunner().invoke
    out = ["--out", str(tmp_path), "--n", "1", "--image-size", "56"]
    for args in (["mm-niah", "--lengths", "200"], ["video-mme", "--seconds", "2,2,2"], ["milebench", "--steps", "2"]):
        result = run(app, [*args, *out])
        assert result.exit_code == 0, result.output
    for args in (["egoschema", "--hub", *out], ["musique", *out[:4]]):
        assert run(app, args).exit_code == 0
    for name in ("milebench/StateChange", "egoschema", "musique/supporting"):
        assert len(benchmark(name, DataOptions(data=str(tmp_path))).items()) == 1
    result = run(app, ["mm-niah", "--lengths", "many", *out])
    assert result.exit_code == 2 and "must be numbers" in result.stderr
