"""Another process resumes the thread: over the store on disk, and with that store wiped between."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ctxwin import Chunk

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, sqlite3, sys
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

folder, step = Path(sys.argv[2]), sys.argv[3]

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
    }))
"""


def _process(folder: Path, step: str) -> dict[str, Any]:
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), str(ROOT / "tests"), str(folder), step],
        capture_output=True, text=True, timeout=120, env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lock" not in done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_another_process_resumes_the_thread(tmp_path: Path, oracle: Callable[..., str]) -> None:
    frames = []
    for i in range(1, 5):
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(tmp_path / f"{i}.png")
        frames.append(Chunk.image(tmp_path / f"{i}.png", text=f"t={i}"))
    first = _process(tmp_path, "begin")
    assert first["shown"][0] == oracle(frames[2:], "what?")
    threads = (tmp_path / "threads.sqlite").read_bytes()

    resumed = _process(tmp_path, "resume")
    assert resumed["shown"] == first["shown"], "the same answer about the same placements"
    assert (resumed["asked"], resumed["encodes"], resumed["evicted"]) == (0, 0, 2)

    (tmp_path / "threads.sqlite").write_bytes(threads)
    shutil.rmtree(tmp_path / "store")
    resumed = _process(tmp_path, "resume")
    assert resumed["shown"] == first["shown"]
    # Computed again from the files; what had been evicted before is lost.
    assert (resumed["asked"], resumed["encodes"], resumed["evicted"]) == (1, 2, 1)
