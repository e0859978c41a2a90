"""Models that hear, on the transformers engine: the conformance suite, and transformers' own path as an oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.segments import Encoded
from ctxwin.errors import BadMedia, UnsupportedModel
from ctxwin.kv.config import text_backbone
from ctxwin.store import Store, open_store
from ctxwin.window.window import Window
from engines.conformance import ALL, HEADER, QUERY, EngineConformance, laid, picture
from engines.models import OMNI, write_omni
from engines.oracle import assert_answers

KINDS = ["qwen2_5_omni", "qwen3_omni_moe"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("omni")
    return {kind: write_omni(base / kind, kind) for kind in KINDS}


def tone(seed: int, seconds: float, rate: int = 16000) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(int(seconds * rate)) * 0.1
    return noise.astype(np.float32)


def sounds() -> list[Chunk]:
    return [Chunk.audio(tone(1, 1.3), 16000), Chunk.image(picture(1)), Chunk.audio(tone(2, 0.6), 16000, text="then")]


def clips() -> list[Chunk]:
    """Sound of its own in front of a video with sound, behind one without."""
    seen = [picture(i) for i in range(4)]
    heard = Chunk.video(seen, fps=2.0, audio=tone(3, 1.6), sampling_rate=16000)
    return [Chunk.video(seen[:2], fps=2.0), Chunk.audio(tone(1, 0.7), 16000), heard, Chunk.image(picture(2))]


def opened(folder: Path, store: Store | None = None) -> HFEngine:
    return HFEngine(folder, dtype="float32", store=store)


class OnTransformers(EngineConformance):
    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return opened(model_dir, store)

    @pytest.mark.parametrize("media", [sounds, clips])
    def test_gaps_in_sounds_are_computed_at_once(self, engine: Engine, media: Callable[[], list[Chunk]]) -> None:
        encoded, query = prompt(engine, media()), engine.encode_query(QUERY)
        whole = engine.generate(laid(encoded, capture=True), query, ALL)
        self.test_gaps_are_computed_at_once_each_behind_what_is_stored(engine, encoded, query, whole)


class TestQwen25Omni(OnTransformers):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: dict[str, Path]) -> Path:
        return folders["qwen2_5_omni"]


class TestQwen3Omni(OnTransformers):
    """Deepstack for what is seen, none for what is heard."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: dict[str, Path]) -> Path:
        return folders["qwen3_omni_moe"]


def real(folder: Path) -> Any:
    """The thinker as its documentation loads it out of the whole model's folder."""
    import transformers

    name = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}[folder.name]
    return getattr(transformers, f"{name}ThinkerForConditionalGeneration").from_pretrained(folder, dtype=torch.float32)


def prompt(engine: Engine, chunks: list[Chunk]) -> list[Encoded]:
    return [engine.encode_system_prompt(HEADER), *(engine.encode(chunk) for chunk in chunks)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("videos", ["none", "silent", "sound", "long sound"])
def test_all_media_against_the_real_model_path(kind: str, videos: str, folders: dict[str, Path]) -> None:
    """The processor's own ids for the whole prompt, the model's own positions, and its own answer from samples and pixels."""
    from transformers import AutoProcessor

    folder, clip = folders[kind], [picture(i) for i in range(6)]
    engine, processor = opened(folder), AutoProcessor.from_pretrained(folder)
    sounds = [tone(1, 1.3), tone(2, 0.4)]
    content: list[dict[str, str]] = [{"type": "audio"}, {"type": "image"}, {"type": "audio"}]
    chunks = [Chunk.audio(sounds[0], 16000), Chunk.image(picture(9)), Chunk.audio(sounds[1], 16000)]
    media: dict[str, Any] = {"images": [Image.fromarray(picture(9))]}
    if videos != "none":
        track = {"silent": None, "sound": tone(3, 1.7), "long sound": tone(3, 3.9)}[videos]
        chunks.append(Chunk.video(clip, fps=2.0, audio=track, sampling_rate=None if track is None else 16000))
        content.append({"type": "video"})
        sounds += [] if track is None else [track]
        media |= {
            "videos": [torch.from_numpy(np.stack(clip)).permute(0, 3, 1, 2)],
            "fps": 2.0,
            "do_sample_frames": False,
        }
        if not hasattr(processor, "replace_video_with_audio_token"):
            media |= {"use_audio_in_video": track is not None}
        elif track is not None:  # newer versions of transformers
            media |= {"load_audio_from_video": True, "audio_from_video_indices": [None, None, 0]}
    messages = [
        {"role": "system", "content": HEADER},
        {"role": "user", "content": [*content, {"type": "text", "text": QUERY}]},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], audio=sounds, return_tensors="pt", **media)
    encoded, query = prompt(engine, chunks), engine.encode_query(QUERY)
    ids = [i for e in [*encoded, query] for i in e.token_ids]
    assert ids == inputs["input_ids"][0].tolist()

    model, given = real(folder), {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    given["use_audio_in_video"] = videos.endswith("sound")
    if "video_second_per_grid" in given:
        given["video_second_per_grid"] = torch.tensor(given["video_second_per_grid"])
    want, _ = model.get_rope_index(
        inputs["input_ids"], given.get("image_grid_thw"), given.get("video_grid_thw"), inputs["attention_mask"],
        given["use_audio_in_video"], given["feature_attention_mask"].sum(1), given.get("video_second_per_grid"),
    )  # fmt: skip
    places = np.concatenate([p.encoded.positions + p.start for p in laid([*encoded, query])], axis=1)
    np.testing.assert_array_equal(places, want[:, 0].numpy())

    out = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **given,
    )  # fmt: skip
    new = [i for i in out.sequences[0, len(ids) :].tolist() if i != 2]
    assert_answers(engine, encoded, (new, out.logits[0][0].log_softmax(-1)))


@pytest.mark.parametrize("kind", KINDS)
def test_sound_is_heard_once_and_survives_a_restart(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """At the model's own rate, from 24 kHz here: the embeddings lie in the store, and the samples of sound from memory."""
    sound = Chunk.audio(tone(1, 1.5, 24000), 24000, text="at 3 s")
    clip = Chunk.video([picture(i) for i in range(2)], fps=2.0, audio=tone(2, 0.9), sampling_rate=16000)
    with opened(folders[kind], open_store(f"disk:{tmp_path / 'kv'}")) as first, Window(first, HEADER) as window:
        places = [window.append(sound), window.append(clip), window.append(sound)]
        assert first.counters.vision_encodes == 3  # a sound, frames, their sound
        left = {*first.store.list("embed/"), *first.store.list("grid/")}
        assert left == first.media_keys(sound) | first.media_keys(clip)
        told = window.ask(QUERY)
        window.evict(places[0])
        window.reorder([places[2], places[1]])
        assert window.ask(QUERY).usage.vision_encodes == 0
        made = first.encode(clip)
        assert first.embed(made.media[1].key).shape[1] == 64  # nothing of it is added in the layers
        first.store.close()
    with opened(folders[kind], open_store(f"disk:{tmp_path / 'kv'}")) as second, Window(second, HEADER) as window:
        for chunk in (sound, clip, sound):
            window.append(chunk.light())
        assert window.ask(QUERY).token_ids == told.token_ids
        assert second.counters.vision_encodes == 0
        stored = second.encode(clip.light())
        assert (stored.token_ids, stored.media, stored.advance) == (made.token_ids, made.media, made.advance)
        second.store.delete(made.media[1].key)  # the sound is rebuilt from its stored samples
        assert second.encode(sound.model_copy(update={"label": "x"})).media
        fresh = HFEngine(folders[kind], dtype="float32", store=second.store)
        assert fresh.encode(clip.light()).token_ids == made.token_ids and fresh.counters.vision_encodes == 1
        second.store.close()


def test_a_thinker_alone_is_the_same_model(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoProcessor

    folder = folders["qwen2_5_omni"]
    real(folder).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(folder).save_pretrained(tmp_path)
    chunk, answers = Chunk.audio(tone(1, 1.0), 16000), []
    for each in (folder, tmp_path):
        with opened(each) as engine:
            assert engine._checkpoint.config.model_type == "qwen2_5_omni_thinker"
            answers.append(engine.logits(laid(prompt(engine, [chunk])), engine.encode_query(QUERY)))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-5)


def test_what_cannot_be_heard_is_refused(folders: dict[str, Path], vision_dir: Path, text_dir: Path) -> None:
    sound, seen = Chunk.audio(tone(1, 0.5), 16000), [picture(i) for i in range(2)]
    clip = Chunk.video(seen, audio=tone(1, 1.0), sampling_rate=16000)
    for folder in (vision_dir, text_dir):
        with opened(folder) as engine:
            for chunk in (sound, clip, Chunk.message("user", ["hear", sound])):
                with pytest.raises(UnsupportedModel, match="does not hear; use a model that does"):
                    engine.encode(chunk)
    engine = opened(folders["qwen2_5_omni"])
    with pytest.raises(BadMedia, match=r"hears at most 4 s at once, got 4\.5 s; cut it"):
        engine.encode(Chunk.audio(tone(1, 4.5), 16000))
    with pytest.raises(BadMedia, match="long enough to make a token"):
        engine.encode(Chunk.audio(tone(1, 1e-3), 16000))
    with pytest.raises(UnsupportedModel, match="with their sound or without, got both"):
        engine.encode(Chunk.message("user", [clip, Chunk.video(seen)]))
    pad = engine._checkpoint.media.audio
    with pytest.raises(ValueError, match=f"placeholders, got id {pad}; .* or Chunk.audio"):
        engine.encode(Chunk.tokens([pad]))
    assert engine.encode(Chunk.message("user", ["hear", sound, "and see", clip])).media[0].modality == "audio"


def test_frames_between_positions_are_refused(folders: dict[str, Path]) -> None:
    """Transformers turns Qwen3-Omni's frames by fractions of a position, which no integer place of a chunk holds."""
    engine = opened(folders["qwen3_omni_moe"])
    seen = [picture(i) for i in range(4)]
    with pytest.raises(UnsupportedModel, match="choose an fps"):
        engine.encode(Chunk.video(seen, fps=3.0))
    assert engine.encode(Chunk.video(seen, fps=1.0)).media
    heard = {"audio": tone(1, 1.0), "sampling_rate": 16000}
    for kind, fps in (("qwen3_omni_moe", 3.0), ("qwen2_5_omni", 0.9)):
        with pytest.raises(BadMedia, match="must have an fps such as 1 or 2"):
            opened(folders[kind]).encode(Chunk.video(seen, fps=fps, **heard))
    assert opened(folders["qwen2_5_omni"]).encode(Chunk.video(seen, fps=3.0)).media


@pytest.mark.parametrize("kind", KINDS)
def test_configs_of_whole_models_are_read(kind: str, folders: dict[str, Path]) -> None:
    from transformers import AutoConfig

    from ctxwin.engines.encoding.families import family_of

    config = AutoConfig.from_pretrained(folders[kind])
    found = family_of(config)
    assert found is not None and found.sound and found is family_of(text_backbone(config))
    assert OMNI[kind]["audio_token"] == opened(folders[kind])._checkpoint.processor.audio_token
