"""A long session of `web_agent.py` without a browser: does a step cost the same at the end, and does memory stay bounded?

Its pages are rendered here, its checkpoints go to SQLite, and what windows compute goes to a store of bounded size.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import agent_options
from langgraph.checkpoint.sqlite import SqliteSaver
from PIL import Image
from web.pages import Pages
from web.policy import Shopper
from web_agent import Context, budget_for, graph

from ctxwin import Chunk, Window, open_engine, open_store
from ctxwin.engines.base import Engine
from ctxwin.store import parse_bytes
from ctxwin.tiny import world
from ctxwin.view import Trace
from ctxwin.window.events import Event


class Rendered:
    """Stands in for `web.browser.Browser`: the same pages, drawn."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.url = "0"

    def open(self, url: str) -> None:
        self.url = url

    def links(self) -> list[str]:
        return ["Next"]

    def click(self, link: str) -> None:
        self.url = str(int(self.url) + 1)

    def screenshot(self) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(world.render(self._pages.frames[int(self.url)])).save(buffer, "PNG")
        return buffer.getvalue()


class Score:
    """Sees every window that a node opens, and counts the right answers."""

    def __init__(self) -> None:
        self.asks = self.right = 0
        self._said = ""

    def watch(self, window: Window) -> None:
        window.observe(self._hear)

    def _hear(self, event: Event) -> None:
        if event.answer:
            self._said = event.answer.text.strip()

    def truth(self, text: str | None) -> None:
        self.asks += 1
        self.right += self._said == text


def run(engine: Engine, pages: Pages, seed: int, path: Path, trace: Trace | None, say: Any) -> dict[str, Any]:
    """Walks through all pages, with checkpoints in the file ``path``; returns the figures."""
    policy, browser, score = Shopper(pages, seed), Rendered(pages), Score()
    budget = budget_for(engine, Chunk.image(browser.screenshot(), text="t=88 s"), policy)
    context = Context(
        engine=engine,
        ledger=score,
        observer=trace,
        browser=browser,
        policy=policy,
        budget=budget,
        serving={},
        steps=len(pages),
    )
    tokens, resident = list[int](), list[int]()  # tokens computed and memory held after each step
    state: dict[str, Any] = {}
    with SqliteSaver.from_conn_string(str(path)) as saver:
        agent = graph().compile(checkpointer=saver)
        config = {"configurable": {"thread_id": "session"}, "recursion_limit": 10 * len(pages)}
        for state in agent.stream({"url": browser.url}, config, context=context, stream_mode="values"):
            if state.get("pages") and not state["todo"]:
                tokens.append(engine.counters.prefill_tokens - sum(tokens))
                resident.append(resident_bytes())
                if len(tokens) % 25 == 0:
                    mean = sum(tokens[-25:]) / 25
                    say(
                        f"step {len(tokens)}: {mean:.0f} tokens computed a step; {score.right} of {score.asks} answers right"
                    )
    quarter = len(pages) // 4
    sizes = checkpoint_bytes(path)
    second, last = sum(tokens[quarter : 2 * quarter]), sum(tokens[-quarter:])
    return {
        "steps": len(tokens),
        "tokens_second_quarter": second,
        "tokens_last_quarter": last,
        "ratio": last / second,
        "asks": score.asks,
        "right": score.right,
        "vision_encodes": engine.counters.vision_encodes,
        "checkpoints": len(sizes),
        "checkpoint_bytes_max": max(sizes),
        "checkpoint_bytes_mean": sum(sizes) / len(sizes),
        "store_bytes": engine.store.stats().bytes,
        "window_tokens": state["window"]["tokens"],
        "window_evicted": state["window"]["evicted"],
        "rss_growth_bytes": resident[-1] - resident[quarter],
    }


def resident_bytes() -> int:
    """Memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def checkpoint_bytes(path: Path) -> list[int]:
    """Return the size of every checkpoint in the file: the state, its metadata, and the writes of the nodes after it."""
    query = """select length(c.checkpoint) + length(c.metadata) + coalesce(sum(length(w.value)), 0)
        from checkpoints c left join writes w using (thread_id, checkpoint_ns, checkpoint_id) group by c.checkpoint_id"""
    with closing(sqlite3.connect(path)) as base:
        return [size for (size,) in base.execute(query)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = agent_options.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="pages to visit, at least 8; default: %(default)s")
    parser.add_argument("--store", default="8MB", metavar="SIZE", help="most bytes of the store; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.steps < 8:
        parser.error(f"--steps must be at least 8 (four quarters of two), got {options.steps}")
    for name, value in agent_options.QUIET.items():
        os.environ.setdefault(name, value)
    begin, store = time.perf_counter(), open_store("memory:", max_bytes=options.store)
    say = (lambda line: None) if options.json else print
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "session.sqlite"
        trace = stack.enter_context(Trace(options.trace)) if options.trace else None
        engine = stack.enter_context(open_engine(options.model, engine=options.engine, store=store))
        figures = run(engine, Pages(options.seed, options.steps), options.seed, path, trace, say)
        about = {"example": "web_session", "model": options.model, "engine": engine.spec.name, "seed": options.seed}
    figures |= {"store_max_bytes": parse_bytes(options.store), "seconds": time.perf_counter() - begin}
    if options.json:
        print(json.dumps({**about, **figures}))
        return
    f = figures
    print(f"last quarter: {f['tokens_last_quarter']} tokens computed, {f['ratio']:.3f} times as many as in the second")
    print(f"{f['checkpoints']} checkpoints, the largest {f['checkpoint_bytes_max']:,} bytes")
    print(f"store: {f['store_bytes']:,} of {f['store_max_bytes']:,} bytes; window: {f['window_tokens']} tokens")
    print(f"memory of the process: {f['rss_growth_bytes'] / 1e6:+.0f} MB since the first quarter")


if __name__ == "__main__":
    main()
