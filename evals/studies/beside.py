"""Short chats of others beside agents, of which every second has its next prompt computed ahead: how long they take.

Two agents run the loop of `evals.studies.chats` with OpenAI's client, a turn of the one and a turn of the other: an ask, and a
pause to think, in which the one's next prompt is computed ahead. The chats come at random times; those of two turns that follow
one another are a pair, so that both ways are of the same minutes.
"""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from openai import OpenAI

from ctxwin_evals.console import Json, errors, new_table, show

from .chats import KEEP, LOG, History, chat_messages, connect, openai_asker, prefilled, screens, step
from .servers import running_server


def beside(
    client: OpenAI, model: str, pairs: int, pictures: list[str], think: float, pause: float, seed: int
) -> dict[str, Any]:
    """Seconds of short chats beside two agents, which think for ``think`` seconds a turn, one of them with prefill."""
    rng, seconds = Random(seed), {"off": list[list[float]](), "ahead": list[list[float]]()}
    before, histories = prefilled(client), {mode: History() for mode in seconds}
    asks = {mode: openai_asker(client, model, "beside", mode) for mode in seconds}

    def work(mode: str, turn: int) -> None:
        history = histories[mode] = [*histories[mode], [{"role": "user", "content": step(turn, pictures)}]][-KEEP:]
        answer, *_ = asks[mode](chat_messages(history))
        history[-1].append({"role": "assistant", "content": answer or "-"})
        time.sleep(think)

    pool = ThreadPoolExecutor(1)
    for turn in range(pairs):
        for mode in ("off", "ahead") if turn % 2 else ("ahead", "off"):
            agent, took = pool.submit(work, mode, turn), list[float]()
            while not agent.done():
                time.sleep(rng.expovariate(1 / pause))
                message = {"role": "user", "content": f"{rng.randrange(10**6)} {LOG} Is it shut?"}
                began = time.perf_counter()
                client.chat.completions.create(model=model, messages=[message], max_tokens=4, temperature=0)  # type: ignore[list-item]
                took.append(time.perf_counter() - began)
            agent.result()
            seconds[mode].append(took)
    counted = {result: tokens - before.get(result, 0) for result, tokens in prefilled(client).items()}
    return {"agent": "beside", "prefilled": counted, **_quantiles(seconds["off"], seconds["ahead"], seed)}


def _quantiles(off: list[list[float]], ahead: list[list[float]], seed: int) -> dict[str, Any]:
    """Median and 99th percentile without and with prefill, and the ratios with 95 % intervals, by drawing pairs again."""
    draws, found = np.random.default_rng(seed), dict[str, Any]()
    drawn = [draws.integers(len(off), size=len(off)) for _ in range(2000)]
    for name, q in (("p50", 0.5), ("p99", 0.99)):

        def at(turns: list[list[float]], chosen: Iterable[int], q: float = q) -> float:
            return float(np.quantile(np.concatenate([turns[i] for i in chosen]), q))

        low, high = np.quantile([at(ahead, chosen) / at(off, chosen) for chosen in drawn], [0.025, 0.975])
        alone, beside = at(off, range(len(off))), at(ahead, range(len(off)))
        found[f"{name}_ms"] = [round(1e3 * alone, 2), round(1e3 * beside, 2)]
        found[f"{name}_ratio"] = [round(value, 3) for value in (beside / alone, float(low), float(high))]
    return {"asks": [sum(map(len, off)), sum(map(len, ahead))], **found}


def main(
    model: Annotated[str, typer.Option(help="What is served: tiny, random, or a local folder.")] = "tiny",
    pairs: Annotated[int, typer.Option(min=2, help="Turns of each of the two agents.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the pictures, the times and the chats.")] = 7,
    scale: Annotated[int, typer.Option(min=1, help="How much larger the screenshots are than a frame.")] = 1,
    dtype: Annotated[str, typer.Option(help="What the server computes in.")] = "float32",
    think: Annotated[float, typer.Option(min=0, help="Seconds that an agent thinks.")] = 2.0,
    pause: Annotated[float, typer.Option(min=0.001, help="Seconds between two chats, in the mean.")] = 0.15,
    as_json: Json = False,
) -> None:
    """Measure short chats beside two agents, one of which has its next prompt computed while it thinks."""
    with errors(), running_server(model, ["--dtype", dtype]) as (url, _):
        row = beside(*connect(url), pairs, screens(seed, scale), think, pause, seed)
    table = new_table("", "figure|without; with", left=(0,))
    for name, value in row.items():
        table.add_row(name, str(value))
    show(row, as_json, table)


if __name__ == "__main__":
    typer.run(main)
