"""Memory of a serving process over a long run of plain chats and windows.

One ``ctxwin serve --windows auto``; agents that send their history again with a new screenshot on every turn (chats and
messages, the oldest screenshots dropped or replaced by a text), and cameras that append to a window, slide and ask. No picture
comes twice and every conversation ends after a while, so whatever is kept for one grows without end unless it is bounded.

The memory of every process is averaged over each minute, since the heap of a busy server frays and is given back by turns, and
written down with all counters. The run ends with a verdict over its last third:
memory has a plateau where it grows by no more than `PLATEAU` of itself in that time. Slopes are Theil and Sen's, the median
of those between all pairs of samples, which a single spike does not move.
"""

import contextlib
import itertools
import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from openai import OpenAI

from ctxwin.chunk import Chunk
from ctxwin.tiny import world
from ctxwin_client import RemoteWindow
from ctxwin_evals.console import Json, new_table, show

from .chats import SYSTEM, png
from .command import errors, write_result
from .servers import running_server

PLATEAU = 0.01
"""Most growth over the last third of a run, as a share of what was held at its start."""
CHAT_TURNS, WINDOW_TURNS = 30, 60
"""Turns of one conversation, frames of one window."""
KEEP = 4
"""Screenshots in a chat, frames in a window."""
_LOOK_S = 5.0
"""Seconds between two looks at a process's memory."""


@dataclass
class Sample:
    """One minute.

    Attributes:
        minute: since the load began.
        processes: proportional resident bytes (shared pages are divided among those that map them), by process, on average.
        counters: the server's own metrics by name, histograms left out.
        requests: answered so far, by kind.
    """

    minute: float
    processes: dict[str, int]
    counters: dict[str, float]
    requests: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.processes.values())


def resident(pid: int) -> dict[str, int]:
    """Proportional resident bytes of a process and of all below it."""
    sizes: dict[str, int] = {}
    top = psutil.Process(pid)
    for process in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            name = process.name() if process.pid != pid else "server"
            sizes[f"{name} {process.pid}"] = process.memory_full_info().pss
    return sizes


def mean_resident(pid: int, until: float, ended: threading.Event) -> dict[str, int]:
    """Average `resident` over the time until then, or until the event."""
    looks = [resident(pid)]
    while not ended.wait(max(0.0, min(_LOOK_S, until - time.monotonic()))) and time.monotonic() < until:
        looks.append(resident(pid))
    looks.append(resident(pid))
    names = dict.fromkeys(itertools.chain(*looks))
    return {name: sum(look.get(name, 0) for look in looks) // len(looks) for name in names}


def counters(url: str) -> dict[str, float]:
    """Metrics of ctxwin, and how full vLLM's cache is."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:  # nosec B310: the address of our own server
        lines = [line for line in answer.read().decode().splitlines() if line and line[0] != "#"]
    values = dict(line.rsplit(" ", 1) for line in lines)
    prefixes = ("ctxwin_", "vllm:kv_cache_usage", "vllm:num_requests", "process_open_fds")
    names = [name for name in values if name.startswith(prefixes) and "_bucket" not in name and "_created" not in name]
    return {name: float(values[name]) for name in names}


def slope(minutes: list[float], values: list[float]) -> tuple[float, float, float]:
    """Theil and Sen's slope, and the quartiles of the slopes between all pairs."""
    slopes = sorted(
        (b - a) / (t - s) for (s, a), (t, b) in itertools.combinations(zip(minutes, values, strict=True), 2) if t > s
    )
    if not slopes:
        return 0.0, 0.0, 0.0
    low, middle, high = np.quantile(slopes, (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def verdict(samples: list[Sample]) -> dict[str, Any]:
    """Judge if memory has a plateau over the last third of the samples."""
    last = samples[-max(3, len(samples) // 3) :]
    minutes, totals = [s.minute for s in last], [float(s.total) for s in last]
    middle, low, high = slope(minutes, totals)
    grown = middle * (minutes[-1] - minutes[0]) / totals[0]
    return {
        "plateau": grown <= PLATEAU,
        "minutes": [minutes[0], minutes[-1]],
        "mb_a_minute": round(middle / 1e6, 3),
        "mb_a_minute_quartiles": [round(low / 1e6, 3), round(high / 1e6, 3)],
        "grown": round(grown, 5),
        "first_mb": round(samples[0].total / 1e6, 1),
        "last_mb": round(samples[-1].total / 1e6, 1),
        "most_mb": round(max(s.total for s in samples) / 1e6, 1),
    }


@dataclass
class Load:
    """Clients that go on until they are stopped; their first error ends the run."""

    url: str
    model: str
    pause: float
    seed: int
    stopped: threading.Event = field(default_factory=threading.Event)
    requests: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def frames(self, agent: int) -> Iterator[np.ndarray]:
        """Pictures that never come twice."""
        for number in itertools.count():
            drawn = world.make_stream(seed=[self.seed, agent, number], n_frames=20)  # type: ignore[arg-type]
            yield from (np.asarray(world.render(frame)) for frame in drawn)

    def run(self, work: Callable[[int], Iterator[str]], agent: int) -> None:
        """Goes through a client's turns, each of which names what was asked."""
        try:
            for kind in work(agent):
                with self._lock:
                    self.requests[kind] += 1
                if self.stopped.wait(self.pause):
                    return
        except BaseException as error:
            self.errors.append(error)
            self.stopped.set()

    def chats(self, agent: int) -> Iterator[str]:
        """An agent with screenshots, by turns on chats and on messages; old ones are dropped, or replaced by a text."""
        client, frames = self.client(), self.frames(agent)
        for number in itertools.count():
            name, on_messages, replaces = f"soak-{self.seed}-{agent}-{number}", number % 2 == 1, number % 4 >= 2
            history: list[list[dict[str, Any]]] = []
            for turn in range(CHAT_TURNS):
                history.append([{"role": "user", "content": _screen(turn, next(frames), on_messages)}])
                if replaces:
                    for old in history[:-KEEP]:
                        old[0]["content"] = [*old[0]["content"][:1], {"type": "text", "text": "[old]"}]
                else:
                    history = history[-KEEP:]
                turns = [message for one in history for message in one]
                body: dict[str, Any] = {"model": self.model, "max_tokens": 8, "temperature": 0}
                if on_messages:
                    body |= {"system": SYSTEM, "messages": turns}
                else:
                    body |= {"messages": [{"role": "system", "content": SYSTEM}, *turns]}
                path = "/messages" if on_messages else "/chat/completions"
                options: Any = {"headers": {"x-session-id": name}}
                answer: Any = client.post(path, body=body, cast_to=object, options=options)
                text = answer["content"][0]["text"] if on_messages else answer["choices"][0]["message"]["content"]
                history[-1].append({"role": "assistant", "content": text or "-"})
                yield "messages" if on_messages else "chats"

    def windows(self, agent: int) -> Iterator[str]:
        """A camera's window: appended to, slid, asked, and now and then looked back in."""
        client, frames = self.client(), self.frames(agent)
        while True:
            with RemoteWindow(client, SYSTEM, 2000) as window:
                for turn in range(WINDOW_TURNS):
                    window.append(Chunk.image(next(frames), text=f"t={turn} s"))
                    if turn >= KEEP:
                        window.slide(1)
                    if turn % 7 == 6:
                        window.recall(window.evicted[-1])
                    window.ask(f"color of {turn % 90 + 10}?", 8)
                    yield "asks"


def _screen(turn: int, pixels: np.ndarray, on_messages: bool) -> list[dict[str, Any]]:
    data = png(pixels)
    if on_messages:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        picture: dict[str, Any] = {"type": "image", "source": source}
    else:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    question = {"type": "text", "text": f"shape of {turn % 90 + 10}?"}
    return [{"type": "text", "text": f"step {turn}\n"}, picture, question]


def measure(
    model: str,
    minutes: float,
    interval: float,
    agents: int,
    cameras: int,
    pause: float,
    seed: int,
    arguments: list[str],
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> dict[str, Any]:
    """Run the load; return samples and verdict as JSON.

    Raises whatever a client met: a soak of errors says nothing of memory.
    """
    samples: list[Sample] = []
    with running_server(model, ["--windows", "auto", *arguments]) as (url, pid):
        name = OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
        load = Load(url, name, pause, seed)
        works = [*[load.chats] * agents, *[load.windows] * cameras]
        threads = [threading.Thread(target=load.run, args=(work, i), daemon=True) for i, work in enumerate(works)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for number in itertools.count():
            processes = mean_resident(pid, begin + number * interval, load.stopped)
            minute = (time.monotonic() - begin) / 60
            samples.append(Sample(round(minute, 2), processes, counters(url), dict(load.requests)))
            on_sample(samples[-1])
            if load.stopped.is_set() or minute >= minutes:
                break
        load.stopped.set()
        for thread in threads:
            thread.join(120)
        if load.errors:
            raise load.errors[0]
    run = {"model": model, "seed": seed, "samples": [{**vars(s), "total": s.total} for s in samples]}
    return {**run, "verdict": verdict(samples)}


def main(
    model: Annotated[str, typer.Option(help="What is served: tiny or a local folder.")] = "tiny",
    minutes: Annotated[float, typer.Option(help="How long.")] = 30.0,
    interval: Annotated[float, typer.Option(help="Seconds between samples.")] = 60.0,
    agents: Annotated[int, typer.Option(min=0, help="Agents that send their history again.")] = 2,
    cameras: Annotated[int, typer.Option(min=0, help="Windows that watch.")] = 2,
    pause: Annotated[float, typer.Option(min=0, help="Seconds that a client rests between its turns.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the pictures.")] = 0,
    serve: Annotated[str, typer.Option(help="Further arguments of ctxwin serve, in one string.")] = "--dtype float32",
    output: Annotated[Path | None, typer.Option(help="Also write the result into this folder, as soak.json.")] = None,
    as_json: Json = False,
) -> None:
    """Watch the memory of a server under plain chats and windows; exit code 1 where it has no plateau."""

    def report(sample: Sample) -> None:
        each = ", ".join(f"{name.split()[0]} {size / 1e6:.0f}" for name, size in sample.processes.items())
        counts = f"{sample.total / 1e6:8.1f} MB  {sum(sample.requests.values()):6d} requests"
        typer.echo(f"{sample.minute:6.1f} min  {counts}  ({each})", err=True)

    with errors():
        result = measure(model, minutes, interval, agents, cameras, pause, seed, serve.split(), report)
    write_result(output, "soak.json", result)
    judgement = result["verdict"]
    table = new_table("", "minute|MB|chats|messages|asks", left=())
    for row in result["samples"]:
        counts = [str(row["requests"].get(kind, 0)) for kind in ("chats", "messages", "asks")]
        table.add_row(str(row["minute"]), f"{row['total'] / 1e6:.1f}", *counts)
    show(result, as_json, table, json.dumps(judgement))
    if not judgement["plateau"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
