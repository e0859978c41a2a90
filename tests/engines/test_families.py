"""Model families on the transformers engine: transformers' own path as an oracle, and the conformance suite.

Every run has the suite on one family of each kind of attention and positions; the others are guards.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from ctxwin.chunk import Chunk
from ctxwin.doctor.models import assess
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.families import both_ways
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.engines.sampling import Sampling
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin.kv.config import sliding_window
from ctxwin.opening import open_engine
from ctxwin.store import Store, open_store
from engines.conformance import HEADER, QUERY, EngineConformance, laid, picture, with_spans
from engines.models import (
    GEMMA3,
    GEMMA4,
    GEMMA4_SHARING,
    SHARP,
    edit_config,
    write_decoder,
    write_deepseek_ocr,
    write_gemma3,
    write_gemma4,
    write_gemma4_sharing,
    write_glm4v,
    write_internvl,
    write_kimi,
    write_llava,
    write_mistral3,
    write_mla_model,
    write_paddleocr,
    write_smolvlm,
    write_vision_model,
)
from engines.oracle import assert_answers, real_answer
from twins import guard

LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=48)
WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": lambda folder: write_vision_model(folder, "qwen3_vl"),
    "qwen3_vl_moe": lambda folder: write_vision_model(folder, "qwen3_vl_moe"),
    "internvl": write_internvl,
    "qianfan_ocr": lambda folder: write_internvl(folder, qianfan=True),
    "kimi": write_kimi,
    "kimi_over_v2": lambda folder: write_kimi(folder, "deepseek_v2"),
    "glm4v": write_glm4v,
    "glm4v_moe": lambda folder: write_glm4v(folder, experts=True),
    "glm_ocr": lambda folder: write_glm4v(folder, ocr=True),
    "paddleocr": write_paddleocr,
    "mistral3": write_mistral3,
    "ministral3": lambda folder: write_mistral3(folder, "ministral3"),
    "pixtral": lambda folder: write_mistral3(folder, pixtral=True),
    "smolvlm": write_smolvlm,
    "idefics3": lambda folder: write_smolvlm(folder, "Idefics3"),
    "llava_onevision": write_llava,
    "llava": lambda folder: write_llava(folder, "Llava"),
    "llava_next": lambda folder: write_llava(folder, "LlavaNext"),
    "gemma2": lambda folder: write_decoder(folder, "Gemma2", **DECODERS["Gemma2"]),
    "gemma3": write_gemma3,
    "gemma4": write_gemma4,
    "gemma4_causal": write_gemma4_sharing,
    "gemma4_experts": lambda folder: write_decoder(folder, "Gemma4", **(GEMMA4 | GEMMA4_EXPERTS)),
    "gemma4_text": lambda folder: write_decoder(folder, "Gemma4", **GEMMA4),
    "gemma4_sharing": lambda folder: write_decoder(folder, "Gemma4", **GEMMA4_SHARING),
    "gemma3_text": lambda folder: write_decoder(folder, "Gemma3", **GEMMA3),
    "llama_gqa": lambda folder: write_decoder(folder, "Llama", rope_parameters=LLAMA3),
    "llama_mha": lambda folder: write_decoder(folder, "Llama", num_key_value_heads=4),
    "deepseek_v2": write_mla_model,
    "deepseek_v3": lambda folder: write_mla_model(folder, "DeepseekV3"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's random model, written once."""
    base, made = tmp_path_factory.mktemp("families"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = WRITERS[name](base / name)
        return made[name]

    return folder


class OnTransformers(EngineConformance):
    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)


class TestQwen3VL(OnTransformers):
    """Deepstack, interleaved M-RoPE, timestamps as text."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("qwen3_vl")


class TestInternVL(OnTransformers):
    """One-axis positions, tiles, text that the template writes behind a picture."""

    picture_tokens = (20, 4)

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("internvl")


@guard
class TestQianfanOCR(OnTransformers):
    """InternVL's tiles over Qwen3; what the template writes for a picture is no token."""

    picture_tokens = (20, 4)

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("qianfan_ocr")


class TestGLM4V(OnTransformers):
    """M-RoPE in neighbouring pairs over half of each head."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("glm4v")


@guard
class TestMistral3(OnTransformers):
    """Row breaks within a picture, no marks around it."""

    picture_tokens = (12, 6)
    opening = 1

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("mistral3")


@guard
class TestSmolVLM(OnTransformers):
    """Tiles with their places as words, a template that takes lists only."""

    picture_tokens = (34, 34)

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("smolvlm")


@guard
class TestLlavaOnevision(OnTransformers):
    """Pictures taken whole, each as one of several; a template that puts them in front of a message's text."""

    picture_tokens = (17, 17)
    gridded = roles_alike = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("llava_onevision")


class TestLlamaGQA(OnTransformers):
    """Two query heads for each KV head, Llama 3's scaled frequencies."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("llama_gqa")


@guard
class TestLlamaMHA(OnTransformers):
    """As many KV heads as query heads, as in Llama 2."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("llama_mha")


@guard
class TestGemma2(OnTransformers):
    """Every other layer sees the last eight tokens only."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("gemma2")


class TestGemma3(OnTransformers):
    """Every picture of one size, whose tokens see each other both ways."""

    picture_tokens = (10, 10)  # four of them the tower's
    words = ("one", "two")  # the template trims each text
    opening = 0

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("gemma3")


@guard
class TestGemma3Text(OnTransformers):
    """Layers that turn by frequencies of their own."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("gemma3_text")


@guard
class TestGemma4(OnTransformers):
    """Pictures that keep their form, whose tokens see each other both ways where layers slide."""

    picture_tokens = (66, 66)

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("gemma4")


@guard
class TestGemma4Text(OnTransformers):
    """Layers of two shapes."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("gemma4_text")


class TestGemma4Sharing(OnTransformers):
    """Layers without KV of their own, and with embeddings of their own."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("gemma4_sharing")


class TestDeepseekV2(OnTransformers):
    """Latent attention."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("deepseek_v2")


@guard
class TestKimi(OnTransformers):
    """Latent attention that sees."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("kimi")


def opened(folder: Path, store: Store | None = None) -> HFEngine:
    return HFEngine(folder, dtype="float32", store=store)


def shown(engine: HFEngine) -> list[Encoded]:
    """Header, two pictures of different sizes."""
    images = [Chunk.image(picture(1)), Chunk.image(picture(2, 56))]
    return [engine.encode_system_prompt(HEADER), *(engine.encode(i) for i in images)]


SEEING = [
    name
    for name in WRITERS
    if not name.startswith(
        ("llama", "deepseek", "gemma2", "gemma3_text", "gemma4_text", "gemma4_sharing", "gemma4_experts")
    )
]


@pytest.mark.parametrize("name", SEEING)
def test_pictures_against_the_real_model_path(name: str, folders: Callable[[str], Path]) -> None:
    """The processor's own ids for the whole prompt, and the model's own answer from pixels."""
    from transformers import AutoProcessor

    folder = folders(name)
    engine = opened(folder)
    lists = name.startswith(("smolvlm", "idefics3", "llava", "paddleocr"))
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
    own = name in ("llava", "llava_next")  # the processor begins the prompt
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
def test_a_pooled_video_against_the_real_model_path(frames: int, folders: Callable[[str], Path]) -> None:
    from transformers import AutoProcessor

    folder = folders("llava_onevision")
    engine = opened(folder)
    clip = [picture(i) for i in range(frames)]
    encoded = [engine.encode_system_prompt(HEADER), engine.encode(Chunk.video(clip, fps=2.0))]
    assert [(m.modality, m.tokens) for m in encoded[1].media] == [("video", 4 * frames + 1)]
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "text", "text": HEADER}], [{"type": "text", "text": f"<video>\n{QUERY}"}]
    messages = [{"role": r, "content": c} for r, c in zip(("system", "user"), content, strict=True)]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    video = torch.from_numpy(np.stack(clip)).permute(0, 3, 1, 2)
    inputs = processor(text=[text], videos=[video], return_tensors="pt")
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert ids == inputs["input_ids"][0].tolist()
    assert_answers(engine, encoded, real_answer(folder, ids, pixel_values_videos=inputs["pixel_values_videos"]))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gemma4_sharing", "gemma4_experts"])
def test_text_against_the_real_model_path(name: str, folders: Callable[[str], Path]) -> None:
    engine = opened(folders(name))
    assert engine.spec.kv.family == ("gqa" if name.startswith("gemma") else "mla")
    encoded = [
        engine.encode_system_prompt(HEADER),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(3)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(folders(name), ids))


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


HUNYUAN = dict(head_dim=16, pad_token_id=0)
REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "nanochat": ("NanoChat", {}, "do not turn as its config says"),
    "hunyuan_v1_dense": ("HunYuanDenseV1", HUNYUAN, "do not turn as its config says"),
    "hunyuan_v1_moe": ("HunYuanMoEV1", HUNYUAN | {"num_experts": 2, "moe_topk": 1}, "do not turn as its config says"),
    "falcon": ("Falcon", {"alibi": False, "new_decoder_architecture": False}, "not laid out as its config says"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_is_refused_by_measurement(kind: str, tmp_path: Path) -> None:
    """Their configs show nothing that stands in the way: keys are normalised behind the turn, or laid out differently."""
    name, fields, why = REFUSED[kind]
    write_decoder(tmp_path, name, **fields)
    weights = list(tmp_path.glob("*.safetensors"))
    if kind.startswith("hunyuan"):  # a trained norm is no constant
        rescale(weights[0], "key_layernorm.weight")
    with pytest.raises(UnsupportedModel, match=why):
        opened(tmp_path)


def rescale(file: Path, ending: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    noise = torch.Generator().manual_seed(3)
    for name, weight in weights.items():
        if name.endswith(ending):
            weights[name] = weight * (0.5 + torch.rand(weight.shape, generator=noise))
    save_file(weights, file, metadata={"format": "pt"})


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48)
HEADS = dict(head_dim=16)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=16.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
    truncate=False,
)  # fmt: skip
DECODERS: dict[str, dict[str, object]] = {
    "Apertus": {}, "Cohere": {}, "Ernie4_5": HEADS, "Exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "Gemma": HEADS, "Glm4": HEADS, "Granite": {}, "GraniteMoe": dict(num_local_experts=4),
    "Gemma2": HEADS | dict(sliding_window=8, final_logit_softcapping=30.0), "Gemma3": GEMMA3, "Gemma4": GEMMA4,
    "GptOss": HEADS | dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN),
    "Ministral": HEADS | dict(sliding_window=8), "Starcoder2": dict(sliding_window=8),
    "Mistral": {"sliding_window": None}, "Mixtral": dict(num_local_experts=4), "Nemotron": {}, "Olmo2": {},
    "Olmoe": EXPERTS, "Phi": {}, "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Qwen2Moe": EXPERTS, "Qwen3": HEADS, "Qwen3Moe": EXPERTS | HEADS, "StableLm": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_against_the_real_model_path(kind: str, tmp_path: Path) -> None:
    write_decoder(tmp_path, kind, **DECODERS[kind])
    engine = opened(tmp_path)
    assert engine.counters == type(engine.counters)(), "the measurement is nobody's work"
    encoded = [engine.encode_system_prompt(HEADER), engine.encode(Chunk.text("frame 1 is red\n"))]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    assert_answers(engine, encoded, real_answer(tmp_path, ids, "eager" if kind == "Gemma2" else None))


ASKING_MORE: dict[str, dict[str, object]] = {
    "Gemma2": HEADS | SHARP | dict(sliding_window=8), "VaultGemma": HEADS | SHARP | dict(sliding_window=8),
    "GptOss": DECODERS["GptOss"], "GraniteSWA": dict(sliding_window=8),
    "GraniteMoeSWA": dict(sliding_window=8, num_local_experts=4),
}  # fmt: skip
"""Families whose attention is capped or has sinks, which torch's fused attention leaves out."""


@pytest.mark.parametrize("kind", ASKING_MORE)
def test_attention_is_what_the_config_says(kind: str, tmp_path: Path) -> None:
    write_decoder(tmp_path, kind, **ASKING_MORE[kind])
    engine = opened(tmp_path)
    encoded = [
        engine.encode_system_prompt(HEADER),
        *(engine.encode(Chunk.text(f"frame {i} is red\n")) for i in range(4)),
    ]
    ids = [i for e in [*encoded, engine.encode_query(QUERY)] for i in e.token_ids]
    want = real_answer(tmp_path, ids, "eager")
    assert_answers(engine, encoded, want)
    if kind not in ("GptOss", "GraniteSWA", "GraniteMoeSWA"):  # those that transformers refuses to fuse
        fused = real_answer(tmp_path, ids, "sdpa")
        assert float((fused[1] - want[1]).abs().max()) > 1e-3, "what is left out would be seen here"
    query = engine.encode_query(QUERY)
    made = engine.generate(laid(encoded, capture=True), query, Sampling(max_tokens=1, logprobs=-1))
    loaded = engine.generate(with_spans(laid(encoded), made.captured), query, Sampling(max_tokens=1, logprobs=-1))
    assert loaded.computed_tokens == query.tokens
    assert max(abs(made.logprobs[t] - loaded.logprobs[t]) for t in made.logprobs) < 1e-5


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Phi3", "Gemma"])
def test_others_stay_fused(kind: str, tmp_path: Path) -> None:
    engine = opened(write_decoder(tmp_path, kind, **DECODERS[kind]))
    assert engine.text_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["Gemma2", "Gemma3", "Gemma4", "GptOss", "Ministral", "Starcoder2"])
def test_sliding_layers_do_not_see_all(kind: str, tmp_path: Path) -> None:
    engine = opened(write_decoder(tmp_path, kind, **DECODERS[kind]))
    encoded, query = [engine.encode_system_prompt(HEADER)], engine.encode_query(QUERY)
    slid = engine.logits(laid(encoded), query)
    engine.decoder.window = 1000
    assert float((engine.logits(laid(encoded), query) - slid).abs().max()) > 1e-3
    with pytest.raises(UnsupportedModel, match="sliding layers"):
        engine.attended(laid(encoded), query, encoded[0].advance)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_tokens_of_a_picture_see_those_behind_them(name: str, folders: Callable[[str], Path]) -> None:
    """In all layers or in those that slide, forward as far as a picture reaches; never across two pictures, never cut."""
    engine = opened(folders(name))
    told = engine.decoder.both_ways
    assert told == {"gemma3": "all", "gemma4": "sliding"}[name]
    encoded, query = shown(engine), engine.encode_query(QUERY)
    (media,) = encoded[1].media
    assert media.whole and not encoded[1].media_ranges
    fed = engine.inputs(encoded)
    assert fed.pictures is not None and fed.pictures.unique().tolist() == [-1, 0, 1]
    seen = engine.logits(laid(encoded), query)
    engine.decoder.both_ways = ""
    assert float((engine.logits(laid(encoded), query) - seen).abs().max()) > 1e-3
    engine.decoder.both_ways = told
    span, last = engine.prefill([], encoded[1], 0), media.offset + media.tokens
    for cut in (media.offset + 1, last - 1):
        layout = [Segment(encoded[1], 0, span, recompute=((cut, encoded[1].tokens),))]
        with pytest.raises(ValueError, match="must not cut a picture"):
            engine.logits(layout, query)
    engine.logits([Segment(encoded[1], 0, span, recompute=((0, media.offset), (last, encoded[1].tokens)))], query)


@pytest.mark.parametrize("kind", ["Mistral", "Cohere", "Granite", "Qwen3"])
def test_decoders_turn_in_half_precision(kind: str, tmp_path: Path) -> None:
    with HFEngine(write_decoder(tmp_path, kind, **DECODERS[kind]), dtype="bfloat16") as engine:
        assert engine.spec.kv.dtype == "bfloat16"


@pytest.mark.parametrize("name", WRITERS)
def test_doctor_says_what_opening_does(name: str, folders: Callable[[str], Path]) -> None:
    found = assess(folders(name))  # which other tests here open
    assert found.standing == "tested" and "hf" in found.engines, found
    sees = name in ("gemma3", "gemma4", "gemma4_experts")
    if sees and both_ways(AutoConfig.from_pretrained(folders(name))):
        assert found.engines == ("hf",) and "lets no token see those behind it" in found.reason
    if sliding_window(AutoConfig.from_pretrained(folders(name))):
        assert "tokens only" in found.layout
