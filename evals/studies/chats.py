"""Agents that send their whole history again, with and without windows, lazy drops and late prompts behind their chats.

One server, five ways of asking it: vLLM alone (``off``), the same with lazy drops (``lazy``) or with the next prompt computed
ahead while the agent thinks (``ahead``, ``--think``), a window in exact mode, and a window with the model's profile. Three kinds
of agent, all written against the official clients and unchanged between the ways:

- ``sliding``: sixteen questions about the last five frames of a stream, as chats with pictures, as chats that name chunks, and on
  a `RemoteWindow`;
- ``openai``, ``anthropic``: a loop that keeps four screenshots and drops the oldest on every turn, with either's client;
- ``habits``: that loop with OpenAI's client in each of `HABITS`, how agents keep their old screenshots out of a prompt. The ways
  take turns here, so that their times are of the same minutes; lazy drops are also held against vLLM alone with their prompt;
- ``clock``: that loop with its whole history, 30 turns at most, with and without a clock in the system prompt, which is served
  as sent or late, behind the history.

``--model random`` is the benchmark's random model of half a billion parameters, whose answers are noise and whose cost is real;
``random-7b`` has Qwen2-VL-7B's sizes. No profile knows them, so their third way is a fidelity chosen by hand, the one of the
bundled profile.

vLLM alone is the reference of the answers. Each way has a prefix-cache space of its own, so that none finds another's KV.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shlex
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from openai import OpenAI
from PIL import Image

from ctxwin.chunk import Chunk
from ctxwin.tiny import world
from ctxwin_chats.context_management import CLEARED
from ctxwin_client import RemoteWindow, chunk_part, upload
from ctxwin_evals.console import Json, new_table, show
from ctxwin_evals.stats import wilson

from .command import errors
from .servers import RANDOM, running_server

WAYS: dict[str, dict[str, Any]] = {
    "off": {"windows": "off"},
    "lazy": {"windows": "off", "lazy_drops": "on"},
    "ahead": {"windows": "off", "prefill": "idle"},
    "exact": {"windows": "auto", "fidelity": {"mode": "exact"}},
    "profile": {"windows": "auto"},
}
BY_HAND: dict[str, Any] = {"mode": "patched", "rank": 11, "layers": "deep"}
AGENTS = ("sliding", "openai", "anthropic", "habits", "clock")
SYSTEM, KEEP, FRAMES, ASKS = "You watch a camera.", 4, 5, 16
LOG = "The door is shut. Nobody is there. All is quiet. Two boats pass.\n"
RULES = "Name what is asked for, in one word."
CLOCKED = {"no clock": "off", "as sent": "off", "late": "late", "append": "append"}
"""What is asked with a clock in the system prompt, and without, to ``volatile`` of the requests."""
LONGEST = 40
"""Turns in a history whose old turns stay as text; a longer one loses its older half."""
JsonRow = dict[str, Any]
Ask = Callable[[list[Any]], tuple[str, int, int, float]]
"""Messages to the answer, prompt tokens, tokens found, and seconds to the first token."""


@dataclass
class Row:
    """Figures of one agent in one way."""

    agent: str
    way: str
    answers: list[str] = field(default_factory=list)
    prompt: int = 0
    computed: int = 0
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    as_served: list[bool] = field(default_factory=list)

    def add(self, answer: str, prompt: int, cached: int, first: float) -> None:
        self.answers.append(answer)
        self.prompt += prompt
        self.computed += prompt - cached
        self.first_s.append(first)

    def described(self, reference: Row) -> dict[str, Any]:
        """The row as JSON; the same answers as ``reference`` with a 95 % interval."""
        same, n = sum(a == b for a, b in zip(self.answers, reference.answers, strict=True)), len(self.answers)
        low, high = wilson(same, n)
        times: dict[str, Any] = {}
        pairs = {"turn": (self.whole_s, reference.whole_s), "first": (self.first_s, reference.first_s)}
        for name, (mine, alone) in pairs.items():
            if self.whole_s:
                ratios = [one / other for one, other in zip(mine, alone, strict=True)]
                times[f"{name}_ms"] = [round(1e3 * t, 2) for t in median_interval(mine)]
                times[f"{name}_times_alone"] = [round(r, 3) for r in median_interval(ratios)]
        return {
            "agent": self.agent, "way": self.way, "asks": n, "prompt_tokens": self.prompt, "computed_tokens": self.computed,
            "computed": round(self.computed / self.prompt, 4),
            "computed_alone": round(self.computed / reference.computed, 3),
            "same": same / n, "same_low": low, "same_high": high,
            "first_token_ms": round(1e3 * statistics.median(self.first_s), 1), **times,
            **({"same_as_served": sum(self.as_served)} if self.as_served else {}),
        }  # fmt: skip


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval, by ranks: nothing is assumed of how the values are distributed."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def connect(url: str) -> tuple[OpenAI, str]:
    """A client of a server, and the name of its model."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    return client, client.models.list().data[0].id


def screens(seed: int, scale: int) -> list[str]:
    """A hundred pictures of the bundled world, ``scale`` times as large as its own, as base64."""
    frames = [frame for s in range(5) for frame in world.make_stream(seed=seed + 1 + s, n_frames=20)]
    return [png(np.asarray(world.render(f)).repeat(scale, 0).repeat(scale, 1)) for f in frames]


def png(pixels: np.ndarray) -> str:
    """Base64 of a picture."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def openai_asker(
    client: OpenAI, model: str, agent: str, way: str, lazy_counts: dict[str, int] | None = None, **fields: Any
) -> Ask:
    """Stream a chat, as an agent would. ``lazy_counts`` gets what lazy drops keep; ``fields``: further ones of each request."""
    extra = {"ctxwin": WAYS[way], "cache_salt": f"{agent}-{way}", "return_token_ids": True, **fields}

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
        if lazy_counts is not None:
            lazy_counts.clear()
            lazy_counts.update((usage.model_extra or {}).get("ctxwin", {}).get("kept", {}))
        return text or str(ids), usage.prompt_tokens, (details and details.cached_tokens) or 0, first

    return ask


def anthropic_asker(url: str, model: str, agent: str, way: str) -> Ask:
    """``/v1/messages`` through Anthropic's client, which takes our pictures' form from OpenAI's."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", default_headers={"x-session-id": f"{agent}-{way}"}, max_retries=0)

    def part(block_of_chat: dict[str, Any]) -> dict[str, Any]:
        if block_of_chat["type"] == "text":
            return block_of_chat
        data = block_of_chat["image_url"]["url"].partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def ask(messages: list[Any]) -> tuple[str, int, int, float]:
        turns: Any = [
            {**m, "content": [*map(part, m["content"])] if isinstance(m["content"], list) else m["content"]}
            for m in messages[1:]
        ]
        extra = {"temperature": 0, "ctxwin": WAYS[way], "cache_salt": f"{agent}-{way}"}
        begin = time.perf_counter()
        response = client.messages.create(model=model, max_tokens=8, system=SYSTEM, messages=turns, extra_body=extra)
        took = time.perf_counter() - begin
        payload = json.loads(response.model_dump_json())
        window_usage, usage = payload["usage"].get("ctxwin"), response.usage
        cached = usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        reused = prompt - window_usage["computed_tokens"] if window_usage else cached
        return "".join(block["text"] for block in payload["content"] if block["type"] == "text"), prompt, reused, took

    return ask


def step(turn: int, pictures: list[str]) -> list[dict[str, Any]]:
    data = {"url": "data:image/png;base64," + pictures[turn % len(pictures)]}
    return [
        {"type": "text", "text": f"step {turn}\n"},
        {"type": "image_url", "image_url": data},
        {"type": "text", "text": f"shape of {turn % 90 + 10}?"},
    ]


def computer(ask: Ask, row: Row, turns: int, pictures: list[str]) -> None:
    """A loop that keeps the last four screenshots, each with its question and its answer."""
    history: list[list[Any]] = []
    for turn in range(turns):
        history = [*history, [{"role": "user", "content": step(turn, pictures)}]][-KEEP:]
        answer, *cost = ask([{"role": "system", "content": SYSTEM}, *(m for one in history for m in one)])
        row.add(answer, *cost)  # type: ignore[arg-type]
        history[-1].append({"role": "assistant", "content": answer})


History = list[list[dict[str, Any]]]
"""Turns: a user's message, and the answer to it."""


def _with_text(history: History, words: str, keep: int, at_once: int = 1) -> History:
    """The history with a text in place of all screenshots but the last ``keep``, ``at_once`` together."""
    end, text = max(0, len(history) - keep) // at_once * at_once, {"type": "text", "text": words}
    old = [
        [{**one[0], "content": [text if p["type"] == "image_url" else p for p in one[0]["content"]]}, *one[1:]]
        for one in history[:end]
    ]
    return [*old, *history[end:]]


def _dropped(history: History, keep: int) -> History:
    return history[-keep:]


def _together(history: History, keep: int) -> History:
    """The last screenshots and the question in one message."""
    *captions, question = (one[0]["content"] for one in history[-keep:])
    return [[{"role": "user", "content": [*(part for parts in captions for part in parts[:2]), *question]}]]


def _whole(history: History, keep: int) -> History:
    return history


def _replaced(history: History, keep: int) -> History:
    return _with_text(history, "[an old screenshot]", keep)


def _cleared(history: History, keep: int) -> History:
    return _with_text(history, CLEARED, keep)


def _cleared_together(history: History, keep: int) -> History:
    return _with_text(history, CLEARED, keep, keep)


HABITS: dict[str, tuple[Callable[[History, int], History], Callable[[History, int], History]]] = {
    "drop the oldest turn": (_dropped, _dropped),
    "all in one message": (_together, _together),
    "replaced by a text": (_replaced, _replaced),
    "context_management": (_whole, _cleared),
    "context_management, all at once": (_whole, _cleared_together),
}
"""What an agent that keeps so many screenshots sends of its history, and what vLLM alone has to be sent for the same prompt."""


def prefilled(client: OpenAI) -> dict[str, int]:
    """Tokens that were computed ahead of chats so far: used, and missed."""
    with urllib.request.urlopen(str(client.base_url.join("/metrics"))) as response:  # nosec B310: the address of our own server
        counts = re.findall(
            r'^ctxwin_prefilled_tokens_total{.*result="(\w+)".*} (\S+)$', response.read().decode(), re.M
        )
    return {result: int(float(tokens)) for result, tokens in counts}


def habits(client: OpenAI, name: str, turns: int, screens: list[str], keep: int, think: float) -> Iterator[JsonRow]:
    """The loop in each habit; at each turn all ways are asked the same, in an order drawn anew, since one may leave work running,
    and vLLM's own answer becomes history. An agent whose next prompt is computed ahead thinks for ``think`` seconds behind each.
    Answers of lazy drops are also held against vLLM's own to the prompt as served."""
    for habit, (sent, sent_alone) in HABITS.items():
        once = {"type": "images", "value": keep if sent_alone is _cleared_together else 1}
        clear = {"type": "clear_images", "keep": {"type": "images", "value": keep}, "clear_at_least": once}
        fields = {"context_management": {"edits": [clear]}} if sent is _whole else {}
        counts: dict[str, int] = {}
        asks = {way: openai_asker(client, name, habit, way, counts, **fields) for way in WAYS}
        asks["off"] = openai_asker(client, name, habit, "off")
        alone = openai_asker(client, name, f"{habit} as served", "off")
        history, older = History(), History()
        results = {way: Row(habit, way) for way in WAYS}
        tokens_before = prefilled(client)
        for turn in range(turns):
            order = Random(f"{habit} {turn}").sample(list(WAYS), len(WAYS))
            if len(history) == LONGEST:
                older, history = history[: LONGEST // 2], history[LONGEST // 2 :]
            history.append([{"role": "user", "content": step(turn, screens)}])
            for way in order:
                messages = chat_messages((sent_alone if way == "off" else sent)(history, keep))
                begin = time.perf_counter()
                answer, *cost = asks[way](messages)
                results[way].whole_s.append(time.perf_counter() - begin)
                results[way].add(answer, *cost)  # type: ignore[arg-type]
                if way == "lazy":  # more than pictures stay where old turns do
                    more, parts = counts.get("pictures", 0), counts.get("parts", 0)
                    history_served = [*older, *history] if parts > more else history
                    reply, prompt, *_ = alone(chat_messages(sent_alone(history_served, keep + more)))
                    results[way].as_served.append((reply, prompt) == (answer, cost[0]))
                time.sleep(think if "prefill" in WAYS[way] else 0.0)
            history[-1].append({"role": "assistant", "content": results["off"].answers[-1] or "-"})
        counted = {result: tokens - tokens_before.get(result, 0) for result, tokens in prefilled(client).items()}
        for way, row in results.items():
            yield row.described(results["off"]) | ({"prefilled": counted} if "prefill" in WAYS[way] else {})


def chat_messages(history: History) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, *(message for one in history for message in one)]


def clock(client: OpenAI, model: str, turns: int, pictures: list[str]) -> Iterator[dict[str, Any]]:
    """A loop that keeps its whole history behind a system prompt that tells the time."""
    reference: Row | None = None
    for way, volatile in CLOCKED.items():
        fields: dict[str, Any] = {"ctxwin": {"windows": "off", "volatile": volatile}, "cache_salt": f"clock {way}"}
        ask, row = openai_asker(client, model, f"clock {way}", "off", **fields), Row("clock", way)
        history: list[dict[str, Any]] = []
        for turn in range(turns):
            time_of_day = "" if way == "no clock" else f"\nIt is 12:{turn:02}."
            caption, *frames = step(turn, pictures)
            message = {**caption, "text": caption["text"] + LOG}
            history.append({"role": "user", "content": [message, *frames]})
            answer, *cost = ask([{"role": "system", "content": f"{SYSTEM}{time_of_day}\n{RULES}"}, *history])
            row.add(answer, *cost)  # type: ignore[arg-type]
            history.append({"role": "assistant", "content": answer or "-"})
        reference = reference or row
        yield row.described(reference)


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
        content = [part for frame_parts in parts[-FRAMES:] for part in frame_parts]
        content.append({"type": "text", "text": questions[i]})
        row.add(*ask([{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]))
    return row


def run(
    model: str,
    turns: int,
    seed: int,
    scale: int,
    agents: list[str],
    arguments: list[str],
    output: Path | None,
    think: float = 0.0,
    keep: int = KEEP,
) -> list[dict[str, Any]]:
    """Every agent in every way; pictures of the loops are ``scale`` times as large as the world's.

    ``output`` has the rows of the habits as soon as they are there.
    """
    if model in RANDOM:
        WAYS.get("profile", {})["fidelity"] = BY_HAND
    stream = world.make_stream(seed=seed, n_frames=ASKS)
    frames = [np.asarray(world.render(frame)) for frame in stream]
    questions = [f"{'shape' if i % 2 else 'color'} of {frame.marks[0]:02d}?" for i, frame in enumerate(stream)]
    pictures = screens(seed, scale)
    rows_of_all: list[dict[str, Any]] = []
    with running_server(model, arguments) as (url, _):
        client, name = connect(url)
        if "sliding" in agents:
            reference = sliding(client, name, "pictures", "off", frames, questions)
            rows_of_all.append(reference.described(reference))
            for kind, way in [("pictures", "exact"), *((kind, "profile") for kind in ("pictures", "chunks", "window"))]:
                rows_of_all.append(sliding(client, name, kind, way, frames, questions).described(reference))
        if "habits" in agents:
            for described in habits(client, name, turns, pictures, keep, think):
                rows_of_all.append(described)
                if output is not None:
                    output.write_text(json.dumps(rows_of_all, indent=1))
        if "clock" in agents:
            rows_of_all += clock(client, name, min(turns, 30), pictures)
        for agent in agents:
            rows = {way: Row(agent, way) for way in WAYS if agent not in ("sliding", "habits", "clock")}
            for way, row in rows.items():
                ask = openai_asker(client, name, agent, way)
                if agent == "anthropic":
                    ask = anthropic_asker(url, name, agent, way)
                computer(ask, row, turns, pictures)
                rows_of_all.append(row.described(rows["off"]))
    return rows_of_all


def main(
    model: Annotated[str, typer.Option(help="What is served: tiny, random, random-7b, or a local folder.")] = "tiny",
    turns: Annotated[int, typer.Option(min=1, help="Turns of the computer-use loop.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the frames.")] = 7,
    scale: Annotated[int, typer.Option(min=1, help="How much larger the loop's screenshots are than a frame.")] = 1,
    agents: Annotated[str, typer.Option(help=f"Which of {', '.join(AGENTS)}.")] = "sliding,openai,anthropic",
    ways: Annotated[str, typer.Option(help=f"Which of {', '.join(WAYS)} the loops take; off is the reference.")] = "",
    dtype: Annotated[str, typer.Option(help="What the server computes in.")] = "float32",
    think: Annotated[float, typer.Option(min=0, help="Seconds between turns where the next is computed ahead.")] = 2.0,
    keep: Annotated[int, typer.Option(min=1, help="Screenshots that the habits keep.")] = KEEP,
    server: Annotated[str, typer.Option(help="More arguments of ctxwin serve, in one string.")] = "",
    output: Annotated[Path | None, typer.Option(help="Where the rows go, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure agents that send their history again, with and without windows behind their chats."""
    with errors():
        chosen = agents.split(",")
        if unknown := set(chosen) - set(AGENTS):
            raise ValueError(f"agents must be of {', '.join(AGENTS)}, got {', '.join(sorted(unknown))}")
        if unknown := set(ways.split(",")) - {"", *WAYS}:
            raise ValueError(f"ways must be of {', '.join(WAYS)}, got {', '.join(sorted(unknown))}")
        for way in [way for way in WAYS if ways and way not in ("off", *ways.split(","))]:
            del WAYS[way]
        arguments = ["--dtype", dtype, *shlex.split(server)]
        rows = run(model, turns, seed, scale, chosen, arguments, output, think, keep)
    if output is not None:
        output.write_text(json.dumps(rows, indent=1))
    table = new_table(
        "",
        "agent|way|asks|prompt tokens|computed|of vLLM alone|same answers [95 %]|first token, ms|first token; turn of vLLM alone",
        left=(0, 1),
    )
    for row in rows:
        same = f"{row['same']:.2f} [{row['same_low']:.2f}, {row['same_high']:.2f}]"
        same += f"; {row['same_as_served']} as served" if "same_as_served" in row else ""
        computed = f"{row['computed']:.1%}", f"{row['computed_alone']:.3f}"
        cells = row["asks"], row["prompt_tokens"], *computed, same, row["first_token_ms"]
        ratios = [row[f"{name}_times_alone"] for name in ("first", "turn") if f"{name}_times_alone" in row]
        ratio = "; ".join("{:.2f} [{:.2f}, {:.2f}]".format(*one) for one in ratios)
        table.add_row(row["agent"], row["way"], *map(str, cells), ratio)
    show({"rows": rows}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
