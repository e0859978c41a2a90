"""Model families on vLLM: the conformance suite on each, and the transformers engine as an oracle.

Each class starts vLLM once; the tests that need further starts (a dozen seconds each) are slow ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from adapters.vllm.on_vllm import ALL, CLOSE, OnVLLM, gap
from ctxwin.chunk import Chunk
from ctxwin.doctor.models import assess
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.errors import UnsupportedModel
from ctxwin.opening import open_engine
from ctxwin.store import Store, open_store
from engines import models
from engines.conformance import HEADER, QUERY, EngineConformance, laid, picture
from engines.families import WRITERS
from engines.random_edits import RandomEdits
from twins import guard

if TYPE_CHECKING:
    from ctxwin_vllm.core import Core

# The smallest latent that vLLM's CPU kernel for latent attention takes.
LATENT = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)


class OnFamily(OnVLLM):
    """The suite on a random model of the family named, of one that sees."""

    family: str

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return models.wide(WRITERS[cls.family], tmp_path_factory.mktemp(f"vllm_{cls.family}"))

    def test_pictures_against_transformers(self, engine: Engine, reference: Engine) -> None:
        clip = Chunk.video([picture(i) for i in range(3)], fps=2.0)
        self.compare(engine, reference, [Chunk.image(picture(1)), Chunk.image(picture(2, 56)), clip], "pictures")


class OnText(OnVLLM):
    vision = False

    def test_text_against_transformers(self, engine: Engine, reference: Engine) -> None:
        self.compare(engine, reference, [Chunk.text(f"frame {i} is red\n") for i in range(3)], "text")


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """A model on both engines."""
    with OnVLLM.make_engine(folder, open_store("memory:")) as engine, HFEngine(folder, dtype="float32") as reference:
        yield engine, reference


@guard
class TestQwen3VL(OnFamily):
    family = "qwen3_vl"

    def test_pictures_against_transformers(self, engine: Engine, reference: Engine) -> None:
        self.compare(engine, reference, [Chunk.image(picture(1)), Chunk.image(picture(2, 56))], "pictures")
        key = engine.encode(Chunk.image(picture(1))).media[0].key
        assert engine.embed(key).shape == (9, 64 * 3)  # deepstack features beside the embeddings

    def test_a_stamped_video_against_transformers(self, engine: Engine, reference: Engine) -> None:
        clip = Chunk.video([picture(i) for i in range(4)], fps=2.0)
        assert [m.grid_thw for m in engine.encode(clip).media] == [(1, 6, 6)] * 2
        self.compare(engine, reference, [clip, Chunk.image(picture(3, 56)), clip], "video")

    def test_gaps_in_stamped_videos_are_computed_at_once(self, engine: Engine, reference: Engine) -> None:
        clips = [Chunk.video([picture(i + j) for i in range(4)], fps=2.0) for j in (1, 2)]
        self.compare_gaps(engine, reference, [clips[0], Chunk.image(picture(3)), clips[1]])


@pytest.mark.slow
class TestInternVL(OnFamily):
    family = "internvl"
    picture_tokens = (20, 4)


@pytest.mark.slow
class TestGLM4V(OnFamily):
    family = "glm4v"


@pytest.mark.slow
class TestMistral3(OnFamily):
    """Ministral 3's decoder: the temperature of its queries takes a step that no test here reaches."""

    family = "ministral3"
    picture_tokens = (12, 6)
    opening = 1


@pytest.mark.slow
class TestSmolVLM(OnFamily):
    family = "smolvlm"
    picture_tokens = (34, 34)


@pytest.mark.slow
class TestGemma3(OnFamily):
    """As a config says it whose pictures are causal: vLLM's attention on a processor knows no others."""

    picture_tokens = (10, 10)
    words = ("one", "two")
    opening = 0

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("vllm_gemma3")
        models.wide(models.write_gemma3, folder)
        models.edit_config(folder, whole=True, is_mm_prefix_lm=False)
        return folder

    def test_pictures_against_transformers(self, engine: Engine, reference: Engine) -> None:
        assert not engine.encode(Chunk.video([picture(i) for i in range(3)], fps=2.0)).media[0].whole
        super().test_pictures_against_transformers(engine, reference)


@pytest.mark.slow
class TestGemma4(OnFamily):
    """One of the smaller models, whose pictures are causal."""

    family = "gemma4_causal"
    picture_tokens = (66, 66)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_pictures_that_see_themselves_both_ways_are_refused_on_a_processor(name: str, tmp_path: Path) -> None:
    folder = models.wide(getattr(models, f"write_{name}"), tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="lets no token see those behind it"):
        open_engine(f"vllm:{folder}")
    assert assess(folder).engines == ("hf",)


@pytest.mark.slow
class TestLlavaOnevision(OnFamily):
    family = "llava_onevision"
    picture_tokens = (17, 17)
    gridded = roles_alike = False


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "llava_next", "pixtral"])
def test_llava_against_transformers(family: str, tmp_path: Path) -> None:
    with opened(models.wide(WRITERS[family], tmp_path / "model")) as engines:
        OnFamily().test_pictures_against_transformers(*engines)


@pytest.mark.slow
class TestKimi(OnFamily):
    """Latent attention that sees. vLLM looks for a bias in its experts, which DeepSeek-V3's way to choose them has."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        fields = dict(topk_method="noaux_tc", scoring_func="sigmoid", **LATENT)
        return models.write_kimi(tmp_path_factory.mktemp("vllm_kimi") / "model", **fields)


@guard
class TestKimiVL(RandomEdits, OnVLLM):
    """A model that vLLM alone has, whose processor is code in its folder; vLLM's own path is the oracle."""

    opening = 4

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return models.write_kimi_vl(tmp_path_factory.mktemp("vllm_kimi_vl") / "model", **LATENT)

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        from ctxwin_vllm.engine import VLLMEngine

        return VLLMEngine(model_dir, dtype="float32", store=store, trust_remote_code=True)

    def test_doctor_says_that_it_is_served(self, engine: Engine, model_dir: Path) -> None:
        found = assess(model_dir)
        assert found.standing == "tested" and found.engines == ("vllm",), found

    def test_pictures_against_vllm(self, engine: Engine, model_dir: Path) -> None:
        """Its processor's ids for the whole prompt with three pictures, its tower and its answer from pixels."""
        from vllm import SamplingParams

        shown = {"type": "image"}
        messages = [
            {"role": "system", "content": HEADER},
            {"role": "user", "content": [shown, shown, shown, {"type": "text", "text": QUERY}]},
        ]
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = [Image.fromarray(p) for p in (picture(1), picture(2, 60), picture(3, 56))]
        core: Core = engine._core  # type: ignore[attr-defined]
        parameters = SamplingParams(max_tokens=4, temperature=0.0, logprobs=-1)
        prompt = {"prompt": text, "multi_modal_data": {"image": images}}
        (plain,) = core.driver.call(lambda: core.driver.llm.generate([prompt], parameters, use_tqdm=False))
        encoded = [engine.encode_system_prompt(HEADER), *(engine.encode(Chunk.image(np.asarray(i))) for i in images)]
        query = engine.encode_query(QUERY)
        assert [i for each in [*encoded, query] for i in each.token_ids] == plain.prompt_token_ids
        ours = engine.generate(laid(encoded), query, ALL)
        assert list(ours.token_ids) == list(plain.outputs[0].token_ids)
        first = plain.outputs[0].logprobs[0]
        assert max(abs(first[token].logprob - value) for token, value in ours.logprobs.items()) < CLOSE


@guard
class TestDeepseekVL2(TestKimiVL):
    """Another one, over a tower of timm's: each picture whole, as one of several."""

    picture_tokens = (13, 13)
    gridded = False
    opening = EngineConformance.opening

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        pytest.importorskip("timm")
        return models.write_deepseek_vl2(tmp_path_factory.mktemp("vllm_deepseek_vl2") / "model", **LATENT)

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        with mock.patch("timm.create_model", models.small_siglip):
            return super().make_engine(model_dir, store)


@guard
class TestDeepseekVL2Tiny(TestDeepseekVL2):
    """Its config names DeepSeek-V2, but its attention is not latent, and pairs other dimensions."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        pytest.importorskip("timm")
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return models.write_deepseek_vl2(tmp_path_factory.mktemp("vllm_deepseek_vl2") / "tiny", tiny=True, **heads)


def test_code_of_a_model_runs_on_demand_only(tmp_path: Path) -> None:
    folder = models.write_kimi_vl(tmp_path / "model", **LATENT)
    with pytest.raises(UnsupportedModel, match=r"code in the folder; to trust it, .* trust_remote_code=True"):
        open_engine(f"vllm:{folder}")
    with pytest.raises(UnsupportedModel, match="transformers has no model 'kimi_vl'; open it as vllm:"):
        open_engine(f"hf:{folder}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral3", "smolvlm", "internvl", "llava", "paddleocr", "gemma4_sharing"])
def test_pictures_between_processes(name: str, tmp_path: Path) -> None:
    """Embeddings reach another process as files: also those that vLLM's model would not take in a request."""
    from ctxwin_vllm.engine import VLLMEngine

    folder = models.wide(getattr(models, f"write_{name}"), tmp_path / "model")
    with (
        VLLMEngine(folder, dtype="float32", processes="multi") as engine,
        HFEngine(folder, dtype="float32") as reference,
    ):
        small = 84 if name == "paddleocr" else 56  # see below
        OnVLLM().compare(engine, reference, [Chunk.image(picture(1)), Chunk.image(picture(2, small))], "pictures")


class TestLatentAttention(RandomEdits, OnText):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return models.write_mla_model(tmp_path_factory.mktemp("vllm_mla") / "v2", **LATENT)


@pytest.mark.slow
class TestLlama(OnText):
    """Grouped heads, Llama 3's scaled frequencies."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return models.write_llama(tmp_path_factory.mktemp("vllm_llama") / "gqa", kv_heads=1, rope=models.LLAMA3)


EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
DECODERS: dict[str, dict[str, object]] = {
    "Gemma": dict(head_dim=32), 
    "Gemma2": dict(head_dim=32, sliding_window=8),
    "Gemma3": models.GEMMA3, "Gemma4": models.GEMMA4, "Gemma4 that shares": models.GEMMA4_SHARING,
     "Glm4": dict(head_dim=32, attention_bias=True), "Granite": {},
    "Mistral": dict(sliding_window=None), "Mixtral": dict(num_local_experts=4), "Phi3": {},
    "Qwen2Moe": EXPERTS, "Qwen3": dict(head_dim=32), "StableLm": {},
    # It has no shared expert: told of one, vLLM would make it and find no weights for it.
    "Qwen3Moe": EXPERTS | dict(head_dim=32, tie_word_embeddings=False, shared_expert_intermediate_size=0),
}  # fmt: skip


@pytest.mark.slow
def test_capped_attention_against_transformers(tmp_path: Path) -> None:
    """On both engines, where leaving the cap out would be seen at once."""
    fields = dict(head_dim=32, sliding_window=8) | models.SHARP
    folder = models.wide(lambda f: models.write_decoder(f, "Gemma2", **fields), tmp_path / "model")
    plain = models.wide(
        lambda f: models.write_decoder(f, "Gemma2", **fields | {"attn_logit_softcapping": None}), tmp_path / "p"
    )
    answers = []
    with opened(folder) as (engine, reference):
        for side in (engine, reference, HFEngine(plain, dtype="float32")):
            encoded = [
                side.encode_system_prompt(HEADER),
                *(side.encode(Chunk.text(f"frame {i} is red")) for i in range(4)),
            ]
            answers.append(side.generate(laid(encoded), side.encode_query(QUERY), ALL))
    ours, theirs, uncapped = answers
    print(f"capped: {gap(ours, theirs):.2g} between the engines, {gap(theirs, uncapped):.2g} without the cap")
    assert gap(ours, theirs) < CLOSE and gap(theirs, uncapped) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_against_transformers(kind: str, tmp_path: Path) -> None:
    name, fields = kind.split()[0], DECODERS[kind]
    folder = models.wide(lambda f: models.write_decoder(f, name, **fields), tmp_path / "model")
    with opened(folder) as engines:
        OnText().test_text_against_transformers(*engines)


@pytest.mark.slow
def test_multi_head_attention_against_transformers(tmp_path: Path) -> None:
    with opened(models.write_llama(tmp_path / "mha", kv_heads=2)) as engines:
        assert engines[0].spec.kv.heads == 2
        OnText().test_text_against_transformers(*engines)


class TestOptions:
    def test_rotation_on_a_cpu_stays_with_torch(self) -> None:
        """vLLM's CPU kernel turns the strided view of latent attention wrongly; its own setting avoids it."""
        from ctxwin_vllm.lifecycle.startup import _correct_rotation

        arguments: dict[str, object] = {"compilation_config": {"custom_ops": ["+rms_norm"], "level": 0}}
        _correct_rotation(arguments)
        assert arguments["compilation_config"] == {"custom_ops": ["+rms_norm", "-rotary_embedding"], "level": 0}
        with pytest.raises(ValueError, match="rotary_embedding"):
            _correct_rotation({"compilation_config": {"custom_ops": ["+rotary_embedding"]}})
        with pytest.raises(ValueError, match="must be a dict"):
            _correct_rotation({"compilation_config": 3})


def test_other_vision_models_are_refused_by_name(tmp_path: Path) -> None:
    folder = models.write_kimi(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Kimi_K25ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"'kimi_k25' cannot be served on vLLM: .*; open it as hf:"):
        open_engine(f"vllm:{folder}")


@pytest.mark.parametrize("family", ["qianfan_ocr", "llava_next_video", "deepseek_vl"])
def test_what_vllm_knows_otherwise_is_refused(family: str, tmp_path: Path) -> None:
    """A class of its own for the config, a model that sees less, or another generation only."""
    folder = WRITERS[family](tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=rf"'{family}' cannot be served on vLLM: .*; open it as hf:"):
        open_engine(f"vllm:{folder}")
    assert assess(folder).engines == ("hf",)


def test_a_model_whose_layers_all_slide_is_refused(tmp_path: Path) -> None:
    folder = models.wide(lambda f: models.write_decoder(f, "Starcoder2", sliding_window=8), tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="layers all slide"):
        open_engine(f"vllm:{folder}")
    assert assess(folder).engines == ("hf",)


@pytest.mark.slow
def test_idefics3_against_transformers(tmp_path: Path) -> None:
    with opened(models.wide(WRITERS["idefics3"], tmp_path / "model")) as engines:
        OnFamily().test_pictures_against_transformers(*engines)


@pytest.mark.slow
def test_qwen3_vl_moe_against_transformers(tmp_path: Path) -> None:
    with opened(models.wide(WRITERS["qwen3_vl_moe"], tmp_path / "model")) as engines:
        TestQwen3VL().test_pictures_against_transformers(*engines)


@pytest.mark.slow
def test_glm4v_moe_against_transformers(tmp_path: Path) -> None:
    with opened(models.wide(WRITERS["glm4v_moe"], tmp_path / "model")) as engines:
        OnFamily().test_pictures_against_transformers(*engines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_ocr", "paddleocr"])
def test_readers_against_transformers(name: str, tmp_path: Path) -> None:
    """All pictures are as large as the tower's: for others transformers' PaddleOCR-VL interpolates places otherwise than vLLM."""
    with opened(models.wide(WRITERS[name], tmp_path / "model")) as (engine, reference):
        assert engine.encode(Chunk.image(picture(2, 56))).media[0].tokens == 4
        chunks = [Chunk.image(picture(1)), Chunk.video([picture(i) for i in range(2, 5)], fps=2.0)]
        OnVLLM().compare(engine, reference, chunks, "pictures")


@pytest.mark.slow
def test_deepseek_v3_against_transformers(tmp_path: Path) -> None:
    """Vllm pairs neighbouring dimensions where transformers caches them apart; the answers agree."""
    folder = models.write_mla_model(
        tmp_path / "v3", "DeepseekV3", topk_method="noaux_tc", scoring_func="sigmoid", **LATENT
    )
    with opened(folder) as engines:
        OnText().test_text_against_transformers(*engines)
