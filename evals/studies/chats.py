"""Agents that send their whole history again, with and without windows behind their chats.

One server, three ways of asking it: vLLM alone (``off``), a window in exact mode, and a window with the model's profile. Two
kinds of agent, both written against the official clients and unchanged between the ways:

- ``sliding``: sixteen questions about the last five frames of a stream, as chats with pictures, as chats that name chunks, and on
  a `RemoteWindow`;
- ``openai``, ``anthropic``, ``langchain``: a loop that keeps four screenshots and drops the oldest on every turn, with OpenAI's
  client, Anthropic's, and LangChain's ordinary chat model (``pip install langchain-openai``).

``--model random`` is the benchmark's random model of half a billion parameters, whose answers are noise and whose cost is real.
No profile knows it, so its third way is a fidelity chosen by hand, the one of the bundled profile.

vLLM alone is the reference of the answers. Each way has a prefix-cache space of its own, so that none finds another's KV.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib
import io
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from openai import OpenAI
from PIL import Image

from ctxwin.adapters.openai import RemoteWindow, chunk_part, upload
from ctxwin.chunk import Chunk
from ctxwin.evals.bench.model import Sizes, ensure_model
from ctxwin.evals.console import Json, errors, new_table, show
from ctxwin.evals.stats import wilson
from ctxwin.tiny import world

WAYS: dict[str, dict[str, Any]] = {
    "off": {"windows": "off"},
    "exact": {"windows": "auto", "fidelity": {"mode": "exact"}},
    "profile": {"windows": "auto"},
}
BY_HAND: dict[str, Any] = {"mode": "patched", "rank": 11, "layers": "deep"}
AGENTS = ("sliding", "openai", "anthropic", "langchain")
SYSTEM, KEEP, FRAMES, ASKS = "You watch a camera.", 4, 5, 16
Ask = Callable[[list[Any]], tuple[str, int, int, float]]
"""Messages to the answer, prompt tokens, tokens found, and seconds to the first token."""


@dataclass
class Row:
    """What one agent saw in one way."""

    agent: str
    way: str
    answers: list[str] = field(default_factory=list)
    prompt: int = 0
    computed: int = 0
    first_s: list[float] = field(default_factory=list)

    def add(self, answer: str, prompt: int, cached: int, first: float) -> None:
        self.answers.append(answer)
        self.prompt += prompt
        self.computed += prompt - cached
        self.first_s.append(first)

    def described(self, reference: Row) -> dict[str, Any]:
        """The row as JSON; the same answers as ``reference`` with a 95 % interval."""
        same, n = sum(a == b for a, b in zip(self.answers, reference.answers, strict=True)), len(self.answers)
        low, high = wilson(same, n)
        return {
            "agent": self.agent, "way": self.way, "asks": n, "prompt_tokens": self.prompt, "computed_tokens": self.computed,
            "computed": round(self.computed / self.prompt, 4), "same": same / n, "same_low": low, "same_high": high,
            "first_token_ms": round(1e3 * statistics.median(self.first_s), 1),
        }  # fmt: skip


@contextlib.contextmanager
def server(model: str, arguments: list[str]) -> Iterator[str]:
    """``ctxwin serve MODEL``, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ctxwin", "serve", model, "--host", "127.0.0.1", "--port", str(port), *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--restarts", "0", "--enable-prompt-tokens-details"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server ended: {log.read()[-2000:].decode(errors='replace')}")
                try:
                    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as asked:
                        asked.request("GET", "/health")
                        if asked.getresponse().status == 200:
                            break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def png(pixels: np.ndarray) -> str:
    """Base64 of a picture."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def openai_asker(client: OpenAI, model: str, agent: str, way: str) -> Ask:
    """Streams a chat, as an agent would."""
    extra = {"ctxwin": WAYS[way], "cache_salt": f"{agent}-{way}", "return_token_ids": True}

    def ask(messages: list[Any]) -> tuple[str, int, int, float]:
        begin, first, text, usage = time.perf_counter(), 0.0, "", None
        ids: list[int] = []  # the random model's tokens have no text
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=8,
            temperature=0, stream=True, stream_options={"include_usage": True}, user=f"{agent}-{way}", extra_body=extra,
        )  # fmt: skip
        for event in stream:
            if event.choices:  # vLLM's first event comes with the first token
                first = first or time.perf_counter() - begin
                text += event.choices[0].delta.content or ""
                ids += (event.choices[0].model_extra or {}).get("token_ids") or []
            usage = event.usage or usage
        assert usage is not None
        details = usage.prompt_tokens_details
        return text or str(ids), usage.prompt_tokens, (details and details.cached_tokens) or 0, first

    return ask


def anthropic_asker(url: str, model: str, agent: str, way: str) -> Ask:
    """``/v1/messages`` through Anthropic's client, which takes our pictures' form from OpenAI's."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", default_headers={"x-session-id": f"{agent}-{way}"}, max_retries=0)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return given
        data = given["image_url"]["url"].partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def ask(messages: list[Any]) -> tuple[str, int, int, float]:
        turns: Any = [
            {**m, "content": [*map(part, m["content"])] if isinstance(m["content"], list) else m["content"]}
            for m in messages[1:]
        ]
        extra = {"temperature": 0, "ctxwin": WAYS[way], "cache_salt": f"{agent}-{way}"}
        begin = time.perf_counter()
        made = client.messages.create(model=model, max_tokens=8, system=SYSTEM, messages=turns, extra_body=extra)
        took = time.perf_counter() - begin
        said = json.loads(made.model_dump_json())
        told, usage = said["usage"].get("ctxwin"), made.usage
        cached = usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        found = prompt - told["computed_tokens"] if told else cached
        return "".join(block["text"] for block in said["content"] if block["type"] == "text"), prompt, found, took

    return ask


def langchain_asker(url: str, model: str, agent: str, way: str) -> Ask:
    """LangChain's own chat model for OpenAI's API; nothing of it knows windows."""
    extra = {"ctxwin": WAYS[way], "cache_salt": f"{agent}-{way}"}
    headers = {"x-session-id": f"{agent}-{way}"}
    chat: Any = importlib.import_module("langchain_openai").ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8, stream_usage=True,
        default_headers=headers, extra_body=extra, max_retries=0,
    )  # fmt: skip

    def ask(messages: list[Any]) -> tuple[str, int, int, float]:
        begin, first, text, usage = time.perf_counter(), 0.0, "", None
        for part in chat.stream(messages):
            first = first or time.perf_counter() - begin
            text += part.text
            usage = part.usage_metadata or usage
        assert usage is not None
        return text, usage["input_tokens"], usage.get("input_token_details", {}).get("cache_read", 0), first

    return ask


ASKERS: dict[str, Callable[[str, str, str, str], Ask]] = {"anthropic": anthropic_asker, "langchain": langchain_asker}


def computer(ask: Ask, row: Row, turns: int, pictures: list[str]) -> None:
    """A loop that keeps the last four screenshots, each with its question and its answer."""
    history: list[list[Any]] = []
    for turn in range(turns):
        shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + pictures[turn % len(pictures)]}}
        asked = [
            {"type": "text", "text": f"step {turn}\n"},
            shown,
            {"type": "text", "text": f"shape of {turn % 90 + 10}?"},
        ]
        history = [*history, [{"role": "user", "content": asked}]][-KEEP:]
        answer, *cost = ask([{"role": "system", "content": SYSTEM}, *(m for one in history for m in one)])
        row.add(answer, *cost)  # type: ignore[arg-type]
        history[-1].append({"role": "assistant", "content": answer})


def sliding(client: OpenAI, model: str, agent: str, way: str, frames: list[np.ndarray], questions: list[str]) -> Row:
    """Sixteen questions about the last five frames, as the window fills and slides."""
    row = Row(agent, way)
    chunks = [Chunk.image(pixels, text=f"t={i} s") for i, pixels in enumerate(frames)]
    if agent == "window":
        with RemoteWindow(client, SYSTEM, 4000) as window:
            for i, chunk in enumerate(chunks):
                window.append(chunk)
                if i >= FRAMES:
                    window.slide(1)
                answer = window.ask(questions[i], max_tokens=8)
                usage = answer.usage
                row.add(answer.text, usage.prompt_tokens, usage.prompt_tokens - usage.computed_tokens, usage.ttft_s)
        return row
    ask = openai_asker(client, model, agent, way)
    parts: list[list[Any]] = []
    for i, chunk in enumerate(chunks):
        if agent == "chunks":
            parts.append([chunk_part(upload(client, chunk))])
        else:
            data = {"url": "data:image/png;base64," + png(frames[i])}
            parts.append([{"type": "text", "text": f"t={i} s\n"}, {"type": "image_url", "image_url": data}])
        content = [part for shown in parts[-FRAMES:] for part in shown]
        content.append({"type": "text", "text": questions[i]})
        row.add(*ask([{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]))
    return row


def run(model: str, turns: int, seed: int, scale: int, agents: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """Every agent in every way; pictures of the loops are ``scale`` times as large as the world's."""
    if model == "random":
        model = str(ensure_model(Sizes(), 0)[0])
        WAYS["profile"]["fidelity"] = BY_HAND
    stream = world.make_stream(seed=seed, n_frames=ASKS)
    frames = [np.asarray(world.render(frame)) for frame in stream]
    questions = [f"{'shape' if i % 2 else 'color'} of {frame.marks[0]:02d}?" for i, frame in enumerate(stream)]
    screens = [
        png(np.asarray(world.render(f)).repeat(scale, 0).repeat(scale, 1))
        for s in range(5)
        for f in world.make_stream(seed=seed + 1 + s, n_frames=20)
    ]
    made: list[dict[str, Any]] = []
    with server(model, arguments) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        name = client.models.list().data[0].id
        if "sliding" in agents:
            reference = sliding(client, name, "pictures", "off", frames, questions)
            made.append(reference.described(reference))
            for kind, way in [
                ("pictures", "exact"),
                ("pictures", "profile"),
                ("chunks", "profile"),
                ("window", "profile"),
            ]:
                made.append(sliding(client, name, kind, way, frames, questions).described(reference))
        for agent in agents:
            rows = {way: Row(agent, way) for way in WAYS if agent != "sliding"}
            for way, row in rows.items():
                ask = (
                    ASKERS[agent](url, name, agent, way) if agent in ASKERS else openai_asker(client, name, agent, way)
                )
                computer(ask, row, turns, screens)
                made.append(row.described(rows["off"]))
    return made


def main(
    model: Annotated[str, typer.Option(help="What is served: tiny, random, or a local folder.")] = "tiny",
    turns: Annotated[int, typer.Option(min=1, help="Turns of the computer-use loop.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the frames.")] = 7,
    scale: Annotated[int, typer.Option(min=1, help="How much larger the loop's screenshots are than a frame.")] = 1,
    agents: Annotated[str, typer.Option(help=f"Which of {', '.join(AGENTS)}.")] = "sliding,openai,anthropic",
    dtype: Annotated[str, typer.Option(help="What the server computes in.")] = "float32",
    output: Annotated[Path | None, typer.Option(help="Where the rows go, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measures agents that send their history again, with and without windows behind their chats."""
    with errors():
        chosen = agents.split(",")
        if unknown := set(chosen) - set(AGENTS):
            raise ValueError(f"agents must be of {', '.join(AGENTS)}, got {', '.join(sorted(unknown))}")
        rows = run(model, turns, seed, scale, chosen, ["--dtype", dtype])
    if output is not None:
        output.write_text(json.dumps(rows, indent=1))
    table = new_table("", "agent|way|asks|prompt tokens|computed|same answers [95 %]|first token, ms", left=(0, 1))
    for row in rows:
        same = f"{row['same']:.2f} [{row['same_low']:.2f}, {row['same_high']:.2f}]"
        cells = row["asks"], row["prompt_tokens"], f"{row['computed']:.1%}", same, row["first_token_ms"]
        table.add_row(row["agent"], row["way"], *map(str, cells))
    show({"rows": rows}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
