"""The transformers engine: the conformance suite, and the real model path as an oracle that shares no code with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.checkpoint import open_checkpoint
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Segment
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.opening import open_engine
from ctxwin.store import Store
from engines.conformance import HEADER, QUERY, laid, picture
from engines.models import edit_config, write_text_model, write_vision_model
from engines.oracle import assert_answers, real_answer, teacher_forced
from engines.whole_conformance import WholeEngineConformance


class TestVision(WholeEngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, vision_dir: Path) -> Path:
        return vision_dir

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)


class TestText(WholeEngineConformance):
    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, text_dir: Path) -> Path:
        return text_dir

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen2_vl"])
def test_pictures_against_the_real_model_path(kind: str, vision_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    folder = vision_dir if kind == "qwen2_5_vl" else write_vision_model(tmp_path / kind, kind)
    engine = HFEngine(folder, dtype="float32")
    images = [picture(1), picture(2, 56)]
    messages = [
        {"role": "system", "content": HEADER},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUERY}]},
    ]
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=[Image.fromarray(i) for i in images], return_tensors="pt")
    encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(Chunk.image(i)) for i in images)]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert ids == inputs["input_ids"][0].tolist()
    want = real_answer(
        folder, ids, pixel_values=inputs["pixel_values"], image_grid_thw=inputs["image_grid_thw"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
    )  # fmt: skip
    assert_answers(engine, encoded, want)


@pytest.mark.parametrize("frames", [2, 3])
def test_a_video_against_the_real_model_path(vision_dir: Path, frames: int) -> None:
    """At 8 frames a second two frames are one position step, so generate's own shortcut for what follows holds too."""
    from transformers import AutoProcessor

    engine = HFEngine(vision_dir, dtype="float32")
    clip = [picture(i) for i in range(frames)]
    made = engine.encode(Chunk.video(clip, fps=8.0))
    assert [m.modality for m in made.media] == ["video"]
    assert made.media[0].seconds_per_grid == 0.25
    processor = AutoProcessor.from_pretrained(vision_dir)
    filled = torch.from_numpy(np.stack([*clip, clip[-1]] if frames % 2 else clip)).permute(0, 3, 1, 2)
    inputs = processor.video_processor(videos=[filled], return_tensors="pt", do_sample_frames=False)
    encoded = [engine.encode_system_prompt(HEADER), made]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    kinds = torch.tensor([[2 if i == engine._checkpoint.media.video else 0 for i in ids]])
    want = real_answer(
        vision_dir, ids, pixel_values_videos=inputs["pixel_values_videos"], video_grid_thw=inputs["video_grid_thw"],
        second_per_grid_ts=torch.tensor([0.25]), mm_token_type_ids=kinds,
    )  # fmt: skip
    assert_answers(engine, encoded, want)


def test_text_against_the_real_model_path(text_dir: Path) -> None:
    engine = HFEngine(text_dir, dtype="float32")
    encoded = [
        engine.encode_system_prompt(HEADER),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(3)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(text_dir, ids))


def test_frames_as_images(vision_dir: Path) -> None:
    engine = HFEngine(vision_dir, dtype="float32")
    clip = [picture(i) for i in range(3)]
    made = engine.encode(Chunk.video(clip, fps=2.0, as_frames=True))
    single = [engine.encode(Chunk.image(frame)) for frame in clip]
    assert made.token_ids == tuple(i for e in single for i in e.token_ids)
    assert made.advance == sum(e.advance for e in single)
    for media, alone in zip(made.media, single, strict=True):
        torch.testing.assert_close(engine.embed(media.key), engine.embed(alone.media[0].key), rtol=1e-5, atol=1e-6)
    assert engine.counters.vision_encodes == 4


def test_the_stored_source_rebuilds_pixels(vision_dir: Path) -> None:
    from ctxwin.media import pack_frames

    engine = HFEngine(vision_dir, dtype="float32")
    chunk = Chunk.image(picture(9))
    engine.repo.put_source(f"source/{chunk.media[0].content}", pack_frames(picture(9)[None]))
    made = engine.encode(chunk.light())
    assert engine.counters.vision_encodes == 1
    other = HFEngine(vision_dir, dtype="float32")
    assert torch.equal(engine.embed(made.media[0].key), other.embed(other.encode(chunk).media[0].key))


def test_teacher_forcing_agrees_with_decoding(text_dir: Path) -> None:
    engine = HFEngine(text_dir, dtype="float32")
    encoded = [engine.encode_system_prompt(HEADER), engine.encode(Chunk.text("the circle is red"))]
    query = engine.encode_query(QUERY)
    got = engine.generate(laid(encoded), query, Sampling(max_tokens=5, logprobs=-1))
    rows = teacher_forced(engine, laid(encoded), query, got.token_ids)
    assert rows.argmax(-1).tolist() == got.token_ids
    first = torch.tensor([got.logprobs[i] for i in range(rows.shape[1])])
    torch.testing.assert_close(rows[0], first, rtol=0, atol=1e-5)


def test_bfloat16(vision_dir: Path) -> None:
    engine = HFEngine(vision_dir, dtype=torch.bfloat16)
    assert engine.spec.kv.dtype == "bfloat16"
    made = engine.encode(Chunk.image(picture(1)))
    assert engine.prefill([], made, 0).k.dtype == torch.bfloat16
    assert engine.spec.identity != HFEngine(vision_dir, dtype="float32").spec.identity


def test_identity_follows_content(text_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    one = write_text_model(tmp_path / "one")
    assert open_checkpoint(one).identity("float32", "transformers") == open_checkpoint(text_dir).identity(
        "float32", "transformers"
    )
    first = open_checkpoint(one).identity("float32", "transformers")
    weights = load_file(one / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, one / "model.safetensors", metadata={"format": "pt"})
    second = open_checkpoint(one).identity("float32", "transformers")
    edit_config(one, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    third = open_checkpoint(one).identity("float32", "transformers")
    assert len({first, second, third}) == 3
    assert open_checkpoint(one).identity("float32", "vllm") != third


def test_identity_does_not_follow_who_wrote_the_config(vision_dir: Path, tmp_path: Path) -> None:
    def identity(name: str, **fields: object) -> str:  # the fields are the decoder's
        folder = tmp_path / name
        shutil.copytree(vision_dir, folder)
        edit_config(folder, **fields)
        return open_checkpoint(folder).identity("float32", "transformers")

    first = open_checkpoint(vision_dir).identity("float32", "transformers")
    assert identity("moved", _name_or_path="/models/trained", transformers_version="4.57.1") == first
    assert identity("other", rms_norm_eps=1e-3) != first


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = write_text_model(tmp_path / "chunked")
    edit_config(folder, layer_types=["chunked_attention"] * 3)
    with pytest.raises(UnsupportedModel, match="chunked"):
        HFEngine(folder)
    learned = write_text_model(tmp_path / "learned")
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=400)).save_pretrained(learned)
    with pytest.raises(UnsupportedModel, match="learned absolute"):
        HFEngine(learned)
    bare = write_text_model(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="safetensors"):
        HFEngine(bare)


def test_bad_arguments(text_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype"):
        HFEngine(text_dir, dtype="int8")
    with pytest.raises(ValueError, match="device"):
        HFEngine(text_dir, device="abacus")
    with pytest.raises(ValueError, match=r"config\.json"):
        HFEngine(tmp_path)
    engine = HFEngine(text_dir)
    query = engine.encode_query("x")
    with pytest.raises(ValueError, match="max_tokens"):
        engine.generate([], query, Sampling(max_tokens=0))
    with pytest.raises(EngineFailed, match="positions"):
        engine.generate([Segment(engine.encode(Chunk.text("a")), 1020)], query, Sampling())


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_models_whose_kv_cannot_move_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """From the configuration alone, before any weights are read."""
    from transformers import BloomConfig

    BloomConfig(hidden_size=64, n_head=4, n_layer=2, vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="ALiBi"):
        open_engine(f"{kind}:{tmp_path}")


@pytest.mark.parametrize("every", [1, 4, 16])
def test_elimination_hides_what_stands_behind_the_newest_25(text_dir: Path, every: int) -> None:
    """Elastic Cache, algorithm 1, against one forward over prompt and answer in which later tokens do not see dropped ones."""
    engine = HFEngine(text_dir)
    parts = [
        engine.encode_system_prompt(HEADER),
        engine.encode(Chunk.text("a red square stands left of a blue circle")),
    ]
    layout, query = laid(parts), engine.encode_query(QUERY)
    made = engine.generate(layout, query, Sampling(max_tokens=40, hold=0.9, hold_every=every, stop_ids=()))
    plain = engine.generate(layout, query, Sampling(max_tokens=40))
    head, prompt = parts[0].tokens, sum(p.tokens for p in parts) + query.tokens
    ids = [i for part in (*parts, query) for i in part.token_ids] + made.token_ids[:-1]
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    held = list(range(prompt))
    seen: list[int] = list(held)
    for at in range(prompt, len(ids)):
        held.append(at)
        seen.append(at)
        mask[at] &= torch.isin(torch.arange(len(ids)), torch.tensor(seen))
        if len(held) > max(prompt, -(-9 * (at + 1) // 10)):
            held.pop(max(len(held) - 1 - 25, head))
        if not (at - prompt + 1) % every:
            seen = list(held)
    logits = engine.decoder.model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0]
    assert made.token_ids == logits[prompt - 1 :].argmax(-1).tolist()
    assert made.token_ids != plain.token_ids and len(held) == max(prompt, -(-9 * len(ids) // 10))
    with pytest.raises(UnsupportedModel, match="hold must be 1"):
        engine.generate(layout, query, Sampling(hold=0.9), capture_query=True)
    with pytest.raises(ValueError, match="hold must be in"):
        engine.generate(layout, query, Sampling(hold=0))
