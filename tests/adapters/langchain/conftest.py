from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from ctxwin import Fidelity, open_engine
from ctxwin.engines.base import Engine
from engines.tool_models import write_tool_model
from langchain_ctxwin.chat import ChatCtxwin


@pytest.fixture(scope="session")
def tiny() -> Iterator[Engine]:
    """The bundled model: it sees pictures and takes no tools."""
    with open_engine("tiny:hf") as made:
        yield made


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random text model whose template takes tools in the manner of Hermes and Qwen."""
    with open_engine(f"hf:{write_tool_model(tmp_path_factory.mktemp('caller'))}") as made:
        yield made


@pytest.fixture(scope="session")
def seeing_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random vision model with the same template."""
    with open_engine(f"hf:{write_tool_model(tmp_path_factory.mktemp('seeing'), vision=True)}") as made:
        yield made


@pytest.fixture
def exact(tiny: Engine) -> Iterator[ChatCtxwin]:
    with ChatCtxwin(engine=tiny, fidelity=Fidelity("exact"), max_tokens=8) as made:
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """The standard tests leave it to their user how coroutines are run."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True
