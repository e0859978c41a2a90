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
from ctxwin.engines.encoding.families import both_ways
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.kv.config import sliding_window
from ctxwin.store import Store
from engines.conformance import EngineConformance
from engines.families import WRITERS
from engines.random_edits import RandomEdits
from twins import guard


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


@guard
class TestLlavaNext(OnTransformers):
    """A picture whole and in tiles, whose rows end in a token; chunks of a hundred tokens."""

    picture_tokens = (88, 36)
    gridded = roles_alike = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("llava_next")


@guard
class TestLlavaNextVideo(TestLlavaNext):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("llava_next_video")


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


class TestGemma3(RandomEdits, OnTransformers):
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


class TestDeepseekV2(RandomEdits, OnTransformers):
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


@guard
class TestDeepseekVL(RandomEdits, OnTransformers):
    """Every picture of one size, for two towers; a template that trims texts and takes lists only."""

    picture_tokens = (16, 16)
    words = ("one", "two")
    gridded = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, folders: Callable[[str], Path]) -> Path:
        return folders("deepseek_vl_hybrid")


@pytest.mark.parametrize("name", WRITERS)
def test_doctor_says_what_opening_does(name: str, folders: Callable[[str], Path]) -> None:
    found = assess(folders(name))  # which other tests here open
    assert found.standing == "tested" and "hf" in found.engines, found
    sees = name in ("gemma3", "gemma4", "gemma4_experts")
    if sees and both_ways(AutoConfig.from_pretrained(folders(name))):
        assert found.engines == ("hf",) and "lets no token see those behind it" in found.reason
    if sliding_window(AutoConfig.from_pretrained(folders(name))):
        assert "tokens only" in found.layout
