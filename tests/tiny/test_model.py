"""The model code against the transformers classes, and the bundled weights on held-out contexts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ctxwin.tiny import checkpoint_dir
from ctxwin.tiny.sprites import COLORS, N_MARKS, SHAPES
from ctxwin.tiny.world import make_item, render
from train_tiny.check import Reader, check, patched
from train_tiny.data import PICTURE
from train_tiny.forward import encode_pictures, patchify, rotate_span
from train_tiny.tokenizer import LABELS, build_tokenizer, exchange_text, header_text, query_text, transformers
from twins import guard


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(checkpoint_dir())


@pytest.fixture(scope="module")
def processor():
    return transformers().AutoProcessor.from_pretrained(checkpoint_dir())


def pictures(count: int = 3) -> list[np.ndarray]:
    return [render(frame) for frame in make_item(2, "multi_hop", count).frames]


def test_training_pixels_equal_the_processors(processor) -> None:
    drawn = pictures()
    real = processor.image_processor([Image.fromarray(p) for p in drawn], return_tensors="pt")
    assert real["image_grid_thw"].tolist() == [[1, 16, 16]] * 3
    ours = patchify(torch.from_numpy(np.stack(drawn)))
    both = real["pixel_values"].view(3, 256, 3, 2, 196)
    for temporal in range(2):
        assert (both[:, :, :, temporal].flatten(2) - ours).abs().max() < 2.5e-7


@pytest.mark.parametrize("labels", [False, True])
@torch.no_grad()
def test_functional_forward_equals_transformers(reader: Reader, processor, labels: bool) -> None:
    drawn = pictures()
    pixels = torch.from_numpy(np.stack(drawn))
    pieces: list[str | None] = [header_text("Watch the door; say what you see.")]
    for index in range(3):
        pieces += [f"t={index} s\n", PICTURE] if labels else [PICTURE]
    pieces += [exchange_text("color of 17?", "red"), query_text("shape of 20?")]
    span, where, following, logits = reader.prefill(pieces, encode_pictures(reader.model.model.visual, pixels))

    vocabulary, ids = reader.vocabulary, []
    for piece in pieces:
        ids += vocabulary.picture if piece is None else vocabulary.encode(piece)
    tokens = torch.tensor([ids])
    real = processor.image_processor([Image.fromarray(p) for p in drawn], return_tensors="pt")
    kinds = (tokens == vocabulary.image).int()
    theirs, delta = reader.model.model.get_rope_index(tokens, kinds, image_grid_thw=real["image_grid_thw"])
    assert torch.equal(theirs[:, 0], where[0])
    assert following == len(ids) + int(delta)
    out = reader.model(input_ids=tokens, mm_token_type_ids=kinds, use_cache=True, **real)
    assert (out.logits[0, -1] - logits).abs().max() < 1e-4
    assert (out.past_key_values.layers[3].values - span[3][1]).abs().max() < 1e-4


def test_segmented_prefill_equals_whole(reader: Reader) -> None:
    with torch.no_grad():
        embedded = encode_pictures(reader.model.model.visual, torch.from_numpy(np.stack(pictures(2)[:1])))
        pieces: list[str | None] = [header_text("Watch."), PICTURE]
        span, where, following, _ = reader.prefill(pieces, embedded)
        past = rotate_span(reader.text, span, where)
        *_, split = reader.prefill([query_text("shape of 05?")], embedded[:0], following, past)
        *_, whole = reader.prefill([*pieces, query_text("shape of 05?")], embedded)
    assert (split - whole).abs().max() < 1e-4


def test_full_rank_patch_is_the_conditioned_span() -> None:
    torch.manual_seed(0)
    blind, conditioned = ([(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)) for _ in range(3)] for _ in range(2))
    result = patched(blind, conditioned, rank=5)
    assert result[0] is blind[0]
    for got, wanted in zip(result[1:], conditioned[1:], strict=True):
        assert torch.allclose(got[0], wanted[0], atol=1e-5) and torch.allclose(got[1], wanted[1], atol=1e-5)


def test_words_are_single_tokens_and_text_survives() -> None:
    tokenizer = build_tokenizer()
    for word in (*COLORS, *SHAPES, *(f" {mark:02d}" for mark in range(N_MARKS))):
        assert len(tokenizer.encode(word)) == 1
    for text in (*(label.format(s=137) for label in LABELS), "ünïcode, never seen\n", query_text("color of 17?")):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bundled_tokenizer_is_the_one_built(processor) -> None:
    assert processor.tokenizer.get_vocab() == build_tokenizer().get_vocab()


def test_bundle_is_small_and_holds_no_pickle() -> None:
    files = [path for path in Path(checkpoint_dir()).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".st"}


@guard
def test_bundled_model_binds_at_prefill(reader: Reader) -> None:
    figures = check(reader, 20, frames=(2, 4, 6))
    for task in ("single_hop", "multi_hop"):
        assert figures[f"{task}/all"]["n"] == 60
        assert figures[f"{task}/all"]["reprefill"]["accuracy"] >= 0.95
        assert figures[f"{task}/all"]["patch"]["accuracy"] >= 0.93
    assert figures["graded/all"]["reprefill"]["accuracy"] >= 0.9
    assert figures["order/all"]["reprefill"]["accuracy"] >= 0.9
    assert figures["order/all"]["blind"]["accuracy"] <= 0.3
    assert figures["single_hop/all"]["blind"]["accuracy"] >= 0.95
    assert figures["multi_hop/all"]["blind"]["accuracy"] <= 0.3
    assert 0.25 <= figures["graded/all"]["blind"]["accuracy"] <= 0.75


def test_bundled_model_reads_decoded_frames(reader: Reader) -> None:
    pytest.importorskip("cv2")
    header = "You are a shopping assistant."
    figures = check(reader, 20, ("multi_hop",), (3,), decoded=True, labels=False, header=header)
    assert figures["multi_hop/3"]["reprefill"]["accuracy"] >= 0.9


@torch.no_grad()
def test_bundled_model_generates_one_word_and_stops(reader: Reader, processor) -> None:
    item = make_item(77, "single_hop", 2)
    drawn = [Image.fromarray(render(frame)) for frame in item.frames]
    question = {"type": "text", "text": item.questions[0].text}
    messages = [
        {"role": "system", "content": "You watch a camera."},
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, question]},
    ]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt], images=drawn, return_tensors="pt")
    out = reader.model.generate(**inputs, max_new_tokens=4, do_sample=False)
    text = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert text == f"{item.questions[0].answer}<|im_end|>"
