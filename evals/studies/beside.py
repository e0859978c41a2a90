"""Short chats of others beside agents, of which every second has its next prompt computed ahead: how long they take.

With ``--windows 32`` plain completions beside so many conversations, on a server with windows behind them and on one without:
``idle``, and ``busy`` where a conversation goes on meanwhile. With ``--pool`` too, a plain load on vLLM in this process that
needs every block of its cache, which windows fill, one on a cache that another such load has filled, and one that was emptied.

Two agents run the loop of `evals.studies.chats` with OpenAI's client, a turn of the one and a turn of the other: an ask, and a
pause to think, in which the one's next prompt is computed ahead. The chats come at random times; those of two turns that follow
one another are a pair, so that both ways are of the same minutes.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random
from typing import Annotated, Any
from unittest import mock

import numpy as np
import typer
from openai import OpenAI
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input

from ctxwin import Chunk, Fidelity, Window
from ctxwin.tiny import checkpoint_dir
from ctxwin_evals.console import Json, new_table, show
from ctxwin_evals.stats import bootstrap_median
from ctxwin_vllm.engine import VLLMEngine

from .chats import KEEP, LOG, History, chat_messages, connect, openai_asker, prefilled, screens, step
from .command import errors
from .overhead import PAUSE_S, SERVERS, Server, chat, running
from .servers import running_server

BLOCK, REQUESTS, EACH = 32, 12, 4
"""Tokens of a block; requests of a load of all blocks, and the blocks that each has at its end."""
BLOCKS = REQUESTS * EACH
POOL = BLOCKS + 1  # vLLM keeps one for itself
PLAIN = 20
"""Plain completions in a row of one server."""


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
    draws, quantiles = np.random.default_rng(seed), dict[str, Any]()
    drawn = [draws.integers(len(off), size=len(off)) for _ in range(2000)]
    for name, q in (("p50", 0.5), ("p99", 0.99)):

        def at(turns: list[list[float]], chosen: Iterable[int], q: float = q) -> float:
            return float(np.quantile(np.concatenate([turns[i] for i in chosen]), q))

        low, high = np.quantile([at(ahead, chosen) / at(off, chosen) for chosen in drawn], [0.025, 0.975])
        alone, beside = at(off, range(len(off))), at(ahead, range(len(off)))
        quantiles[f"{name}_ms"] = [round(1e3 * alone, 2), round(1e3 * beside, 2)]
        quantiles[f"{name}_ratio"] = [round(value, 3) for value in (beside / alone, float(low), float(high))]
    return {"asks": [sum(map(len, off)), sum(map(len, ahead))], **quantiles}


def beside_windows(servers: dict[str, Server], pairs: int, windows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield quantiles of plain completions on servers that all hold ``windows`` conversations, the first without windows."""
    frames, pool = screens(seed, 1), ThreadPoolExecutor(1)
    for server in servers.values():
        for i in range(windows):
            chat(server, Random(f"{seed} {i}"), 3, frames, 4)
    for kind in ("idle", "busy"):
        seconds = {name: list[list[float]]() for name in servers}
        for pair in range(-1, pairs):
            for name in Random(f"{seed} {kind} {pair}").sample(list(servers), len(servers)):
                server, other = servers[name], Server(servers[name].address, 0)
                server.connect()
                turns = other, Random(f"{seed} {pair % windows}"), 3, frames, 4
                going_on = [pool.submit(chat, *turns)] if kind == "busy" else []
                took = [server.complete(f"{pair} {i} {LOG * 2} Is it shut?") for i in range(PLAIN)]
                for one in going_on:
                    one.result()
                seconds[name] += [took[1:]] if pair >= 0 else []  # the first pair is not counted
        off, on = seconds.values()
        yield {"plain": kind, "windows": windows, **_quantiles(off, on, seed)}


def pool_engine(dtype: str, processes: str = "single") -> VLLMEngine:
    """Return the bundled model on a vLLM with a cache of `BLOCKS`."""
    return VLLMEngine(
        checkpoint_dir(), dtype=dtype, processes=processes, num_gpu_blocks_override=POOL, max_model_len=BLOCKS * BLOCK
    )


def load_of_all_blocks(engine: Any, seed: int, requests: int = REQUESTS) -> tuple[list[tuple[int, int, int]], int]:
    """Run a load that begins at once; return running and waiting requests and free blocks behind each step, and preemptions."""
    driver, rng = engine.core.driver, np.random.default_rng(seed)
    scheduler = driver.llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, list[tuple[int, int, int]]()

    def scheduled(*args: Any, **options: Any) -> Any:
        output = schedule(*args, **options)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        steps.append((len(scheduler.running), len(scheduler.waiting), free))
        return output

    prompt = 2 * BLOCK - 5
    sampling = SamplingParams(max_tokens=EACH * BLOCK - prompt, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [dict(tokens_input(rng.integers(20, 200, prompt).tolist())) for _ in range(requests)]
    preempt = mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request)
    with mock.patch.object(scheduler, "schedule", scheduled), preempt as preempted:
        for ticket in driver.call(lambda: [driver.submit(one, sampling, 0) for one in prompts]):
            while not ticket.outputs.get(timeout=60).finished:
                pass
    return steps, preempted.call_count


def open_windows(engine: Any, mode: Any, count: int) -> list[Window]:
    """Return windows for `ask_all`."""
    return [Window(engine, f"watch camera {i}", fidelity=Fidelity(mode)) for i in range(count)]


def ask_all(windows: list[Window], turn: int) -> None:
    """Append to each window, slide it and ask, so that the prefix cache is full of their blocks."""
    for i, window in enumerate(windows):
        words = np.random.default_rng(i + turn * len(windows)).choice(["red", "blue", "circle", "camera"], (3, 60))
        window.extend([Chunk.text(" ".join(row)) for row in words])
        if turn:
            window.slide(3)
        window.ask("what color", max_tokens=4)


def pool_pressure(engine: Any, pairs: int, count: int, seed: int) -> dict[str, Any]:
    """Return the throughput of loads of all blocks on a cache full of windows' blocks, over that on one of plain requests' and
    over that behind the same asks on an emptied one, where the processor's caches hold what they do behind asks."""
    windows, rng, loads = open_windows(engine, "patched", count), Random(seed), list[dict[str, Any]]()
    for pair in range(pairs + 1):
        loads.append({})
        for filled in rng.sample(["windows", "plain", "emptied"], 3):
            if filled == "plain":
                load_of_all_blocks(engine, seed + pairs + 1 + pair)
            else:
                ask_all(windows, 2 * pair + (filled == "windows"))
            time.sleep(PAUSE_S)  # what follows an ask ends
            if filled == "emptied" and not engine.core.driver.reset_prefix_cache():
                raise RuntimeError("requests still hold blocks")
            began = time.perf_counter()
            steps, preempted = load_of_all_blocks(engine, seed + pair)
            loads[-1][filled] = time.perf_counter() - began, steps, preempted
    for window in windows:
        window.close()
    del loads[0]  # not counted

    def ratio(other: str) -> list[float]:
        ratios = [each[other][0] / each["windows"][0] for each in loads]
        return [float(np.median(ratios)), *(bootstrap_median(ratios) or ())]

    least = [
        min(BLOCKS - min(free for *_, free in each[filled][1]) for each in loads) for filled in ("plain", "windows")
    ]
    return {
        "blocks": BLOCKS, "windows": count, "pairs": pairs,
        "same_steps": sum(each["plain"][1] == each["windows"][1] for each in loads),
        "preempted": [sum(each[filled][2] for each in loads) for filled in ("plain", "windows")],
        "most_blocks": least, "throughput_ratio": ratio("plain"), "over_emptied": ratio("emptied"),
    }  # fmt: skip


def main(
    model: Annotated[str, typer.Option(help="What is served: tiny, random, or a local folder.")] = "tiny",
    pairs: Annotated[int, typer.Option(min=2, help="Turns of each of the two agents.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the pictures, the times and the chats.")] = 7,
    scale: Annotated[int, typer.Option(min=1, help="How much larger the screenshots are than a frame.")] = 1,
    dtype: Annotated[str, typer.Option(help="What the server computes in.")] = "float32",
    think: Annotated[float, typer.Option(min=0, help="Seconds that an agent thinks.")] = 2.0,
    pause: Annotated[float, typer.Option(min=0.001, help="Seconds between two chats, in the mean.")] = 0.15,
    windows: Annotated[
        int, typer.Option(min=0, help="Conversations beside plain completions, in place of agents.")
    ] = 0,
    pool: Annotated[bool, typer.Option(help="Beside --windows, loads that need all blocks.")] = False,
    as_json: Json = False,
) -> None:
    """Measure short chats beside two agents, one of which has its next prompt computed while it thinks."""
    rows = list[dict[str, Any]]()
    with errors(), ExitStack() as stack:
        if pool:
            rows.append(pool_pressure(stack.enter_context(pool_engine(dtype)), pairs, windows, seed))
        elif windows:
            servers = {name: stack.enter_context(running(SERVERS[name], [])) for name in ("off", "exact")}
            rows += beside_windows(servers, pairs, windows, seed)
        else:
            url, _ = stack.enter_context(running_server(model, ["--dtype", dtype]))
            rows.append(beside(*connect(url), pairs, screens(seed, scale), think, pause, seed))
    table = new_table("", "figure|without; with", left=(0,))
    for name, value in [item for row in rows for item in row.items()]:
        table.add_row(name, str(value))
    show({"rows": rows}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
