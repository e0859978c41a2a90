"""What a test needs beside Python, found out here so that no test has to say it twice.

Markers set automatically: ``vllm`` (skips without vLLM), ``browser`` (drives Chromium), ``redis`` (starts a server). `make
check` runs what has none of them and is not in `LONG`. ``guard`` marks the slow tests that continuous integration runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent

os.environ.setdefault("CTXWIN_AUDITS", "0")  # work in the background would be counted; `audit` tests switch it on

# The same programs in every run, so that a change is not blamed for what it did not break. Others, and so new faults, are found
# by `make test PYTEST_ARGS=--hypothesis-profile=default`.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

LONG = frozenset((ROOT / "long.txt").read_text().split())
"""Files that took more than 1.5 s of one processor when measured; `make test` runs them."""

_TIMED = frozenset({"test_cost", "test_cost_lanes", "test_cost_policy"})

# The studies are part of no wheel: `evals.studies` is found in the checkout, everything else where it is installed.
sys.path.append(str(Path(__file__).parents[1]))

GUARDS = (
    "docs/test_pages.py::",
    "adapters/ray/test_deploy.py::",
    "adapters/test_vllm_adapters.py::",
    "engines/test_families.py::test_a_reader_without_a_template",
    "engines/test_outputs.py::",
    "engines/test_vllm_compiled.py::",
    "engines/test_vllm_drafters.py::",
    "engines/test_vllm_encoder_cache_windows.py::",
    "engines/test_vllm_failures.py::",
    "engines/test_vllm_hybrid.py::",
    "engines/test_vllm_hybrid_maps.py::",
    "engines/test_vllm_families.py::TestGLM4V::",
    "engines/test_vllm_families.py::TestInternVL::",
    "engines/test_vllm_families.py::TestGemma3::",
    "engines/test_vllm_families.py::TestKimi::",
    "engines/test_vllm_families.py::TestLlavaOnevision::",
    "engines/test_vllm_families.py::TestGemma4::",
    "engines/test_vllm_families.py::TestMistral3::",
    "engines/test_vllm_families.py::TestSmolVLM::",
    "engines/test_vllm_families.py::test_readers_against_transformers",
    "engines/test_vllm_families.py::test_pictures_between_processes",
    "engines/test_vllm_families.py::test_deepseek_v3_against_transformers",
    "engines/test_vllm_families.py::test_qwen3_vl_moe_against_transformers",
    "engines/test_vllm_families.py::test_glm4v_moe_against_transformers",
    "engines/test_vllm_modes.py::",
    "engines/test_vllm_prefix.py::",
    "engines/test_vllm_relocation.py::test_a_model_is_refused",
    "engines/test_vllm_settings.py::",
    "engines/test_vllm_tensor_parallel.py::",
    "engines/test_vllm_watchdog.py::",
    "evals/probe/test_probe_models.py::",
    "evals/test_kill.py::",
    "examples/test_web_session.py::test_many_steps_cost_the_same_and_stay_bounded[80]",
    "serve/test_vllm_plugin.py::",
    "tiny/test_hybrid_model.py::",
    "audit/test_turns.py::",
)
"""Whose slow tests nothing else stands for: families, adapters and settings on vLLM, ranks, kills, turns."""

_SAYS = {
    "vllm": ("vLLM is not installed", 'importorskip("vllm"'),
    "browser": ("need_chromium(", "chromium("),
    "redis": ("need_redis(",),
}


@functools.cache
def _said(path: str) -> frozenset[str]:
    """What all tests of a file need, by its unindented lines."""
    return _named("\n".join(line for line in Path(path).read_text().splitlines() if line and not line[0].isspace()))


@functools.cache
def _needed(function: Callable[..., object]) -> frozenset[str]:
    """What a test or a fixture needs, by its source; nothing for those of plugins."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not code.co_filename.startswith(str(ROOT)):
        return frozenset()
    return _named(inspect.getsource(code))


def _named(source: str) -> frozenset[str]:
    return frozenset(name for name, words in _SAYS.items() if any(word in source for word in words))


def _needs(item: pytest.Function) -> frozenset[str]:
    found = _said(str(item.path)) | _needed(item.function)
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        found = found.union(*(_needed(definition.func) for definition in definitions))
    for mark in item.iter_markers("skipif"):
        found |= _named(str(mark.kwargs.get("reason", "")))
    if item.path.name.startswith("test_vllm") or "vllm" in item.name.partition("[")[2]:
        found |= {"vllm"}
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="only what needs neither vLLM, a browser nor long: `make check`"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that `make check` runs nothing of are not even imported."""
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    return True if name in LONG or collection_path.name.startswith("test_vllm") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function):
            for name in _needs(item):
                item.add_marker(name)
        if item.path.relative_to(ROOT).as_posix() in LONG:
            item.add_marker("long")
        if item.get_closest_marker("slow") and item.nodeid.removeprefix("tests/").startswith(GUARDS):
            item.add_marker("guard")
    if config.getoption("--quick"):
        left_out = [item for item in items if any(item.get_closest_marker(name) for name in ("long", *_SAYS))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(autouse=True, scope="module")
def _prices_stand_still(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lanes go by cost, and what a call takes on a busy machine is chance: only tests of costs learn from it."""
    from ctxwin.engines.cost import Fit

    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in _TIMED:
            patch.setattr(Fit, "observe", lambda self, amounts, ms: None)
        yield
