"""Models that hear, on vLLM: the conformance suite, and the transformers engine as an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapters.vllm.layouts import gap
from adapters.vllm.on_vllm import CLOSE, OnVLLM
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.engines.hf.engine import HFEngine
from ctxwin.errors import UnsupportedModel
from ctxwin.opening import open_engine
from engines import models
from engines.conformance import assert_same_kv
from engines.test_sound import KINDS, clips, real, sounds, tone

pytestmark = [pytest.mark.slow]


@contextmanager
def reference_of(engine: Engine, model_dir: Path) -> Iterator[HFEngine]:
    """Transformers with vLLM's positions: of Qwen2.5-Omni its marks around a video with sound share them two and two."""
    with HFEngine(model_dir, dtype="float32") as opened:
        opened.encoder._positions = engine._core.inputs.positions
        yield opened


class OnVLLMHeard(OnVLLM):
    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, model_dir: Path, engine: Engine) -> Iterator[Engine]:
        with reference_of(engine, model_dir) as opened:
            yield opened

    def test_sounds_against_transformers(self, engine: Engine, reference: Engine) -> None:
        self.compare(engine, reference, sounds(), "sounds")

    @pytest.mark.parametrize("media", [sounds, clips])
    def test_gaps_in_sounds_are_computed_at_once(
        self, engine: Engine, reference: Engine, media: Callable[[], list[Chunk]]
    ) -> None:
        self.compare_gaps(engine, reference, media())

    def test_the_first_tokens_of_sounds_are_linked_and_no_more(self, engine: Engine, reference: Engine) -> None:
        """A request that ends in a sound has one of as many tokens, and of Qwen3-Omni the mark that closes it."""
        heard = [Chunk.audio(tone(i, 4.0), 16000) for i in (1, 2)]
        ours, theirs = (self.linked(side, heard, "first") for side in (engine, reference))
        assert ours.token_ids == theirs.token_ids and gap(ours, theirs) < CLOSE
        assert theirs.computed_tokens < sum(engine.encode(chunk).tokens for chunk in heard)
        assert ours.computed_tokens == theirs.computed_tokens + 2 * self.closing
        for i, span in theirs.captured.items():
            assert_same_kv(ours.captured[i], span, CLOSE)

    def test_videos_with_their_sound_against_transformers(self, engine: Engine, reference: Engine) -> None:
        self.compare(engine, reference, clips(), "clips")


@pytest.mark.guard
class TestQwen25Omni(OnVLLMHeard):
    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return models.wide(models.write_omni, tmp_path_factory.mktemp("vllm_qwen2_5_omni"))


@pytest.mark.guard
class TestQwen3Omni(OnVLLMHeard):
    closing = 1

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("vllm_qwen3_omni")
        return models.wide(lambda f: models.write_omni(f, "qwen3_omni_moe"), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_sounds_between_processes(kind: str, tmp_path: Path) -> None:
    """Embeddings reach another process as files, and its model pairs videos with their sounds, too."""
    from ctxwin_vllm.engine import VLLMEngine

    folder = models.wide(lambda f: models.write_omni(f, kind), tmp_path / "model")
    with VLLMEngine(folder, dtype="float32", processes="multi") as engine, reference_of(engine, folder) as reference:
        OnVLLM().compare(engine, reference, sounds(), "sounds")
        OnVLLM().compare(engine, reference, clips(), "clips")


def test_a_thinker_alone_is_refused(tmp_path: Path) -> None:
    """Before vLLM starts, which has no model of it."""
    from transformers import AutoProcessor

    folder = models.write_omni(tmp_path / "qwen2_5_omni")
    real(folder).save_pretrained(tmp_path / "thinker")
    AutoProcessor.from_pretrained(folder).save_pretrained(tmp_path / "thinker")
    with pytest.raises(UnsupportedModel, match=r"vLLM opens the whole model's folder only; open it as hf:"):
        open_engine(f"vllm:{tmp_path / 'thinker'}")
