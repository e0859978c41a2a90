"""Ends a request while its KV is still being loaded, with vLLM in this process: ``python late_load.py``; prints JSON.

On a GPU a load in the background takes several steps. Here it is done at once, and said to be so some steps behind the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
LATE = 5
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory_bytes": 1 << 27, "max_model_len": 2048, "skip_mm_profiling": True,
    "enforce_eager": True, "block_size": 32, "disable_log_stats": True,
}  # fmt: skip


def main() -> None:
    from ctxwin.engines.torchvision_repair import repair

    repair()
    from vllm import LLM

    from ctxwin import Chunk
    from ctxwin.engines.sampling import Sampling
    from ctxwin.engines.segments import Segment
    from ctxwin.errors import EngineFailed
    from ctxwin.tiny import checkpoint_dir
    from ctxwin_vllm.connector.worker import WorkerHalf
    from ctxwin_vllm.core import engine_arguments
    from ctxwin_vllm.engine import VLLMEngine

    folder = str(checkpoint_dir())
    llm: Any = LLM(**{"model": folder, **engine_arguments(folder, OPTIONS)})
    engine = VLLMEngine.attach(llm, model=folder)
    driver: Any = engine._core.driver
    head, text = engine.encode_system_prompt("You answer."), engine.encode(Chunk.text("one two three four five " * 12))
    first = Segment(
        head, 0, span=engine.prefill([], head, 0)
    )  # nobody but the engine steps an idle vLLM of this process
    layout = [first, Segment(text, head.advance, span=engine.prefill([first], text, head.advance))]
    query = engine.encode_query("what is six?")
    driver.reset_prefix_cache()
    plain, steps, stopped = WorkerHalf.get_finished, 0, threading.Event()

    def late(self: Any, finished: set[str]) -> Any:
        nonlocal steps
        loads, self._receiving = self._receiving, {}
        steps += stopped.is_set()
        if steps > LATE:
            self._receiving, loads = loads, {}
        result = plain(self, finished)
        self._receiving |= loads
        return result

    WorkerHalf.get_finished = late  # type: ignore[method-assign,assignment]
    said: list[str] = []

    def ask() -> None:
        try:
            engine.generate(layout, query, Sampling(max_tokens=12, hold=0.5))  # it captures all of its KV
        except EngineFailed as error:
            said.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    while [request.status.name for request in [*scheduler.requests.values()]] != ["WAITING_FOR_REMOTE_KVS"]:
        time.sleep(0.001)
    ticket = next(iter(driver._tickets.values()))
    driver.cancel(ticket)  # as Ctrl-C does, a stream that is closed, an engine that is closed
    ticket.outputs.put(EngineFailed("stopped"))
    stopped.set()
    asking.join(60)
    WorkerHalf.get_finished = plain  # type: ignore[method-assign]
    again = engine.generate(layout, query, Sampling(max_tokens=3)).token_ids
    driver.reset_prefix_cache()
    print(json.dumps({"said": said, "again": len(again), "dead": repr(driver._dead)}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
