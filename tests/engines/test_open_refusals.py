"""What cannot be served is refused when an engine is opened: paths that are not there, folders without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxwin import open_engine
from ctxwin.doctor.models import assess
from ctxwin.engines.encoding.checkpoint import model_path
from ctxwin.errors import UnsupportedModel
from ctxwin.opening import _parse
from ctxwin.tiny import checkpoint_dir
from engines import models

PATHS = [
    "./nonexist",
    "../nonexist",
    "/nonexist/model",
    "~/nonexist",
    "nonexist/",
    "a/b/c",
    ".",
    "models\\mine",
    "a model",
]
FILES = ("tokenizer*", "special_tokens*", "vocab*", "merges*", "added_tokens*")


def test_a_store_is_an_open_one_or_a_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="store must be an open store or a name for open_store, got PosixPath"):
        open_engine("tiny:hf", store=tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever asks the Hub fails the test."""

    def asked(*args: Any, **options: Any) -> None:
        raise AssertionError(f"the Hub was asked for {args or options}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_path_that_is_not_there_is_no_hub_name(path: str, engine: str) -> None:
    with pytest.raises(ValueError, match="a model"):
        open_engine(f"{engine}:{path}")
    if path != ".":
        found = assess(path)
        assert found.standing == "unknown" and "no folder is there" in found.reason


@pytest.mark.usefixtures("offline")
def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="name its folder"):
        open_engine("hf:weights.gguf")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-VL-3B-Instruct", "0x/a_b.c-d"])
def test_names_of_the_hub_stay_names(name: str) -> None:
    assert model_path(name) is None


@pytest.mark.parametrize("name", ["tiny:hf", "hf:tiny", "tiny:vllm", "vllm:tiny"])
def test_the_bundled_model_is_named_from_either_side(name: str) -> None:
    assert _parse(name, None) == (name.replace("tiny", "").strip(":"), str(checkpoint_dir()))


@pytest.mark.parametrize("write", [models.write_text_model, models.write_vision_model, models.write_llama])
def test_a_folder_without_a_tokenizer(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", 2) if write is models.write_llama else write(tmp_path / "model")
    for pattern in FILES:
        for file in folder.glob(pattern):
            file.unlink()
    with pytest.raises(UnsupportedModel, match=r"must hold a (tokenizer|processor).*copy the files"):
        open_engine(f"hf:{folder}")
