"""The trainer: batches mean what they say, a few steps run, and a resumed run repeats an uninterrupted one."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ctxwin.tiny import checkpoint_dir
from ctxwin.tiny.sprites import COLORS, GREY, SHAPES
from ctxwin.tiny.world import UNDETERMINED, bound_colors, legend_palette, locate, parse_question
from train_tiny import train as trainer
from train_tiny.data import Vocabulary, make_batch
from train_tiny.draws import BatchSpec, draw_frames, draw_questions
from train_tiny.losses import decoder_losses
from train_tiny.model import build_model
from train_tiny.recipe import Recipe, batch_spec
from train_tiny.tokenizer import build_tokenizer
from train_tiny.train import train

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
    assert one.pop("length") == two.pop("length")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_curriculum_ends_with_the_full_world() -> None:
    recipe, rng = Recipe(), np.random.default_rng(0)
    early = [batch_spec(recipe, 2, 0, rng) for _ in range(20)]
    late = [batch_spec(recipe, 3, 0, rng) for _ in range(200)]
    assert {spec.marks for spec in early} == {2} and {spec.frames for spec in early} == {1, 2, 3}
    assert {spec.frames for spec in late} >= {1, 2, 3, 4, 5, 6}
    assert all(spec.marks == min(64, 100 // spec.frames) for spec in late)


def test_the_defaults_draw_what_made_the_bundled_weights(vocabulary: Vocabulary) -> None:
    digest = hashlib.sha256()
    for stage, step in ((2, 0), (2, 700), (2, 2500), (3, 5)):
        rng = np.random.default_rng((0, stage, step))
        spec = batch_spec(Recipe(), stage, step, rng)
        drawn = vars(make_batch(vocabulary, rng, BatchSpec(2, spec.frames, spec.marks, spec.questions, decoded=0.0)))
        for name in ("pixels", "ids", "positions", "mask", "scene_colors", "things", "targets"):
            digest.update(drawn[name].numpy().tobytes())
    assert digest.hexdigest() == "10ae59eaa37156beac38540077f3a877c88e6588f1ae0e2a3bb25d2ce960f26d"


def test_agreeing_palettes_hold_in_the_whole_context_and_order_decides_nothing() -> None:
    rng = np.random.default_rng(0)
    in_front, tinted = 0, 0
    for _ in range(60):
        frames = draw_frames(rng, BatchSpec(1, 4, 25, 12, agree=True))
        colors = bound_colors(frames)
        palettes = np.array([legend_palette(frame) for frame in frames])
        shown = palettes.max(0)
        assert ((palettes == UNDETERMINED) | (palettes == shown)).all()
        roles = [frame.role for frame in frames]
        in_front += roles == sorted(roles)
        tinted += any((frame.appearance > GREY).any() for frame in frames)
        texts, targets, _, _ = draw_questions(rng, frames, colors, 12, agree=True)
        for text, target in zip(texts, targets, strict=True):
            attribute, mark = parse_question(text)
            index, row, column = next(place for place in [locate(frames, mark)] if place)
            color = int(shown[frames[index].shape[row, column]])
            if attribute == "color":
                assert target.argmax() == (GREY if color == UNDETERMINED else color) and target.max() == 1
    assert 40 < in_front < 60 and 10 < tinted < 50


def test_frames_that_stand_apart_see_the_header_and_themselves(vocabulary: Vocabulary) -> None:
    spec = BatchSpec(4, 3, 10, 4, decoded=0, agree=True, apart=True)
    batch = make_batch(vocabulary, np.random.default_rng(3), spec)
    total = batch.ids.shape[1]
    for b in range(4):
        mask = batch.mask[b, 0]
        tokens = (batch.ids[b] == vocabulary.image).nonzero().flatten().view(3, 64)
        for one in range(3):
            assert mask[tokens[one, -1], tokens[one]].all() and mask[tokens[one], 0].all()
            for other in range(3):
                assert one == other or not mask[tokens[one]][:, tokens[other]].any()
        for question in (batch.last[b * 4 : b * 4 + 4] - b * total).tolist():
            assert mask[question, tokens.flatten()].all()


def test_contexts_have_no_more_frames_than_asked_for() -> None:
    recipe, rng = Recipe(most_frames=4, palettes="agree", apart=0.5), np.random.default_rng(0)
    drawn = [batch_spec(recipe, 3, 0, rng) for _ in range(200)]
    assert {spec.frames for spec in drawn} == {1, 2, 3, 4} and all(spec.agree for spec in drawn)
    assert 60 < sum(spec.apart for spec in drawn) < 140


def test_a_chaining_run_takes_vision_and_words_over_and_asks_no_scene_token(tmp_path: Path) -> None:
    source = load_file(checkpoint_dir() / "model.safetensors")
    recipe = dataclasses.replace(TINY, palettes="agree", init=checkpoint_dir(), steps=0, finish_steps=0)
    kept = train(recipe, tmp_path / "vision")
    made = load_file(tmp_path / "vision" / "weights" / "model.safetensors")
    same = {name for name in source if torch.equal(source[name], made[name])}
    assert {name for name in source if "visual" in name or "embed_tokens" in name} <= same
    assert not any("q_proj" in name for name in same) and kept.curves == []
    train(dataclasses.replace(recipe, init_decoder=True), tmp_path / "all")
    made = load_file(tmp_path / "all" / "weights" / "model.safetensors")
    assert all(torch.equal(source[name], made[name]) for name in source)
    with pytest.raises(ValueError, match="init must be a folder"):
        train(dataclasses.replace(recipe, init=tmp_path), tmp_path / "nothing")


def test_a_chaining_run_has_a_look_up_loss_and_no_loss_on_scene_tokens(vocabulary: Vocabulary) -> None:
    model = build_model(build_tokenizer(), 0)
    batch = make_batch(vocabulary, np.random.default_rng(4), BatchSpec(3, 3, 5, 6, decoded=0, agree=True))
    with torch.no_grad():
        _, chains = decoder_losses(model, vocabulary, batch, Recipe(palettes="agree"), stage=2)
        _, binds = decoder_losses(model, vocabulary, batch, Recipe(), stage=2)
    assert "lookup" in chains and "dense" not in chains
    assert "dense" in binds and "lookup" not in binds


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
