"""A camera that is asked now and then: a live stream, and the last frames sent again.

Frames come one after the other; every third is followed by a question. Measured are the seconds from the question to the first
token of its answer, where the question comes with the frame and where it comes a moment later, and the tokens that went through a
forward over the whole stream, those of arriving frames included.

- ``again``: a plain chat with the last n frames, on vLLM with its prefix cache;
- ``live``: a `LiveStream` into a window that holds n frames, exact, or with a fidelity chosen by hand.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import typer
from openai import OpenAI

from ctxwin.fidelity import Fidelity
from ctxwin.media import png
from ctxwin.tiny import world
from ctxwin_client import LiveStream, RemoteWindow
from ctxwin_evals.console import Json, new_table, show

from .chats import BY_HAND, connect, openai_asker
from .chats import png as base64_png
from .command import errors
from .servers import running_server

SYSTEM, EVERY = "You watch a camera.", 3


class Row:
    """One way of asking, with the question a moment after the frame (``later``) or right with it."""

    def __init__(self, way: str, when: str) -> None:
        self.way, self.when = way, when
        self.first_s: list[float] = []
        self.prompt = self.computed = 0
        self.answers: list[str] = []
        self.note = ""

    def described(self) -> dict[str, Any]:
        """The row as JSON."""
        first = sorted(1e3 * s for s in self.first_s)
        return {
            "way": self.way, "when": self.when, "asks": len(self.first_s), "first_token_ms": round(statistics.median(first), 1),
            "first_token_p90_ms": round(first[int(0.9 * (len(first) - 1))], 1), "computed_tokens": self.computed,
            "prompt_tokens": self.prompt, "answers": self.answers, "note": self.note,
        }  # fmt: skip


@contextmanager
def open_client(model: str, dtype: str) -> Iterator[tuple[OpenAI, str]]:
    """A client of a server of its own, and its model: a store that has seen the frames would give them back computed."""
    with running_server(model, ["--dtype", dtype]) as (url, _):
        yield connect(url)


def question(i: int, stream: list[world.Frame]) -> str:
    """Return the question about frame ``i``."""
    return f"{'shape' if i % 2 else 'color'} of {stream[i].marks[0]:02d}?"


def resend(client: OpenAI, model: str, n: int, stream: list[world.Frame], frames: list[np.ndarray]) -> Row:
    """Chats with the last ``n`` frames, without windows."""
    row, ask = Row("again", "either"), openai_asker(client, model, "again", "off")
    for i in range(EVERY - 1, len(frames), EVERY):
        content: list[Any] = []
        for j in range(max(0, i - n + 1), i + 1):
            url = "data:image/png;base64," + base64_png(frames[j])
            content += [{"type": "text", "text": f"t={j} s\n"}, {"type": "image_url", "image_url": {"url": url}}]
        content.append({"type": "text", "text": question(i, stream)})
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
        answer, prompt, cached, first = ask(turns)
        row.first_s.append(first)
        row.answers.append(answer)
        row.prompt += prompt
        row.computed += prompt - cached
    return row


def live(
    client: OpenAI, n: int, stream: list[world.Frame], frames: list[np.ndarray], fidelity: Fidelity, *, later: bool
) -> Row:
    """A live stream into a window with room for ``n`` frames."""
    row = Row(f"live, {fidelity.mode}", "later" if later else "with the frame")
    with RemoteWindow(client, SYSTEM, fidelity=fidelity) as probe:
        system = probe.tokens
    with RemoteWindow(client, SYSTEM, 4000, fidelity) as room, LiveStream(client, room.id) as first:
        first.push(png(frames[0]), f"t={len(frames)} s")
        first.settle()
        frame_tokens = room.tokens - system
    budget, reserve = system + n * (frame_tokens + 2) + 48, 48
    with (
        RemoteWindow(client, SYSTEM, budget, fidelity) as window,
        LiveStream(client, window.id, reserve_tokens=reserve) as feed,
    ):
        for i, pixels in enumerate(frames):
            feed.push(png(pixels), f"t={i} s", time=i)
            has_question = i % EVERY == EVERY - 1
            if later or not has_question:
                feed.settle()
            if has_question:
                begin = time.perf_counter()
                answer = feed.ask(question(i, stream), 8)
                # What the answer took after its first token is not waited for.
                row.first_s.append(time.perf_counter() - begin - answer.usage.total_s + answer.usage.ttft_s)
                row.answers.append(answer.text)
                row.prompt += answer.usage.prompt_tokens
                row.computed += answer.usage.computed_tokens
        feed.settle()
        row.computed += sum(len(entry["computed"]) * frame_tokens for entry in feed.state.placed)
        row.note = f"{len(window.ids)} frames held, {feed.state.dropped} dropped"
    return row


def main(
    model: Annotated[str, typer.Option(help="tiny, or random: half a billion parameters.")] = "tiny",
    frames: Annotated[int, typer.Option(min=6, help="Length of the stream.")] = 36,
    n: Annotated[int, typer.Option(min=2, help="Frames that are held, or sent again.")] = 6,
    scale: Annotated[int, typer.Option(min=1, help="How much larger a frame is than the world's.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the frames.")] = 7,
    dtype: Annotated[str, typer.Option(help="What is computed in.")] = "float32",
    as_json: Json = False,
) -> None:
    """Measure first tokens and computed tokens of a stream that is asked now and then."""
    stream = world.make_stream(seed=seed, n_frames=frames)
    pixels = [np.asarray(world.render(f)).repeat(scale, 0).repeat(scale, 1) for f in stream]
    with errors():
        with open_client(model, dtype) as (client, name):
            rows = [resend(client, name, n, stream, pixels)]
        for fidelity in (Fidelity("exact"), Fidelity(**BY_HAND)):
            for later in (True, False):
                with open_client(model, dtype) as (client, _):
                    rows.append(live(client, n, stream, pixels, fidelity, later=later))
    described = [row.described() for row in rows]
    columns = "way|question|asks|first token, ms|p90|computed tokens|of prompts|"
    table = new_table("", columns, left=(0, 1, 7))
    for row in described:
        cells = "asks", "first_token_ms", "first_token_p90_ms", "computed_tokens", "prompt_tokens", "note"
        table.add_row(row["way"], row["when"], *(str(row[cell]) for cell in cells))
    show({"rows": described}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
