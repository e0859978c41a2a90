"""Another process resumes the thread: over the store on disk, and with that store wiped between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ctxwin import Chunk

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, sqlite3, sys
from pathlib import Path
from typing import Annotated, Any, TypedDict
sys.path.insert(0, sys.argv[1])
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt
from ctxwin import Chunk, Fidelity, open_store
from langchain_ctxwin.langgraph import WindowContext, merge_windows, open_window
from window.fake import FakeEngine

folder = Path(sys.argv[2])
for line in sys.stdin:  # a step each, in a process of its own that has nothing but what is imported here
    child = os.fork()
    if child == 0:
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{line.strip()} failed")
    print(flush=True)  # it has ended
else:
    sys.exit()
step = line.strip()

class State(TypedDict, total=False):
    window: Annotated[dict[str, Any], merge_windows]
    frame: int
    answer: str
    ids: list[str]

def look(state: State, runtime: Runtime[WindowContext]) -> State:
    with open_window(state.get("window"), runtime, system_prompt="hd", budget=60, fidelity=Fidelity("exact")) as window:
        window.append(Chunk.image(folder / f"{state['frame']}.png", text=f"t={state['frame']}"))
        window.slide(max(0, len(window.ids) - 2))
        answer = window.ask("what?", max_tokens=3)
        if state["frame"] == 4:
            interrupt([answer.text, *window.ids])
        window.check()
        return {"window": window.ref(), "answer": answer.text, "ids": list(window.ids)}

graph = StateGraph(State, context_schema=WindowContext)
graph.add_node("look", look)
graph.add_edge(START, "look")
asked = []

class Engine(FakeEngine):
    def generate(self, *args, **options):
        asked.append(1)
        return super().generate(*args, **options)

with Engine(open_store(f"disk:{folder / 'store'}")) as engine:
    app = graph.compile(checkpointer=SqliteSaver(sqlite3.connect(folder / "threads.sqlite", check_same_thread=False)))
    thread = {"configurable": {"thread_id": "t"}}
    if step == "begin":
        for frame in (1, 2, 3, 4):
            out = app.invoke({"frame": frame}, thread, context=WindowContext(engine))
        shown = out["__interrupt__"][0].value
    else:
        out = app.invoke(Command(resume="go"), thread, context=WindowContext(engine))
        shown = [out["answer"], *out["ids"]]
    print(json.dumps({
        "shown": shown, "asked": len(asked), "encodes": engine.counters.vision_encodes,
        "prefilled": engine.counters.prefill_tokens, "evicted": out["window"]["evicted"],
    }), flush=True)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs a step in a process of its own, forked from one that has imported everything and run nothing."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(ROOT / "tests"), str(tmp_path)]
    strict = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"}
    with (
        (tmp_path / "errors.txt").open("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=strict
        ) as running,
    ):
        assert running.stdin is not None and running.stdout is not None
        stdin, stdout = running.stdin, running.stdout

        def run(step: str) -> dict[str, Any]:
            print(step, file=stdin, flush=True)
            told: dict[str, Any] = json.loads(stdout.readline() or "null") or {}
            assert told and stdout.readline() == "\n", (tmp_path / "errors.txt").read_text()
            return told

        yield run
        stdin.close()
        assert running.wait(60) == 0
        assert "lock" not in (tmp_path / "errors.txt").read_text()


def test_another_process_resumes_the_thread(
    tmp_path: Path, process: Callable[[str], dict[str, Any]], oracle: Callable[..., str]
) -> None:
    frames = []
    for i in range(1, 5):
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(tmp_path / f"{i}.png")
        frames.append(Chunk.image(tmp_path / f"{i}.png", text=f"t={i}"))
    first = process("begin")
    assert first["shown"][0] == oracle(frames[2:], "what?")
    threads = (tmp_path / "threads.sqlite").read_bytes()

    resumed = process("resume")
    assert resumed["shown"] == first["shown"], "the same answer about the same placements"
    assert (resumed["asked"], resumed["encodes"], resumed["evicted"]) == (0, 0, 2)

    (tmp_path / "threads.sqlite").write_bytes(threads)
    shutil.rmtree(tmp_path / "store")
    resumed = process("resume")
    assert resumed["shown"] == first["shown"]
    # Computed again from the files; what had been evicted before is lost.
    assert (resumed["asked"], resumed["encodes"], resumed["evicted"]) == (1, 2, 1)
