"""A camera that is asked now and then: a live stream, the last frames sent again, and vLLM's own streaming input.

Frames come one after the other; every third is followed by a question. Measured are the seconds from the question to the first
token of its answer, where the question comes with the frame and where it comes a moment later, and the tokens that went through a
forward over the whole stream, those of arriving frames included.

- ``again``: a plain chat with the last n frames, on vLLM with its prefix cache;
- ``live``: a `LiveStream` into a window that holds n frames, exact, or with a fidelity chosen by hand;
- ``streaming``: vLLM's streaming input (``AsyncLLM.generate`` of a generator). Its session only grows: frames, questions and
  answers stay, and it ends where the context is full.
"""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from openai import OpenAI
from PIL import Image

from ctxwin.fidelity import Fidelity
from ctxwin.media import png
from ctxwin.tiny import checkpoint_dir, world
from ctxwin_client import LiveStream, RemoteWindow
from ctxwin_evals.bench.model import Sizes, ensure_model
from ctxwin_evals.console import Json, errors, new_table, show

from .chats import BY_HAND, openai_asker
from .chats import png as base64_png
from .servers import running_server

SYSTEM, EVERY = "You watch a camera.", 3


class Row:
    """One way of asking, with the question a moment after the frame (``later``) or right with it."""

    def __init__(self, way: str, when: str) -> None:
        self.way, self.when = way, when
        self.first_s: list[float] = []
        self.prompt = 0
        self.computed: int | None = 0  # None: not counted
        self.answers: list[str] = []
        self.note = ""

    def described(self) -> dict[str, Any]:
        """The row as JSON."""
        first = sorted(1e3 * s for s in self.first_s) or [float("nan")]
        return {
            "way": self.way, "when": self.when, "asks": len(self.first_s), "first_token_ms": round(statistics.median(first), 1),
            "first_token_p90_ms": round(first[int(0.9 * (len(first) - 1))], 1), "computed_tokens": self.computed,
            "prompt_tokens": self.prompt, "answers": self.answers, "note": self.note,
        }  # fmt: skip


@contextmanager
def open_client(folder: str, dtype: str) -> Iterator[OpenAI]:
    """A client of a server of its own: a store that has seen the frames would give them back computed."""
    with running_server(folder, ["--dtype", dtype]) as (url, _):
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def question(i: int, stream: list[world.Frame]) -> str:
    """Return the question about frame ``i``."""
    return f"{'shape' if i % 2 else 'color'} of {stream[i].marks[0]:02d}?"


def resend(client: OpenAI, model: str, n: int, stream: list[world.Frame], frames: list[np.ndarray]) -> Row:
    """Chats with the last ``n`` frames, without windows."""
    row, ask, computed = Row("again", "either"), openai_asker(client, model, "again", "off"), 0
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
        computed += prompt - cached
    row.computed = computed
    return row


def live(
    client: OpenAI, n: int, stream: list[world.Frame], frames: list[np.ndarray], fidelity: Fidelity, *, later: bool
) -> Row:
    """A live stream into a window with room for ``n`` frames."""
    row, computed = Row(f"live, {fidelity.mode}", "later" if later else "with the frame"), 0
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
                computed += answer.usage.computed_tokens
        feed.settle()
        row.computed = computed + sum(len(entry["computed"]) * frame_tokens for entry in feed.state.placed)
        row.note = f"{len(window.ids)} frames held, {feed.state.dropped} dropped"
    return row


async def streaming(folder: str, dtype: str, stream: list[world.Frame], frames: list[np.ndarray]) -> Row:
    """vLLM's streaming input: one session, to which frames and questions are added."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    row = Row("streaming input", "later")
    row.computed = None
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder, dtype=dtype, enforce_eager=True, limit_mm_per_prompt={"image": len(frames)},
            kv_cache_memory_bytes=1 << 29, gpu_memory_utilization=0.2,
        )
    )  # fmt: skip
    inbox: asyncio.Queue[StreamingInput | None] = asyncio.Queue()

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        while (message := await inbox.get()) is not None:
            yield message

    def sampled(tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=0, output_kind=RequestOutputKind.DELTA)

    outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def listen() -> None:
        try:
            async for output in engine.generate(inputs(), sampled(1), "stream"):
                outputs.put_nowait(output)
        except Exception as error:
            outputs.put_nowait(error)

    async def say(prompt: Any, tokens: int) -> tuple[float, str]:
        begin, first, text, n = time.perf_counter(), 0.0, "", 0
        inbox.put_nowait(StreamingInput(prompt=prompt, sampling_params=sampled(tokens)))
        while n < tokens:
            output = await asyncio.wait_for(outputs.get(), 60)
            if isinstance(output, Exception):
                raise output
            first = first or time.perf_counter() - begin
            n, text = n + len(output.outputs[0].token_ids), text + output.outputs[0].text
            if output.outputs[0].finish_reason:
                break
        return first, text

    listening = asyncio.create_task(listen())
    media = "<|vision_start|><|image_pad|><|vision_end|>"
    frames_held = 0
    try:
        for i, pixels in enumerate(frames):
            head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n" if i == 0 else ""
            await say({"prompt": f"{head}t={i} s\n{media}", "multi_modal_data": {"image": Image.fromarray(pixels)}}, 1)
            frames_held = i + 1
            if i % EVERY == EVERY - 1:
                turn_text = f"{question(i, stream)}<|im_end|>\n<|im_start|>assistant\n"
                first, text = await say({"prompt": turn_text}, 8)
                row.first_s.append(first)
                row.answers.append(text)
                await say({"prompt": "<|im_end|>\n<|im_start|>user\n"}, 1)
    except Exception as error:
        row.note = f"ended at frame {frames_held} of {len(frames)}: {type(error).__name__}: {str(error)[:120]}"
    finally:
        inbox.put_nowait(None)
        listening.cancel()
        engine.shutdown()
    row.note = row.note or f"{frames_held} frames held, none ever leaves"
    return row


def main(
    model: Annotated[str, typer.Option(help="tiny, or random: half a billion parameters.")] = "tiny",
    frames: Annotated[int, typer.Option(min=6, help="Length of the stream.")] = 36,
    n: Annotated[int, typer.Option(min=2, help="Frames that are held, or sent again.")] = 6,
    scale: Annotated[int, typer.Option(min=1, help="How much larger a frame is than the world's.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the frames.")] = 7,
    dtype: Annotated[str, typer.Option(help="What is computed in.")] = "float32",
    parts: Annotated[str, typer.Option(help="Which of again, live and streaming.")] = "again,live,streaming",
    output: Annotated[Path | None, typer.Option(help="Where the rows go, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure first tokens and computed tokens of a stream that is asked now and then."""
    stream = world.make_stream(seed=seed, n_frames=frames)
    pixels = [np.asarray(world.render(f)).repeat(scale, 0).repeat(scale, 1) for f in stream]
    folder = str(ensure_model(Sizes(), 0)[0] if model == "random" else checkpoint_dir())
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if output is not None:  # the next part may fail
            output.write_text(json.dumps([row.described() for row in rows], indent=1))

    with errors():
        if "again" in parts:
            with open_client(folder, dtype) as client:
                add(resend(client, client.models.list().data[0].id, n, stream, pixels))
        for fidelity in (Fidelity("exact"), Fidelity(**BY_HAND)) if "live" in parts else ():
            for later in (True, False):
                with open_client(folder, dtype) as client:
                    add(live(client, n, stream, pixels, fidelity, later=later))
        if "streaming" in parts:
            add(asyncio.run(streaming(folder, dtype, stream, pixels)))
    described = [row.described() for row in rows]
    columns = "way|question|asks|first token, ms|p90|computed tokens|of prompts|"
    table = new_table("", columns, left=(0, 1, 7))
    for row in described:
        cells = "asks", "first_token_ms", "first_token_p90_ms", "computed_tokens", "prompt_tokens", "note"
        table.add_row(row["way"], row["when"], *(str(row[cell]) for cell in cells))
    show({"rows": described}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
