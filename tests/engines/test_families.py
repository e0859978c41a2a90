"""Model families on the transformers engine: the conformance suite on each, and transformers' own path as an oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxwin.engines.base import Engine
from ctxwin.engines.hf import HFEngine
from ctxwin.store import Store
from engines.conformance import EngineConformance
from engines.models import write_internvl, write_kimi, write_mla_model, write_vision_model


class OnTransformers(EngineConformance):
    @classmethod
    def make_engine(cls, model_dir: Path, store: Store) -> Engine:
        return HFEngine(model_dir, dtype="float32", store=store)


class TestQwen3VL(OnTransformers):
    """Deepstack, interleaved M-RoPE, timestamps as text."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_vision_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


class TestInternVL(OnTransformers):
    """One-axis positions, tiles, text that the template writes behind a picture."""

    picture_tokens = (20, 4)

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_internvl(tmp_path_factory.mktemp("internvl"))


class TestDeepseekV2(OnTransformers):
    """Latent attention."""

    vision = False

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_mla_model(tmp_path_factory.mktemp("deepseek_v2"))


class TestKimi(OnTransformers):
    """Latent attention that sees."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_kimi(tmp_path_factory.mktemp("kimi"))
