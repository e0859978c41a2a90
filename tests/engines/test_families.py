"""Model families on the transformers engine: transformers' own path as an oracle, and the conformance suite.

Every run has the suite on one family of each kind of attention and positions; the others are guards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from ctxwin.doctor.models import assess
from ctxwin.engines.base import Engine
from ctxwin.engines.encoding.families import bidirectional_layers
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.kv.config import sliding_window
from ctxwin.store import Store
from engines.conformance import EngineConformance
from engines.families import WRITERS
from engines.random_edits import RandomEdits
from twins import guard


class OnTransformers(EngineConformance):
    family: str

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders(cls.family)

    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)


class TestQwen3VL(OnTransformers):
    """Deepstack, interleaved M-RoPE, timestamps as text."""

    family = "qwen3_vl"


class TestInternVL(OnTransformers):
    """One-axis positions, tiles, text that the template writes behind a picture."""

    family = "internvl"
    picture_tokens = (20, 4)


@guard
class TestQianfanOCR(OnTransformers):
    """InternVL's tiles over Qwen3; what the template writes for a picture is no token."""

    family = "qianfan_ocr"
    picture_tokens = (20, 4)


class TestGLM4V(OnTransformers):
    """M-RoPE in neighbouring pairs over half of each head."""

    family = "glm4v"


@guard
class TestMistral3(OnTransformers):
    """Row breaks within a picture, no marks around it."""

    family = "mistral3"
    picture_tokens = (12, 6)
    opening = 1


@guard
class TestSmolVLM(OnTransformers):
    """Tiles with their places as words, a template that takes lists only."""

    family = "smolvlm"
    picture_tokens = (34, 34)


@guard
class TestLlavaOnevision(OnTransformers):
    """Pictures taken whole, each as one of several; a template that puts them in front of a message's text."""

    family = "llava_onevision"
    picture_tokens = (17, 17)
    gridded = roles_alike = False


@guard
class TestLlavaNext(OnTransformers):
    """A picture whole and in tiles, whose rows end in a token; chunks of a hundred tokens."""

    family = "llava_next"
    picture_tokens = (88, 36)
    gridded = roles_alike = False


@guard
class TestLlavaNextVideo(TestLlavaNext):
    family = "llava_next_video"


class TestLlamaGQA(OnTransformers):
    """Two query heads for each KV head, Llama 3's scaled frequencies."""

    family = "llama_gqa"
    vision = False


@guard
class TestLlamaMHA(OnTransformers):
    """As many KV heads as query heads, as in Llama 2."""

    family = "llama_mha"
    vision = False


@guard
class TestGemma2(OnTransformers):
    """Every other layer sees the last eight tokens only."""

    family = "gemma2"
    vision = False


class TestGemma3(RandomEdits, OnTransformers):
    """Every picture of one size, whose tokens see each other both ways."""

    family = "gemma3"
    picture_tokens = (10, 10)  # four of them the tower's
    words = ("one", "two")  # the template trims each text
    opening = 0


@guard
class TestGemma3Text(OnTransformers):
    """Layers that turn by frequencies of their own."""

    family = "gemma3_text"
    vision = False


@guard
class TestGemma4(OnTransformers):
    """Pictures that keep their form, whose tokens see each other both ways where layers slide."""

    family = "gemma4"
    picture_tokens = (66, 66)


@guard
class TestGemma4Text(OnTransformers):
    """Layers of two shapes."""

    family = "gemma4_text"
    vision = False


class TestGemma4Sharing(OnTransformers):
    """Layers without KV of their own, and with embeddings of their own."""

    family = "gemma4_sharing"
    vision = False


class TestDeepseekV2(RandomEdits, OnTransformers):
    """Latent attention."""

    family = "deepseek_v2"
    vision = False


@guard
class TestKimi(OnTransformers):
    """Latent attention that sees."""

    family = "kimi"


@guard
class TestDeepseekVL(RandomEdits, OnTransformers):
    """Every picture of one size, for two towers; a template that trims texts and takes lists only."""

    family = "deepseek_vl_hybrid"
    picture_tokens = (16, 16)
    words = ("one", "two")
    gridded = False


@pytest.mark.parametrize("name", WRITERS)
def test_doctor_says_what_opening_does(name: str, folders: Callable[[str], Path]) -> None:
    found = assess(folders(name))  # which other tests here open
    assert found.standing == "tested" and "hf" in found.engines, found
    sees = name in ("gemma3", "gemma4", "gemma4_experts")
    if sees and bidirectional_layers(AutoConfig.from_pretrained(folders(name))):
        assert found.engines == ("hf",) and "lets no token see those behind it" in found.reason
    if sliding_window(AutoConfig.from_pretrained(folders(name))):
        assert "tokens only" in found.layout
