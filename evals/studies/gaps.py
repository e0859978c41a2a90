"""Gaps: survivors that keep their old positions against survivors that move together, over long streams.

vLLM's RFC #51948 evicts the oldest segments of a session in place: what survives keeps its keys, and positions are left
with a gap. A window here turns survivors into place instead. When only the front leaves, the two differ in one thing:
how far everything stands from the system prompt. When chunks leave from the middle, distances between survivors differ
as well. Both run here on the same streams, over the same conditioned KV rules, beside the exact re-prefill of what is
placed (``window``) and of everything that was seen, as far as the model was trained to read (``stream``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
import typer

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded, Segment
from ctxwin.evals.console import Device, Dtype, Json, Model, Threads, errors, new_table, open_model
from ctxwin.evals.metrics import kl_divergence
from ctxwin.evals.stats import bootstrap_mean, share_interval
from ctxwin.evals.tasks.drawn import TRAINED_FRAMES
from ctxwin.evals.tasks.tiny import SPACE
from ctxwin.tiny.world import Frame, answer, make_stream, render

from .command import SYSTEM_PROMPT, Output, Questions, Seed, Slides, Streams, SystemPrompt, points, run
from .scenes import scene_questions

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine

Leaving = Literal["front", "middle"]
Arm = Literal["moved", "gaps"]


@dataclass(frozen=True)
class GapSettings:
    """What a run does: streams, frames in the window, after how many slides it asks, and questions a point."""

    streams: int = 12
    window: int = 4
    points: tuple[int, ...] = (1, 8, 32, 128)
    questions: int = 6
    seed: int = 0
    system_prompt: str = SYSTEM_PROMPT


@dataclass(frozen=True)
class _Held:
    """A frame in the window, and where it stands."""

    frame: Frame
    segment: Segment


@dataclass(frozen=True)
class Asked:
    """One question: distances in nats between next-token distributions, and who was right."""

    stream: int
    slides: int
    leaving: Leaving
    arm: Arm
    kl_window: float
    kl_stream: float
    right: bool
    window_right: bool
    span: int


def measure(
    engine: HFEngine, settings: GapSettings, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Runs every stream four times: front or middle leaves, survivors move or keep their places.

    Returns ``{"config", "rows": [{leaving, arm, slides, n, kl_window, kl_stream, their intervals, accuracy, ...}]}``; ``span``
    is the position that the question stood at. A point beyond the model's positions has no rows for gaps.
    """
    asked: list[Asked] = []
    for number in range(settings.streams):
        for leaving in get_args(Leaving):
            for arm in get_args(Arm):
                asked += _run(engine, settings, number, leaving, arm)
                on_progress(1)
    rows = []
    for leaving in get_args(Leaving):
        for point in settings.points:
            for arm in get_args(Arm):
                found = [a for a in asked if (a.leaving, a.arm, a.slides) == (leaving, arm, point)]
                if found:
                    rows.append({"leaving": leaving, "arm": arm, "slides": point} | _summary(found))
    return {"config": asdict(settings), "rows": rows}


def _run(engine: HFEngine, settings: GapSettings, number: int, leaving: Leaving, arm: Arm) -> list[Asked]:
    rng = np.random.default_rng((SPACE, settings.seed, 0x67617073, number))
    frames = make_stream(rng, settings.window + max(settings.points), window=TRAINED_FRAMES)
    choose = np.random.default_rng((SPACE, settings.seed, 0x6C656176, number))
    system = engine.encode_system_prompt(settings.system_prompt)
    head = Segment(system, 0, engine.prefill([], system, 0))
    placed: list[_Held] = []
    found: list[Asked] = []
    for i, frame in enumerate(frames):
        encoded = engine.encode(Chunk.image(render(frame), keep_source=False))
        slides = i + 1 - settings.window
        if slides > 0:
            # The first of the middle ones to the last but one: what leaves has survivors on both sides.
            gone = 0 if leaving == "front" else int(choose.integers(1, settings.window - 1))
            del placed[gone]
        if arm == "moved":
            placed = _together(head, placed)
        start = _end(head, placed)
        if start + encoded.advance + 64 > engine.spec.max_tokens:
            break
        span = engine.prefill([head, *(h.segment for h in placed)], encoded, start)
        placed.append(_Held(frame, Segment(encoded, start, span)))
        if slides in settings.points:
            found += _ask(engine, settings, head, placed, frames[: i + 1], (number, slides, leaving, arm))
    return found


def _together(head: Segment, placed: Sequence[_Held]) -> list[_Held]:
    """The same frames one behind the other from the system prompt on; their keys turn when they are read."""
    moved: list[_Held] = []
    for held in placed:
        moved.append(replace(held, segment=replace(held.segment, start=_end(head, moved))))
    return moved


def _end(head: Segment, placed: Sequence[_Held]) -> int:
    last = placed[-1].segment if placed else head
    return last.start + last.encoded.advance


def _ask(
    engine: HFEngine,
    settings: GapSettings,
    head: Segment,
    placed: Sequence[_Held],
    seen: Sequence[Frame],
    of: tuple[int, int, Leaving, Arm],
) -> list[Asked]:
    number, slides, leaving, arm = of
    frames = [held.frame for held in placed]
    rng = np.random.default_rng((SPACE, settings.seed, 0x61736B, number, slides))
    read = [engine.encode(Chunk.image(render(frame), keep_source=False)) for frame in seen[-TRAINED_FRAMES:]]
    now = [held.segment.encoded for held in placed]
    asked = []
    for question in scene_questions(frames, settings.questions, rng):
        query = engine.encode_query(question.text)
        ours = engine.logits([head, *(held.segment for held in placed)], query).numpy()
        window = engine.logits(_exact(head, now), query).numpy()
        stream = engine.logits(_exact(head, read), query).numpy()
        truth = answer(frames, question.text)
        words = [engine.decode([int(x.argmax())]).strip() for x in (ours, window)]
        asked.append(
            Asked(
                number,
                slides,
                leaving,
                arm,
                kl_divergence(window, ours),
                kl_divergence(stream, ours),
                words[0] == truth,
                words[1] == truth,
                _end(head, placed),
            )
        )
    return asked


def _exact(head: Segment, encodeds: Sequence[Encoded]) -> list[Segment]:
    """Everything computed anew, one behind the other."""
    segments = [head]
    for encoded in encodeds:
        last = segments[-1]
        segments.append(Segment(encoded, last.start + last.encoded.advance))
    return segments


def _summary(asked: Sequence[Asked]) -> dict[str, Any]:
    streams = [str(a.stream) for a in asked]  # questions about one stream are not independent
    to_window, to_stream = [a.kl_window for a in asked], [a.kl_stream for a in asked]
    return {
        "n": len(asked),
        "span": int(np.median([a.span for a in asked])),
        "kl_window": float(np.mean(to_window)),
        "kl_window_ci95": bootstrap_mean(to_window, streams),
        "kl_stream": float(np.mean(to_stream)),
        "kl_stream_ci95": bootstrap_mean(to_stream, streams),
        "nearer": float(np.mean([min(a.kl_window, a.kl_stream) for a in asked])),
        "accuracy": sum(a.right for a in asked) / len(asked),
        "ci95": share_interval([float(a.right) for a in asked], streams),
        "window_accuracy": sum(a.window_right for a in asked) / len(asked),
    }


def gaps_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    columns = "leaves|survivors|slides|question at|n|to window|to stream|to the nearer|accuracy|re-prefill"
    made = new_table("KL of answers (nats, mean), and right answers over what is placed", columns)
    for row in result["rows"]:
        shown = [row[key] for key in ("kl_window", "kl_stream", "nearer", "accuracy", "window_accuracy")]
        made.add_row(
            row["leaving"],
            row["arm"],
            str(row["slides"]),
            str(row["span"]),
            str(row["n"]),
            *(f"{x:.4f}" for x in shown),
        )
    return made


def main(
    streams: Streams = 12,
    window: Annotated[int, typer.Option(help="Frames in the window.", min=3)] = 4,
    slides: Slides = "1,8,32,128",
    questions: Questions = 6,
    seed: Seed = 0,
    model: Model = "tiny",
    system_prompt: SystemPrompt = SYSTEM_PROMPT,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare survivors that keep their positions with survivors that move together, over long streams."""
    with errors():
        settings = GapSettings(streams, window, points(slides), questions, seed, system_prompt)
        engine = open_model(model, dtype, device, threads)
        run("gaps", measure, settings, engine, ("streams", 4 * streams), lambda r: [gaps_table(r)], output, as_json)


if __name__ == "__main__":
    typer.run(main)
