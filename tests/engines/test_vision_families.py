"""Families that see, on the transformers engine, against transformers' own path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ctxwin.chunk import Chunk
from ctxwin.engines.encoding.families import FAMILIES, run_tower
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import BadMedia, EngineFailed, UnsupportedModel
from ctxwin.opening import open_engine
from ctxwin.store import open_store
from ctxwin.window.window import Window
from engines.conformance import HEADER, QUERY, laid, picture
from engines.families import WRITERS, opened
from engines.models import edit_config, write_deepseek_ocr, write_mistral3
from engines.oracle import assert_answers, real_answer


def shown(engine: HFEngine) -> list[Encoded]:
    """Header, two pictures of different sizes."""
    images = [Chunk.image(picture(1)), Chunk.image(picture(2, 56))]
    return [engine.encode_system_prompt(HEADER), *(engine.encode(i) for i in images)]


SEEING = [
    name
    for name in WRITERS
    if not name.startswith(
        (
            "llama",
            "deepseek_v2",
            "deepseek_v3",
            "gemma2",
            "gemma3_text",
            "gemma4_text",
            "gemma4_sharing",
            "gemma4_experts",
        )
    )
]


@pytest.mark.parametrize("name", SEEING)
def test_pictures_against_the_real_model_path(name: str, folders: Callable[[str], Path]) -> None:
    """The processor's own ids for the whole prompt, and the model's own answer from pixels."""
    from transformers import AutoProcessor

    folder = folders(name)
    engine = opened(folder)
    lists = name.startswith(("smolvlm", "idefics3", "llava", "paddleocr", "deepseek"))
    lead = ["look at "] * (name in ("smolvlm", "idefics3"))  # a text in front of the first picture
    content = [{"type": "text", "text": text} for text in lead]
    content += [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUERY}]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": HEADER}] if lists else HEADER},
        {"role": "user", "content": content},
    ]
    processor = AutoProcessor.from_pretrained(folder)
    if name == "llava_onevision":  # in the text: the template would put the end of a line in front of it only
        content[:] = [{"type": "text", "text": f"<image>\n<image>\n{QUERY}"}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [Image.fromarray(p) for p in (picture(1), picture(2, 56))]
    own = name in ("llava", "llava_next", "llava_next_video")  # the processor begins the prompt
    inputs = processor(text=[text], images=[images] if lists else images, return_tensors="pt", add_special_tokens=own)
    header, *pictures = shown(engine)
    encoded = [header, *(engine.encode(Chunk.text(text)) for text in lead), *pictures]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert ids == inputs["input_ids"][0].tolist()
    media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    assert_answers(engine, encoded, real_answer(folder, ids, **media))


@pytest.mark.slow
def test_a_reader_without_a_template_against_the_real_model_path(tmp_path: Path) -> None:
    """DeepSeek-OCR 2: a picture whole, and one with two tiles."""
    from transformers import AutoProcessor

    engine = opened(write_deepseek_ocr(tmp_path))
    pictures = [picture(1), np.tile(picture(2, 40), (10, 20, 1))]
    encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(Chunk.image(p)) for p in pictures)]
    assert [m.tokens for e in encoded for m in e.media] == [257, 257 + 2 * 144]
    images = [Image.fromarray(p) for p in pictures]
    text = f"{HEADER}\n<image><image>{QUERY}\n"
    inputs = AutoProcessor.from_pretrained(tmp_path)(text=[text], images=images, return_tensors="pt")
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert ids == inputs["input_ids"][0].tolist()
    media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    assert_answers(engine, encoded, real_answer(tmp_path, ids, **media))


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize(("name", "ends"), [("llava_onevision", 1), ("llava_next_video", 0)])
def test_a_pooled_video_against_the_real_model_path(
    name: str, ends: int, frames: int, folders: Callable[[str], Path]
) -> None:
    """Each frame is four tokens; OneVision's videos have one behind them."""
    from transformers import AutoProcessor

    folder = folders(name)
    engine = opened(folder)
    clip = [picture(i) for i in range(frames)]
    encoded = [engine.encode_system_prompt(HEADER), engine.encode(Chunk.video(clip, fps=2.0))]
    assert [(m.modality, m.tokens) for m in encoded[1].media] == [("video", 4 * frames + ends)]
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "text", "text": HEADER}], [{"type": "text", "text": f"<video>\n{QUERY}"}]
    messages = [{"role": r, "content": c} for r, c in zip(("system", "user"), content, strict=True)]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    video = torch.from_numpy(np.stack(clip)).permute(0, 3, 1, 2)
    own = name == "llava_next_video"  # the processor begins the prompt
    inputs = processor(text=[text], videos=[video], return_tensors="pt", add_special_tokens=own)
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert ids == inputs["input_ids"][0].tolist()
    assert_answers(engine, encoded, real_answer(folder, ids, pixel_values_videos=inputs["pixel_values_videos"]))


@pytest.mark.parametrize("frames", [3, 4])
def test_a_stamped_video_against_the_real_model_path(frames: int, folders: Callable[[str], Path]) -> None:
    """Transformers 5.12 and later leave the template's own pair of vision tokens around all groups, against the code
    the model was published with and against vLLM (vllm-project/vllm#46817); the groups themselves agree."""
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    folder = folders("qwen3_vl")
    engine = opened(folder)
    clip = [picture(i) for i in range(frames)]
    made = engine.encode(Chunk.video(clip, fps=1.5))
    assert [(m.modality, m.grid_thw, m.tokens) for m in made.media] == [("video", (1, 6, 6), 9)] * 2
    assert engine.counters.vision_encodes == 1
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(
        text=["<|vision_start|><|video_pad|><|vision_end|>"],
        videos=[torch.from_numpy(np.stack(clip)).permute(0, 3, 1, 2)],
        do_sample_frames=False,
        video_metadata=[VideoMetadata(total_num_frames=frames, fps=1.5, frames_indices=list(range(frames)))],
        return_tensors="pt",
    )
    whole = processor.tokenizer.decode(inputs["input_ids"][0])
    assert whole.count("seconds>") == 2
    bare = whole.removeprefix("<|vision_start|>").removesuffix("<|vision_end|>")
    assert processor.tokenizer.decode(made.token_ids) == (bare if bare.startswith("<0.") else whole)

    encoded = [engine.encode_system_prompt(HEADER), made]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    kinds = torch.tensor([[2 if i == engine._checkpoint.media.video else 0 for i in ids]])
    want = real_answer(
        folder, ids, pixel_values_videos=inputs["pixel_values_videos"], video_grid_thw=inputs["video_grid_thw"],
        mm_token_type_ids=kinds,
    )  # fmt: skip
    assert_answers(engine, encoded, want)


def test_a_stamped_video_survives_a_restart(folders: Callable[[str], Path], tmp_path: Path) -> None:
    chunk = Chunk.video([picture(i) for i in range(5)], fps=2.0)
    with opened(folders("qwen3_vl"), open_store(f"disk:{tmp_path / 'kv'}")) as first:
        made = first.encode(chunk)
        first.store.close()
    with opened(folders("qwen3_vl"), open_store(f"disk:{tmp_path / 'kv'}")) as second:
        again = second.encode(chunk.light())
        assert (again.token_ids, again.media, again.advance) == (made.token_ids, made.media, made.advance)
        assert second.counters.vision_encodes == 0 and len(again.media) == 3
        second.store.close()


def test_deepstack_features_are_stored_and_count(folders: Callable[[str], Path]) -> None:
    engine = opened(folders("qwen3_vl"))
    encoded = shown(engine)
    media = encoded[1].media[0]
    assert engine.embed(media.key).shape == (9, 64 * 3)
    fed = engine.inputs(encoded)
    assert fed.deep is not None and fed.deep.shape == (2, sum(e.tokens for e in encoded), 64)
    seen = fed.deep.abs().sum((0, 2)) > 0
    ids = [i for e in encoded for i in e.token_ids]
    pad = encoded[1].token_ids[media.offset]
    assert seen.tolist() == [i == pad for i in ids]
    want = engine.logits(laid(encoded), engine.encode_query(QUERY))
    for stored in [m for e in encoded for m in e.media]:
        rows = engine.embed(stored.key).clone()
        rows[:, 64:] = 0
        engine.encoder.embeddings.put(stored.key, rows, stored.grid_thw)
    assert float((engine.logits(laid(encoded), engine.encode_query(QUERY)) - want).abs().max()) > 1e-2
    engine.encoder.embeddings.put(media.key, engine.embed(media.key)[:, :64], media.grid_thw)
    with pytest.raises(EngineFailed, match=r"must be \[9, 192\], got \[9, 64\]"):
        engine.inputs(encoded)


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "kimi", "deepseek_v2", "glm4v"])
def test_the_decoder_runs_layer_by_layer(name: str, folders: Callable[[str], Path]) -> None:
    """What `HFEngine.inputs`, `text_model` and `lm_head` are for."""
    engine = opened(folders(name))
    query = engine.encode_query(QUERY)
    encoded = shown(engine) if engine.spec.vision else [engine.encode_system_prompt(HEADER)]
    fed = engine.inputs([*encoded, query])
    pieces = laid([*encoded, query])
    at = torch.from_numpy(np.concatenate([p.encoded.positions + p.start for p in pieces], axis=1))
    text, hidden = engine.text_model, fed.embeds[None]
    mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        turned = text.rotary_emb(hidden, at[:, None] if engine.spec.kv.rope.sections else at[:1])
        for i, layer in enumerate(text.layers):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=turned)
            if fed.deep is not None and i < len(fed.deep):
                hidden = hidden + fed.deep[i]
        got = engine.lm_head(text.norm(hidden))[0, -1]
    torch.testing.assert_close(got, engine.logits(laid(encoded), query), rtol=0, atol=1e-4)


def test_frames_of_a_video_are_one_tile_each(folders: Callable[[str], Path]) -> None:
    """As InternVL's own video processor has them; a picture of the same size has four tiles and a thumbnail."""
    engine = opened(folders("internvl"))
    clip = [picture(1), picture(2)]
    made = engine.encode(Chunk.video(clip, fps=2.0))
    assert [(m.modality, m.grid_thw, m.tokens) for m in made.media] == [("image", (1, 4, 4), 4)] * 2
    assert engine.encode(Chunk.image(clip[0])).media[0].grid_thw == (5, 4, 4)
    assert engine.counters.vision_encodes == 2


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "kimi"])
def test_a_family_whose_decoder_cannot_move_is_refused(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folders(name), tmp_path / "model")
    edit_config(tmp_path / "model", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="dynamic NTK"):
        open_engine(f"hf:{tmp_path / 'model'}")


def test_other_vision_models_are_refused_by_name(tmp_path: Path) -> None:
    """Before weights are read: there are none."""
    from transformers import PaliGemmaConfig, VipLlavaConfig

    VipLlavaConfig().save_pretrained(tmp_path / "unknown")
    with pytest.raises(UnsupportedModel, match=r"must be one of .*internvl.*, got 'vipllava'"):
        open_engine(f"hf:{tmp_path / 'unknown'}")
    PaliGemmaConfig().save_pretrained(tmp_path / "known")
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        open_engine(f"hf:{tmp_path / 'known'}")


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_tokens_of_a_picture_see_those_behind_them(name: str, folders: Callable[[str], Path]) -> None:
    """In all layers or in those that slide, forward as far as a picture reaches; never across two pictures, never cut."""
    engine = opened(folders(name))
    told = engine.decoder.bidirectional
    assert told == {"gemma3": "all", "gemma4": "sliding"}[name]
    encoded, query = shown(engine), engine.encode_query(QUERY)
    (media,) = encoded[1].media
    assert media.whole and not encoded[1].media_ranges
    fed = engine.inputs(encoded)
    assert fed.pictures is not None and fed.pictures.unique().tolist() == [-1, 0, 1]
    seen = engine.logits(laid(encoded), query)
    engine.decoder.bidirectional = ""
    assert float((engine.logits(laid(encoded), query) - seen).abs().max()) > 1e-3
    engine.decoder.bidirectional = told
    span, last = engine.prefill([], encoded[1], 0), media.offset + media.tokens
    for cut in (media.offset + 1, last - 1):
        layout = [Segment(encoded[1], 0, span, recompute=((cut, encoded[1].tokens),))]
        with pytest.raises(ValueError, match="must not cut a picture"):
            engine.logits(layout, query)
    engine.logits([Segment(encoded[1], 0, span, recompute=((0, media.offset), (last, encoded[1].tokens)))], query)


def test_a_picture_of_one_token_is_seen_and_a_smaller_one_refused(tmp_path: Path) -> None:
    """Mistral 3's own model loses an axis of a single token."""
    from transformers import AutoModelForImageTextToText

    folder = write_mistral3(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    pixels, sizes, inner = torch.randn(1, 3, 28, 28), torch.tensor([[28, 28]]), model.model
    with torch.no_grad():
        seen = run_tower(model, FAMILIES["mistral3"], model.config, pixels, torch.tensor([[1, 2, 2]])).pooler_output
        hidden = inner.vision_tower(
            pixels, image_sizes=sizes, output_hidden_states=True, return_dict=True
        ).hidden_states
        expected = inner.multi_modal_projector(hidden[model.config.vision_feature_layer].squeeze(0), sizes)
    torch.testing.assert_close(torch.cat(list(seen)), expected)
    with open_engine(f"hf:{folder}", dtype="float32") as engine, Window(engine, "s") as window:
        window.append(Chunk.image(np.full((28, 28, 3), 90, np.uint8)))
        with pytest.raises(BadMedia, match="must have 28 pixels a side for this model"):
            window.append(Chunk.image(np.full((14, 40, 3), 90, np.uint8)))
        assert len(window.ids) == 1 and window.ask("q", max_tokens=1).usage.vision_encodes == 1
