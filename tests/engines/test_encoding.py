"""Encoding without a model: a counting stand-in for the vision tower, and the store in every state of decay."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizer

from ctxwin.chunk import Chunk
from ctxwin.engines.encoding import checkpoint as checkpoint_module
from ctxwin.engines.encoding.checkpoint import Checkpoint, open_checkpoint, weights_digest
from ctxwin.engines.encoding.encoder import Encoder
from ctxwin.engines.encoding.tokens import Tokens
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.results import EngineCounters
from ctxwin.engines.segments import MediaSpan
from ctxwin.errors import BudgetExceeded, ChunkUnavailable, MissingExtra, UnsupportedModel
from ctxwin.media import pack_frames
from ctxwin.opening import open_engine
from ctxwin.store import Store, open_store
from ctxwin.store.spans import SpanRepository
from engines.conformance import picture
from engines.models import write_text_model


def see(pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """A tower whose embeddings tell one picture from another: sums of the pixels of each merged patch."""
    return pixels.reshape(-1, 4, pixels.shape[1]).sum((1, 2))[:, None].repeat(1, 8)


def place(ids: Any, media: Any) -> tuple[np.ndarray, int]:
    return np.tile(np.arange(len(ids)), (3, 1)), len(ids)


class Refusing:
    """A store that holds nothing."""

    def __init__(self) -> None:
        self._store = open_store("memory:")

    def put(self, key: str, value: bytes) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture(scope="module")
def vision(vision_dir: Path) -> Checkpoint:
    return open_checkpoint(vision_dir)


def encoder(checkpoint: Checkpoint, store: Store | None = None, identity: str = "m", **options: Any) -> Encoder:
    repository = SpanRepository(store or open_store("memory:"), identity)
    tower = None if checkpoint.media is None else see
    return Encoder(checkpoint, identity, repository, tower, place, EngineCounters(), **options)


def encodes(made: Encoder) -> int:
    return made._counters.vision_encodes


@given(st.data())
def test_whatever_a_model_writes_can_be_remembered(vision: Checkpoint, data: st.DataObject) -> None:
    """Tokens of the whole vocabulary: the exchange is a chunk of the answer's text, and of no media."""
    made, media = encoder(vision), vision.media
    assert media is not None
    placeholders = st.sampled_from([media.image, media.video])
    token = st.integers(0, len(made.tokens) - 1) | placeholders | st.sampled_from(sorted(made.tokens.special))
    answer = data.draw(st.lists(token, max_size=12))
    exchange, query = made.encode_exchange("what", answer), made.encode_query("what")
    chunk = made.encode(Chunk.tokens(exchange.token_ids))
    assert chunk.token_ids == exchange.token_ids and not chunk.media and not exchange.media
    end = len(made.encode_exchange("what", []).token_ids) - query.tokens
    remembered = exchange.token_ids[query.tokens : exchange.tokens - end]
    assert remembered == tuple(token for token in answer if token not in (media.image, media.video))
    assert made.tokens.text(remembered) == made.tokens.text(answer)


def test_lost_embeddings_are_computed_again(vision: Checkpoint) -> None:
    store = open_store("memory:")
    made = encoder(vision, store)
    chunk = Chunk.image(picture(1))
    first = made.encode(chunk)
    assert encodes(made) == 1
    for key in list(store.list()):
        store.delete(key)
    with pytest.raises(ChunkUnavailable, match="encode the chunk again"):
        made.embed(first.media[0].key)
    assert made.encode(chunk) == first
    assert encodes(made) == 2
    assert made.embed(first.media[0].key).shape == (9, 8)


@pytest.mark.parametrize("space", ["embed/", "grid/"])
def test_corrupt_embeddings_are_a_miss(vision: Checkpoint, space: str) -> None:
    store = open_store("memory:")
    chunk = Chunk.image(picture(1))
    key = encoder(vision, store).encode(chunk).media[0].key
    broken = next(iter(store.list(space)))
    store.delete(broken)
    store.put(broken, b"not a blob")
    again = encoder(vision, store)
    assert again.encode(chunk).media[0].key == key
    assert encodes(again) == 1
    assert again.embed(key).shape == (9, 8)


def test_a_store_that_refuses_still_serves_the_next_forward(vision: Checkpoint) -> None:
    made = encoder(vision, Refusing())  # type: ignore[arg-type]
    media = made.encode(Chunk.image(picture(1))).media[0]
    assert made.embed(media.key).shape == (9, 8)
    made.encode(Chunk.image(picture(1), text="again"))
    assert encodes(made) == 1


def test_embedding_keys_follow_content_and_model(vision: Checkpoint) -> None:
    def key(chunk: Chunk, identity: str = "m") -> str:
        return encoder(vision, identity=identity).encode(chunk).media[0].key

    clip = [picture(1), picture(2)]
    keys = [
        key(Chunk.image(picture(1))), key(Chunk.image(picture(2))), key(Chunk.image(picture(1)), "other model"),
        key(Chunk.video(clip, fps=1.0)), key(Chunk.video(clip, fps=2.0)), key(Chunk.video(clip, as_frames=True)),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key(Chunk.image(picture(1), text="label")) == keys[0]
    assert all(k.startswith("embed/") for k in keys)


def test_videos(vision: Checkpoint) -> None:
    made = encoder(vision)
    odd = made.encode(Chunk.video([picture(i) for i in range(3)], fps=4.0))
    even = made.encode(Chunk.video([picture(0), picture(1), picture(2), picture(2)], fps=4.0))
    (media,) = odd.media
    assert media == MediaSpan("video", media.key, 1, 18, (2, 6, 6), 0.5)
    assert torch.equal(made.embed(media.key), made.embed(even.media[0].key))
    frames = made.encode(Chunk.video([picture(i) for i in range(20)], as_frames=True))
    assert len(frames.media) == 20
    assert encodes(made) == 4
    single = [made.encode(Chunk.image(picture(i))) for i in range(20)]
    for got, alone in zip(frames.media, single, strict=True):
        assert torch.equal(made.embed(got.key), made.embed(alone.media[0].key))


def test_pixels_come_from_the_stored_source_last(vision: Checkpoint, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "a.png"
    Image.fromarray(picture(1)).save(path)
    on_disk = Chunk.image(path).light()
    made = encoder(vision)
    made.encode(on_disk)
    path.unlink()
    fresh = encoder(vision)
    with pytest.raises(ChunkUnavailable, match="gone or changed"):
        fresh.encode(on_disk)
    fresh._repository.put_source(f"source/{on_disk.media[0].content}", pack_frames(picture(1)[None]))
    assert fresh.encode(on_disk).tokens == 11


def test_the_cache_of_encoded_chunks_is_bounded(vision: Checkpoint) -> None:
    made = encoder(vision, cache_bytes=9000)
    chunks = [Chunk.text(f"frame {i}") for i in range(4)]
    for chunk in chunks:
        made.encode(chunk)
    assert 0 < made._cache.nbytes <= 9000
    assert chunks[0].id not in made._cache
    assert made.encode(chunks[3]) is made.encode(chunks[3])


def test_a_model_without_a_template(tmp_path: Path) -> None:
    plain = open_checkpoint(write_text_model(tmp_path / "base", chat_template=None))
    made = encoder(plain)
    assert made.encode_system_prompt("").tokens == 0
    text = "".join(
        plain.tokenizer.decode(e.token_ids)
        for e in (
            made.encode_system_prompt("You watch."),
            made.encode(Chunk.text("a frame ")),
            made.encode_query("what?"),
        )
    )
    assert text == "You watch.\na frame what?\n"
    with pytest.raises(UnsupportedModel, match="no chat template"):
        made.encode(Chunk.message("user", "x"))
    with pytest.raises(UnsupportedModel, match="see image"):
        made.encode(Chunk.image(picture(1)))


def test_ids_outside_the_vocabulary(vision: Checkpoint) -> None:
    with pytest.raises(ValueError, match="below the vocabulary size"):
        encoder(vision).encode(Chunk.tokens([10**6]))
    assert encoder(vision).encode(Chunk.tokens([2, 70])).token_ids == (2, 70)


def test_large_weight_files_are_sampled_in_every_tensor(text_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors.torch import load_file, save_file

    def digest_of(change: str | None) -> str:
        weights = load_file(text_dir / "model.safetensors")
        if change is not None:
            weights[change].flatten()[0] += 1.0
        folder = tmp_path / str(change)
        folder.mkdir(exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        return weights_digest(folder)

    whole = digest_of(None)
    monkeypatch.setattr(checkpoint_module, "_WHOLE", 0)
    names = list(load_file(text_dir / "model.safetensors"))
    sampled = [digest_of(None), digest_of(None), digest_of(names[0]), digest_of(names[-1])]
    assert sampled[0] == sampled[1] != whole
    assert len(set(sampled)) == 3


def test_names_of_engines(text_dir: Path, monkeypatch: Any) -> None:
    opened = open_engine(f"hf:{text_dir}", dtype="float32", store="memory:", tenant="a")
    assert (opened.spec.name, opened.spec.kv.dtype) == ("hf", "float32")
    assert open_engine(str(text_dir), engine="hf").spec.name == "hf"
    for name in ("", "tiny:x", "hf:", "onnx:model", str(text_dir)):
        with pytest.raises(ValueError, match="engine name must be"):
            open_engine(name)
    with pytest.raises(ValueError, match="must agree"):
        open_engine(f"hf:{text_dir}", engine="vllm")
    with pytest.raises(ValueError, match="engine must be"):
        open_engine("tiny", engine="onnx")
    with pytest.raises(ValueError, match="device, dtype, outputs or position_free"):
        open_engine(f"hf:{text_dir}", tensor_parallel_size=2)
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(MissingExtra, match=r"ctxwin\[vllm-cpu\]"):
        open_engine(f"vllm:{text_dir}")


def test_the_repair_waits_until_it_is_needed() -> None:
    code = """
import json, sys
import ctxwin, ctxwin.engines.base, ctxwin.engines.torchvision_repair as t
before = [m for m in ("torch", "transformers", "vllm", "cv2") if m in sys.modules]
repaired = list(t.repair())
from transformers import Qwen2VLImageProcessor
Qwen2VLImageProcessor()
print(json.dumps([before, repaired]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, repaired = json.loads(done.stdout)
    assert before == []
    assert set(repaired) <= {"torchvision", "torchaudio", "torchcodec"}


class TestBounds:
    """What cannot fit is refused before it costs anything, and leaves nothing."""

    @pytest.fixture
    def engine(self, tmp_path: Path) -> HFEngine:
        return HFEngine(write_text_model(tmp_path), dtype="float32")

    def ways(self, engine: HFEngine, text: str) -> list[Callable[[], object]]:
        return [
            lambda: engine.encode_system_prompt(text),
            lambda: engine.encode(Chunk.text(text)),
            lambda: engine.encode(Chunk.message("user", text)),
            lambda: engine.encode_query(text),
            lambda: engine.text_ids(text),
        ]

    @pytest.mark.parametrize(
        "text", ["a red square " * 640_000, "x" * 8_000_000, "é" * 4_000_000], ids=["words", "one", "wide"]
    )
    def test_eight_megabytes_are_refused_at_once(self, engine: HFEngine, text: str) -> None:
        for way in self.ways(engine, text):
            began = time.process_time()
            with pytest.raises(BudgetExceeded, match="must fit the engine's 1,024 tokens") as refused:
                way()
            assert time.process_time() - began < 0.5
            assert refused.value.needed > refused.value.budget == 1024
        assert engine.encoder._cache.nbytes == engine.encoder._texts.nbytes == 0

    @pytest.mark.parametrize("words", [1100, 5000])
    def test_a_little_too_much_is_refused_too(self, engine: HFEngine, words: int) -> None:
        for way in self.ways(engine, "red " * words):
            with pytest.raises(BudgetExceeded, match="must fit"):
                way()
        assert engine.encoder._cache.nbytes == engine.encoder._texts.nbytes == 0

    def test_what_fits_is_the_tokenizers_own(self, engine: HFEngine) -> None:
        text = "a red <|im_start|> square\n" * 60
        tokenizer = engine.encoder.checkpoint.tokenizer
        own = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert engine.text_ids(text) == tuple(own)
        assert engine.template_ids(text) == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def test_caches_are_bounded_by_bytes(self, engine: HFEngine) -> None:
        encoder = engine.encoder
        encoder._cache.max_bytes = encoder._texts.max_bytes = 40_000
        for i in range(50):
            encoder.encode_system_prompt(f"{i} " + "red " * 100)
            encoder.encode(Chunk.text(f"{i} " + "red " * 100))
            assert max(encoder._cache.nbytes, encoder._texts.nbytes) <= 40_000
            encoder.encode_query(f"{i} " + "red " * 100)
            assert encoder._texts.nbytes <= 40_000
        held = encoder.encode_system_prompt("49 " + "red " * 100)
        assert encoder.encode_system_prompt("49 " + "red " * 100) is held

    def test_a_question_that_is_asked_again_is_not_tokenised_again(
        self, engine: HFEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder, tokenised, encoded = engine.encoder, list[str](), Tokens._encoded

        def counted(self: Tokens, text: str, *, special: bool) -> list[int]:
            tokenised.append(text)
            return encoded(self, text, special=special)

        monkeypatch.setattr(Tokens, "_encoded", counted)
        query, other = encoder.encode_query("What is there?"), encoder.encode_query("And now?")
        exchange = encoder.encode_exchange("What is there?", [5])
        assert encoder.encode_query("What is there?") == query != other
        assert exchange.token_ids[: query.tokens] == query.token_ids
        assert tokenised.count("What is there?") == tokenised.count("And now?") == 1

    def test_tokenising_holds_no_lock(self, engine: HFEngine) -> None:
        """One thread tokenises for long, another is served meanwhile."""
        engine.encoder.tokens = Tokens(engine.encoder.checkpoint.tokenizer, None)
        long = "a red square " * 640_000
        done: list[float] = []
        thread = threading.Thread(target=lambda: (engine.text_ids(long), done.append(time.monotonic())))
        began = time.monotonic()
        thread.start()
        waits = []
        while thread.is_alive():
            asked = time.monotonic()
            engine.encode(Chunk.text(f"blue {asked}"))
            engine.encode_query("what color")
            waits.append(time.monotonic() - asked)
        thread.join()
        assert done[0] - began > 0.5, "else this shows nothing"
        assert len(waits) > 10
        assert sorted(waits)[len(waits) // 2] < 0.2


class LetterTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Each letter is a token; ``<e>`` is one wherever it stands, or not at all."""

    reads_special: bool = True

    def get_vocab(self) -> dict[str, int]:
        return {"<e>": 0, "<": 1, "e": 2, ">": 3}

    @property
    def vocab_size(self) -> int:
        return len(self.get_vocab())

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [text] if text == "<e>" and self.reads_special else list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab()[token]


@pytest.mark.parametrize("reads_special", [True, False])
def test_a_tokenizer_must_take_special_tokens_in_content_as_text(reads_special: bool) -> None:
    """Kimi's published one, code in Python, does not."""
    tokenizer = LetterTokenizer(eos_token="<e>")
    tokenizer.reads_special = reads_special
    if not reads_special:
        checkpoint_module._check_spelling(tokenizer)
        assert Tokens(tokenizer, None).content("<e>") == [1, 2, 3]
        return
    with pytest.raises(UnsupportedModel, match="'<e>' in a text as text, got LetterTokenizer"):
        checkpoint_module._check_spelling(tokenizer)
