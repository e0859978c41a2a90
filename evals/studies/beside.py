"""Short chats of others beside an agent whose next prompt is computed ahead: how long they take, with that and without.

The agent is the loop of `evals.studies.chats` with OpenAI's client. The chats come at random times; in every second block of
twenty seconds the agent's next prompt is computed while it thinks.
"""

from __future__ import annotations

import itertools
import threading
import time
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from openai import OpenAI

from ctxwin_evals.console import Json, errors, new_table, show

from .chats import KEEP, LOG, SYSTEM, Ask, History, connect, openai_asker, prefilled, running_server, screens, step

BLOCK_S, PAUSE_S = 20.0, 0.15


def beside(client: OpenAI, model: str, blocks: int, pictures: list[str], think: float, seed: int) -> dict[str, Any]:
    """Seconds of short chats beside the loop, which thinks for ``think`` seconds a turn, in blocks with and without prefill."""
    rng, seconds = Random(seed), {"off": list[list[float]](), "idle": list[list[float]]()}
    before = prefilled(client)
    for block in range(blocks):
        mode = ("off", "idle")[block % 2]
        extra, ended = {"windows": "off", "prefill": mode}, threading.Event()
        ask = openai_asker(client, model, f"beside {block}", "off", ctxwin=extra)

        def work(ask: Ask = ask, ended: threading.Event = ended) -> None:
            history: History = []
            for turn in itertools.count():
                history = [*history, [{"role": "user", "content": step(turn, pictures)}]][-KEEP:]
                answer, *_ = ask([{"role": "system", "content": SYSTEM}, *(m for one in history for m in one)])
                history[-1].append({"role": "assistant", "content": answer or "-"})
                if ended.wait(think):
                    return

        agent = threading.Thread(target=work)
        agent.start()
        took, end = [], time.monotonic() + BLOCK_S
        while time.monotonic() < end:
            time.sleep(rng.expovariate(1 / PAUSE_S))
            message = {"role": "user", "content": f"{rng.randrange(10**6)} {LOG} Is it shut?"}
            began = time.perf_counter()
            client.chat.completions.create(model=model, messages=[message], max_tokens=4, temperature=0)  # type: ignore[list-item]
            took.append(time.perf_counter() - began)
        ended.set()
        agent.join()
        seconds[mode].append(took)
    counted = {result: tokens - before.get(result, 0) for result, tokens in prefilled(client).items()}
    return {"agent": "beside", "prefilled": counted, **_quantiles(seconds["off"], seconds["idle"], seed)}


def _quantiles(off: list[list[float]], idle: list[list[float]], seed: int) -> dict[str, Any]:
    """Median and 99th percentile without and with prefill, and the ratios with 95 % intervals, by drawing blocks again."""
    draws, found = np.random.default_rng(seed), dict[str, Any]()
    for name, q in (("p50", 0.5), ("p99", 0.99)):

        def at(blocks: list[list[float]], q: float = q) -> float:
            return float(np.quantile(np.concatenate(blocks), q))

        ratios = [
            at([idle[i] for i in draws.integers(len(idle), size=len(idle))])
            / at([off[i] for i in draws.integers(len(off), size=len(off))])
            for _ in range(2000)
        ]
        low, high = np.quantile(ratios, [0.025, 0.975])
        found[f"{name}_ms"] = [round(1e3 * at(off), 2), round(1e3 * at(idle), 2)]
        found[f"{name}_ratio"] = [round(value, 3) for value in (at(idle) / at(off), float(low), float(high))]
    return {"asks": [sum(map(len, off)), sum(map(len, idle))], **found}


def main(
    model: Annotated[str, typer.Option(help="What is served: tiny, random, or a local folder.")] = "tiny",
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of twenty seconds.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the pictures, the times and the chats.")] = 7,
    scale: Annotated[int, typer.Option(min=1, help="How much larger the screenshots are than a frame.")] = 1,
    dtype: Annotated[str, typer.Option(help="What the server computes in.")] = "float32",
    think: Annotated[float, typer.Option(min=0, help="Seconds between turns of the agent.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Measure short chats beside an agent, with and without prefill while it thinks."""
    with errors(), running_server(model, ["--dtype", dtype]) as (url, _):
        row = beside(*connect(url), blocks, screens(seed, scale), think, seed)
    table = new_table("", "figure|without; with", left=(0,))
    for name, value in row.items():
        table.add_row(name, str(value))
    show(row, as_json, table)


if __name__ == "__main__":
    typer.run(main)
