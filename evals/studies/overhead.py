"""What `ctxwin serve` adds to plain chats, beside `vllm serve` of the same model in the same minutes.

Growing chats of one client at a time, with a picture a turn and without. Every chat is held with each server, in an order drawn
anew, so that what else happens on the machine meets all of them; the added time is the difference of one turn's two times.
Between two servers all rest, until vLLM's processes have stopped waiting actively.
``off`` is a server whose chats have no windows, ``exact`` one whose chats all have one in exact mode, as of a model without a
profile. With ``--in-process`` there is no server: exact windows are updated ``before`` requests, or ``behind`` their answers.
"""

import contextlib
import http.client
import json
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from vllm import SamplingParams

from ctxwin.fidelity import Fidelity
from ctxwin.tiny import checkpoint_dir
from ctxwin_evals.console import Json, new_table, show
from ctxwin_server.chat.conversations import Conversations, Turn
from ctxwin_vllm.engine import VLLMEngine
from ctxwin_vllm.rendered import Pictures, RenderedRequest
from ctxwin_vllm.transport import PARAM

from .chats import SYSTEM, median_interval, screens
from .command import errors
from .servers import running_module

PAUSE_S, SPIN_S = 0.05, 1.5
"""Seconds between two turns, and between two chats: vLLM's workers wait actively for a second after a step."""
_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}
_ARGUMENTS = ["--dtype", "float32", "--block-size", "32", "--enforce-eager", "--served-model-name", "tiny"]

SERVERS = {"vllm": None, "off": ["--windows", "off"], "exact": ["--windows", "auto", "--fidelity", "exact"]}


@dataclass
class Server:
    """A running server, and the seconds that each of its answers took.

    Attributes:
        process: id of the first of its processes.
    """

    address: str
    process: int
    seconds: list[float] = field(default_factory=list)

    def connect(self) -> None:
        """Open a new connection."""
        self._connection = http.client.HTTPConnection(self.address, timeout=60)

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a chat, or to a completion where there is a ``prompt``; its time is noted."""
        raw, path = json.dumps(body).encode(), "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        began = time.perf_counter()
        self._connection.request("POST", path, raw, {"content-type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        self.seconds.append(time.perf_counter() - began)
        if response.status != 200:
            raise RuntimeError(f"a request must be answered, got {response.status}: {answer[:500]!r}")
        return dict(json.loads(answer))

    def complete(self, prompt: str) -> float:
        """Return the seconds of a plain completion of four tokens."""
        self.ask({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        return self.seconds.pop()

    def processor_seconds(self) -> dict[str, float]:
        """Return the processor time of the server's processes by kind: its API and vLLM's engine."""
        times, parents, names = dict[int, float](), dict[int, int](), dict[int, str]()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                name, _, rest = stat.read_text().rpartition(")")
                fields = rest.split()
                process = int(stat.parent.name)
                parents[process], names[process] = int(fields[1]), name.partition("(")[2]
                tasks = 0
                for task in (stat.parent / "task").iterdir():
                    with contextlib.suppress(OSError):
                        tasks += int((task / "schedstat").read_text().split()[0])
                times[process] = tasks / 1e9
        totals = {"api": 0.0, "engine": 0.0}
        for process, seconds in times.items():
            at = process
            while at not in (0, 1, self.process):
                at = parents.get(at, 0)
            if at == self.process:
                totals["engine" if "Engine" in names[process] or "Worker" in names[process] else "api"] += seconds
        return totals


@contextlib.contextmanager
def running(arguments: list[str] | None, more: list[str]) -> Iterator[Server]:
    """A server until the block ends: vLLM's own where there are no ``arguments``. ``more`` are of either."""
    environment = {**os.environ, **_ENVIRONMENT}
    if arguments is None:
        environment["VLLM_PLUGINS"] = ""  # ours is installed, too
        command = ["vllm.entrypoints.openai.api_server", "--model", str(checkpoint_dir())]
        command.append("--enable-prompt-tokens-details")
    else:
        command = ["ctxwin", "serve", str(checkpoint_dir()), "--restarts", "0", *arguments]
    with running_module([*command, *_ARGUMENTS, *more], environment) as (url, process):
        yield Server(url.removeprefix("http://"), process)


class InProcess(Server):
    """vLLM in this process: alone, or with windows that are updated ``before`` requests or ``behind`` answers."""

    def __init__(self, arm: str, engine: VLLMEngine) -> None:
        super().__init__(arm, os.getpid())
        self._engine, self._conversations = engine, Conversations(64, 3600.0)

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """See `Server`; the time is without the chat template's."""

        def prepare(handle: str) -> Turn:
            return self._conversations.prepare(RenderedRequest(self._engine, prompt, handle), "", Fidelity("exact"))

        arm, driver = self.address, self._engine.core.driver
        template = driver.renderer.get_tokenizer().apply_chat_template
        ids = template(body["messages"], add_generation_prompt=True, return_dict=False)
        began = time.perf_counter()
        prompt = Pictures().read({"type": "token", "prompt_token_ids": ids, "cache_salt": arm})
        handle = prompt.reserve(self._engine) if arm == "behind" else ""
        turn = None if handle or arm == "vllm" else prepare("")
        options = {"kv_transfer_params": {PARAM: turn.submitted.handle if turn else handle}}
        parameters = SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True, extra_args=options)
        ticket = driver.submit(dict(prompt.engine_input), parameters, 0)
        while not (output := ticket.outputs.get(timeout=60)).finished:
            pass
        self.seconds.append(time.perf_counter() - began)
        if arm != "vllm":
            self._conversations.finish(turn or prepare(handle), finished=True)
        return {"choices": [{"message": {"content": output.outputs[0].text}}]}


def chat(server: Server, rng: Random, turns: int, pictures: list[str], tokens: int) -> None:
    """A chat of so many turns, with ``pictures`` where there are any."""
    server.connect()  # idle connections are closed
    head = f"This is chat {rng.randrange(10**9)}. "
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        text = f"{head}Step {turn}: a light is on, and the door is shut. What is there?"
        content: Any = text
        if pictures:
            url = "data:image/png;base64," + pictures[rng.randrange(len(pictures))]
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        messages.append({"role": "user", "content": content})
        body = {"model": "tiny", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = server.ask(body)["choices"][0]["message"]["content"] or "-"
        messages.append({"role": "assistant", "content": answer})
        time.sleep(PAUSE_S)


def measure(servers: dict[str, Server], chats: int, turns: int, seed: int, scale: int) -> Iterator[dict[str, Any]]:
    """Yield a row for every kind of chat and server."""
    frames = screens(seed, scale)
    for kind, pictures in (("text", []), ("pictures", frames))[: 2 - isinstance(servers["vllm"], InProcess)]:
        for tokens in (1, 16):
            used = {name: {"api": 0.0, "engine": 0.0} for name in servers}
            for i in range(-1, chats):
                for name in Random(f"{seed} {i}").sample(list(servers), len(servers)):
                    time.sleep(SPIN_S)
                    server, rng = servers[name], Random(f"{seed} {kind} {tokens} {i}")
                    first = server.processor_seconds()
                    chat(server, rng, turns, pictures, tokens)
                    for process, seconds in server.processor_seconds().items():
                        used[name][process] += (seconds - first[process]) * (i >= 0)
                    if i < 0:  # the first chat is not counted
                        server.seconds.clear()
            alone = servers["vllm"].seconds
            for name, server in servers.items():
                added = [1e3 * (a - b) for a, b in zip(server.seconds, alone, strict=True)]
                yield {
                    "chat": kind, "tokens": tokens, "server": name, "n": len(alone),
                    "p50_ms": round(1e3 * median_interval(server.seconds)[0], 2),
                    "added_ms": [round(x, 2) for x in median_interval(added)],
                    "processor_ms": {k: round(1e3 * x / len(alone), 2) for k, x in used[name].items()},
                }  # fmt: skip
            for server in servers.values():
                server.seconds = []


def main(
    chats: Annotated[int, typer.Option(min=1, help="Chats of each kind.")] = 10,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a chat.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the chats and pictures.")] = 7,
    scale: Annotated[int, typer.Option(min=1, help="How much larger the pictures are than a frame of 224 pixels.")] = 1,
    only: Annotated[str, typer.Option(help="Servers beside vLLM, comma-separated.")] = "off,exact",
    server: Annotated[str, typer.Option(help="More arguments of each server, in one string.")] = "",
    in_process: Annotated[bool, typer.Option(help="Measure chats of text on vLLM in this process.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the time and the processor time that a server adds to plain chats."""
    with errors(), contextlib.ExitStack() as stack:
        names = ["vllm", *("before,behind" if in_process else only).split(",")]
        engine = stack.enter_context(VLLMEngine(checkpoint_dir(), dtype="float32")) if in_process else None
        servers: dict[str, Server] = {
            n: InProcess(n, engine) if engine else stack.enter_context(running(SERVERS[n], shlex.split(server)))
            for n in names
        }
        rows = list(measure(servers, chats, turns, seed, scale))
    table = new_table("", "chat|tokens|server|n|p50 ms|added ms|API ms|engine ms", left=(0, 2))
    for row in rows:
        used = row["processor_ms"]
        table.add_row(
            row["chat"], str(row["tokens"]), row["server"], str(row["n"]), str(row["p50_ms"]), str(row["added_ms"]),
            str(used["api"]), str(used["engine"]),
        )  # fmt: skip
    show({"rows": rows}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
