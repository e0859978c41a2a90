"""MMDU and SparklesEval: every answer is a question behind the turns in front of it, as the chat template renders them."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ctxwin import Window, open_engine
from ctxwin.engines.base import Engine
from ctxwin_evals.benchmarks import DataOptions, Missing, benchmark
from ctxwin_evals.benchmarks.dialogues import PLACEHOLDER
from engines.scripted import ScriptedEngine
from engines.tool_models import write_tool_model

MMDU: list[dict[str, Any]] = [
    {
        "id": 7,
        "image": ["mmdu_pics/a.png", "b.png", "c.png"],
        "conversations": [
            {"from": "user", "value": f"Image 1: {PLACEHOLDER}. Image 2: {PLACEHOLDER}.\nWhat do they share?"},
            {"from": "assistant", "value": "Both are red."},
            {"from": "user", "value": f"And this one? {PLACEHOLDER}"},
            {"from": "assistant", "value": "It is blue."},
        ],
    },
    {
        "id": "x",
        "image": [],
        "conversations": [{"from": "user", "value": "Hello"}, {"from": "assistant", "value": "Hello."}],
    },
]
SPARKLES: list[dict[str, Any]] = [
    {
        "evaluation_id": 1,
        "dialogue": [
            {"content": "Compare IMAGE#11 with IMAGE#22; is IMAGE#11 older?", "images": [{"image_id": 11}, {"image_id": "22"}]},
            {"content": "IMAGE#11 is."},
            {"content": "Is IMAGE#33 like it?", "images": [{"image_id": 33}]},
            {"content": "No."},
        ],
    }
]  # fmt: skip


def write(root: Path, mmdu: Any = MMDU, sparkles: Any = SPARKLES) -> DataOptions:
    for folder, names in (("mmdu_pics", ("a.png", "b.png", "c.png")), ("images", ("11.jpg", "22.jpg", "33.jpg"))):
        (root / folder).mkdir(exist_ok=True)
        for i, name in enumerate(names):
            Image.fromarray(np.full((56, 56, 3), 40 + 60 * i, np.uint8)).save(root / folder / name)
    (root / "benchmark.json").write_text(json.dumps(mmdu))
    (root / "sparkleseval.json").write_text(json.dumps(sparkles))
    return DataOptions(data=str(root))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with open_engine(f"hf:{write_tool_model(tmp_path_factory.mktemp('vision'), vision=True)}", dtype="float32") as made:
        yield made


def rendered(engine: Engine, messages: list[dict[str, Any]]) -> str:
    tokenizer = engine.encoder.checkpoint.tokenizer  # type: ignore[attr-defined]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def user(*parts: str) -> dict[str, Any]:
    content = [{"type": "image"} if part == PLACEHOLDER else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": content}


def test_prompts_are_the_dialogues_own(engine: Engine, tmp_path: Path) -> None:
    options = write(tmp_path)
    said = ["Image 1: ", PLACEHOLDER, ". Image 2: ", PLACEHOLDER, ".\nWhat do they share?"]
    spark = ["Compare IMAGE#11", PLACEHOLDER, " with IMAGE#22", PLACEHOLDER, "; is IMAGE#11 older?"]
    wanted = {
        "7/0": [user(*said)],
        "7/1": [
            user(*said), {"role": "assistant", "content": "Both are red."},
            user("And this one? ", PLACEHOLDER, "And this one?"),  # nothing stands behind the picture
        ],
        "1/0": [user(*spark)],
        "1/1": [user(*spark), {"role": "assistant", "content": "IMAGE#11 is."}, user("Is IMAGE#33", PLACEHOLDER, " like it?")],
    }  # fmt: skip
    scripted = ScriptedEngine(engine, lambda prompt: "x")
    for item in (*benchmark("mmdu", options).items(2), *benchmark("sparkles", options).items()):
        chunks = item.load()
        assert (
            len(chunks) == item.count
            and item.max_tokens == 512
            and item.cluster.endswith(item.doc_id.partition("/")[0])
        )
        with Window(scripted, "", 4000) as window:
            window.extend(list(chunks))
            window.ask(item.query, 2)
        shown = scripted.prompts[-1].replace("<|image_pad|>", "")
        assert "".join(shown.split()) == "".join(
            rendered(engine, wanted[item.doc_id]).replace("<|image_pad|>", "").split()
        )


@pytest.mark.parametrize("root", [".", "evaluation/SparklesEval"])
def test_sparkleseval_lies_as_its_authors_give_it(tmp_path: Path, root: str) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    wanted = benchmark("sparkles", write(plain)).items()
    tagged = json.loads(re.sub(r"(IMAGE#\d+)", r"\1<Img><ImageHere></Img>", json.dumps(SPARKLES)))
    for said in tagged[0]["dialogue"][1::2]:
        said["content"] = said["content"].replace("<Img><ImageHere></Img>", "")  # answers have no pictures
    folder = tmp_path / "given" / root
    (folder / "annotations").mkdir(parents=True)
    (folder / "annotations/sparkles_evaluation_sparkleseval_annotations.json").write_text(json.dumps(tagged))
    (plain / "images").rename(folder / "images")
    found = benchmark("sparkles", DataOptions(data=str(tmp_path / "given"))).items()
    assert [(item.query, item.target, item.digest) for item in found] == [
        (item.query, item.target, item.digest) for item in wanted
    ]
    assert len(found) == 2 and len(found[1].load()) == found[1].count


def test_references_are_scored_by_rouge_l_and_exported_for_a_judge(tmp_path: Path) -> None:
    task = benchmark("mmdu", write(tmp_path))
    first, second, hello = [*task.items(2), None]
    assert (first.target, second.target, hello) == ("Both are red.", "It is blue.", None)
    assert task.score("both are red", first.target, first.meta).score == 1
    assert task.score("they are red", first.target, first.meta).score == pytest.approx(2 / 3)
    assert task.score("", first.target, first.meta).score == 0
    rows = [{"doc_id": "7/0", "meta": first.meta, "target": first.target, "answer": "red"}]
    (line,) = map(json.loads, task.export(rows).splitlines())
    assert line == {
        "id": "7/0", "turn": 1, "images": ["a.png", "b.png"], "reference": "Both are red.", "answer": "red",
        "rouge_l": pytest.approx(0.5),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mmdu", {"image": ["a.png"]}, "a picture for every <ImageHere>, got 1"),
        ("mmdu", {"image": ["a.png"] * 4}, "every picture must have its <ImageHere>, got 4 for 3"),
        ("mmdu", {"image": 3}, "image must be a valid list"),
        ("mmdu", {"conversations": MMDU[0]["conversations"][:3]}, "by turns, got user, assistant, user"),
        ("sparkles", {"dialogue": [{"content": "no name", "images": [{"image_id": 11}]}, {"content": "x"}]}, "as IMAGE#ID"),
        ("sparkles", {"dialogue": [{"content": "x"}]}, "at least 2"),
    ],
)  # fmt: skip
def test_a_malformed_dialogue_is_named(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    row = {**(MMDU if name == "mmdu" else SPARKLES)[0], **change}
    options = write(tmp_path, [row] if name == "mmdu" else MMDU, SPARKLES if name == "mmdu" else [row])
    with pytest.raises(ValueError, match=f"dialogue 0.*{message}"):
        benchmark(name, options).items()
    good = (MMDU if name == "mmdu" else SPARKLES)[0]
    both = write(tmp_path, [row, good] if name == "mmdu" else MMDU, SPARKLES if name == "mmdu" else [row, good])
    task = benchmark(name, both)
    assert len(task.items()) == 2 and len(task.odd) == 1


def test_missing_pictures_are_an_error_or_left_out(tmp_path: Path) -> None:
    options = write(tmp_path)
    (tmp_path / "mmdu_pics" / "c.png").unlink()
    with pytest.raises(Missing, match=r"c\.png"):
        benchmark("mmdu", options).items()
    task = benchmark("mmdu", DataOptions(data=str(tmp_path), skip_missing=True))
    assert [item.doc_id for item in task.items(1)] == ["7/0"]
    (tmp_path / "sparkleseval.json").write_text("{}")
    with pytest.raises(ValueError, match="a list of dialogues, got dict"):
        benchmark("sparkles", options).items()


def test_pictures_are_unpacked_as_the_hub_holds_them(tmp_path: Path) -> None:
    options = write(tmp_path)
    items = benchmark("mmdu", options).items()
    with zipfile.ZipFile(tmp_path / "mmdu_pics.zip", "w") as made:
        for path in (tmp_path / "mmdu_pics").iterdir():
            made.write(path, f"mmdu_pics/{path.name}")
    shutil.rmtree(tmp_path / "mmdu_pics")
    task = benchmark("mmdu", options)
    assert task.items() == items and [i.load() for i in task.items()] == [i.load() for i in items]
    assert (tmp_path / "mmdu_pics.zip").name in task.patterns()
