"""The trainer: batches mean what they say, a few steps run, and a resumed run repeats an uninterrupted one."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ctxwin.tiny import train as trainer
from ctxwin.tiny.data import BatchSpec, Vocabulary, make_batch
from ctxwin.tiny.sprites import COLORS, SHAPES
from ctxwin.tiny.tokenizer import build_tokenizer
from ctxwin.tiny.train import Recipe, batch_spec, train

pytest.importorskip("cv2")
TINY = Recipe(
    vision_steps=2,
    vision_frames=2,
    steps=3,
    horizon=4,
    finish_steps=2,
    frames_per_step=3,
    finish_frames=6,
    warmup=2,
    checkpoint_every=2,
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(build_tokenizer())


def test_batches_ask_what_they_answer(vocabulary: Vocabulary) -> None:
    batch = make_batch(vocabulary, np.random.default_rng(0), BatchSpec(3, 4, 10, 6, decoded=0))
    ids = batch.ids.flatten()
    words = vocabulary.colors + vocabulary.shapes
    assert set(ids[batch.numbers].tolist()) <= set(vocabulary.numbers)
    assert torch.allclose(batch.targets.sum(-1), torch.ones(18))
    certain = batch.targets.amax(-1) == 1
    assert ids[batch.last + 1][certain].tolist() == [words[i] for i in batch.targets.argmax(-1)[certain].tolist()]
    assert batch.pixels.shape == (12, 224, 224, 3)
    assert (ids == vocabulary.image).sum() == 12 * 64
    assert (ids[batch.scenes] == vocabulary.image).all()
    assert batch.scene_colors.shape == (len(batch.scenes), len(COLORS))
    assert batch.targets.shape[1] == len(COLORS) + len(SHAPES)


def test_questions_do_not_see_each_other(vocabulary: Vocabulary) -> None:
    batch = make_batch(vocabulary, np.random.default_rng(1), BatchSpec(2, 2, 10, 4, decoded=0))
    mask, total = batch.mask[:, 0], batch.ids.shape[1]
    assert mask.diagonal(dim1=1, dim2=2).all()
    assert not mask.triu(1).any()
    first, second = (int(n) for n in batch.last[:2])
    assert not mask[0, second, first]
    assert mask[0, second, second - 8 : second + 1].all()
    assert mask[0, second, 0] and mask[1, int(batch.last[4]) - total, 0]


def test_batches_are_reproducible_also_through_video(vocabulary: Vocabulary) -> None:
    spec = BatchSpec(2, 2, 10, 4, decoded=1)
    one, two = (vars(make_batch(vocabulary, np.random.default_rng(2), spec)) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_curriculum_ends_with_the_full_world() -> None:
    recipe, rng = Recipe(), np.random.default_rng(0)
    early = [batch_spec(recipe, 2, 0, rng) for _ in range(20)]
    late = [batch_spec(recipe, 3, 0, rng) for _ in range(200)]
    assert {spec.marks for spec in early} == {2} and {spec.frames for spec in early} == {1, 2, 3}
    assert {spec.frames for spec in late} >= {1, 2, 3, 4, 5, 6}
    assert all(spec.marks == min(64, 100 // spec.frames) for spec in late)


def test_a_resumed_run_repeats_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(TINY, whole)

    real = trainer.make_batch

    def interrupted(vocabulary: Vocabulary, rng: np.random.Generator, spec: BatchSpec):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(spec)
        return real(vocabulary, rng, spec)

    calls: list[BatchSpec] = []
    monkeypatch.setattr(trainer, "make_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, parts)
    monkeypatch.setattr(trainer, "make_batch", real)
    run = train(TINY, parts, resume=True)
    assert (run.stage, run.step) == (3, 2)

    one, two = (load_file(folder / "weights" / "model.safetensors") for folder in (whole, parts))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(tensor.dtype == torch.bfloat16 for tensor in one.values())
    curves = json.loads((whole / "curves.json").read_text())
    assert curves[0]["stage"] == 1 and "mark" in curves[0]


def test_losses_go_down(tmp_path: Path) -> None:
    recipe = dataclasses.replace(TINY, vision_steps=12, steps=0, finish_steps=0, vision_frames=4, warmup=1)
    first = train(dataclasses.replace(recipe, vision_steps=1), tmp_path / "short")
    last = train(recipe, tmp_path / "long")
    assert last.curves[-1]["appearance"] >= first.curves[-1]["appearance"]
