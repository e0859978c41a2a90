"""An answer made in a thread of its own, its parts read by whoever streams it, and as LangChain's chunks."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGenerationChunk

from ctxwin.adapters.langchain.toolcalls import Part

P = TypeVar("P")
R = TypeVar("R")


class Worker(Generic[P, R]):
    """Runs ``work(tell, stopped)`` in a thread: it tells parts and returns a result, and polls whether to stop.

    `get` gives the parts in order; then `result` holds the result.
    """

    def __init__(self, work: Callable[[Callable[[P], None], Callable[[], bool]], R]) -> None:
        self.result: R | None = None
        self._parts: queue.SimpleQueue[list[P] | R | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name="ctxwin-answer", daemon=True)
        self._thread.start()

    def get(self) -> list[P] | None:
        """The next parts; None at the end. Blocks; raises what the work raised."""
        item = self._parts.get()
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, list):
            return item
        self.result = item
        return None

    def stop(self) -> None:
        """Asks the work to stop, and does not wait."""
        self._stop.set()

    def close(self) -> None:
        """Stops the work and waits for it."""
        self._stop.set()
        self._thread.join()

    def _run(self, work: Callable[[Callable[[P], None], Callable[[], bool]], R]) -> None:
        try:
            self._parts.put(work(lambda part: self._parts.put([part]), self._stop.is_set))
        except BaseException as error:  # handed to the reader's thread, which raises it
            self._parts.put(error)


class Chunks:
    """Parts of an answer as streamed chunks; calls are numbered."""

    def __init__(self) -> None:
        self._calls = 0

    def of(self, part: Part) -> ChatGenerationChunk:
        if isinstance(part, str):
            return ChatGenerationChunk(message=AIMessageChunk(content=part))
        # What an invalid call wrote is no JSON, so it stays invalid.
        args = json.dumps(part["args"], ensure_ascii=False) if isinstance(part["args"], dict) else part["args"]
        chunk = tool_call_chunk(name=part["name"], args=args, id=part["id"], index=self._calls)
        self._calls += 1
        return ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[chunk]))
