"""Drift: a window slides along a long stream, and its answers are held against two re-prefills.

The window runs as in production: a chunk is conditioned on the survivors before it, which were conditioned on
earlier survivors, so what is approximate is absorbed again and again. ``window`` is the re-prefill of what is placed
now; ``stream`` is the re-prefill of what was seen so far, as far as the model was trained to read, and a survivor that
remembers what left the window is right by it. Both are reported (Kamera, section 5, "Sliding-window survival").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ctxwin.chunk import Chunk
from ctxwin.fidelity import Fidelity
from ctxwin.progress import progress
from ctxwin.tiny.world import Frame, Question, answer, make_stream, render
from ctxwin.window.answer import Answer
from ctxwin.window.window import Window
from ctxwin_evals import console
from ctxwin_evals.console import Device, Dtype, Json, Model, Threads
from ctxwin_evals.decoder import Decoder, Memory, concatenated
from ctxwin_evals.metrics import kl_divergence
from ctxwin_evals.stats import bootstrap_mean, share_interval
from ctxwin_evals.tasks.drawn import TRAINED_FRAMES
from ctxwin_evals.tasks.tiny import SPACE

from .command import SYSTEM_PROMPT, Output, Seed, errors, write_result
from .scenes import isolated, scene_questions

if TYPE_CHECKING:
    from rich.table import Table

    from ctxwin.engines.hf.engine import HFEngine


@dataclass(frozen=True)
class DriftSettings:
    """Settings of a drift run.

    Attributes:
        streams: independent streams.
        window: frames in the window; smaller than `TRAINED_FRAMES`, or the two references would be one.
        points: numbers of slides after which questions are asked.
        questions: questions a stream and point, about placed frames.
        refresh_every: slides after which the second run re-forms everything placed, as in idle time. Its questions are
            asked right after the slide (``refreshed``) and again after the refresh that falls on it (``rested``).
    """

    streams: int = 12
    window: int = 4
    points: tuple[int, ...] = (1, 8, 32, 128)
    questions: int = 6
    refresh_every: int = 1
    seed: int = 0
    system_prompt: str = SYSTEM_PROMPT

    def __post_init__(self) -> None:
        if not 2 <= self.window < TRAINED_FRAMES:
            raise ValueError(f"window must be 2..{TRAINED_FRAMES - 1} frames, got {self.window}")
        if self.refresh_every < 1:
            raise ValueError(f"refresh_every must be >= 1, got {self.refresh_every}")
        if not self.points or min(self.points) < 1:
            raise ValueError(f"slides must be numbers >= 1, got {list(self.points)}")


@dataclass(frozen=True)
class Asked:
    """One question at one point: KL(reference || window's answer) for both references, and who was right."""

    stream: int
    slides: int
    kl_window: float
    kl_stream: float
    right: bool
    window_right: bool
    stream_right: bool
    references_agree: bool


def measure(
    engine: HFEngine, settings: DriftSettings, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Run all streams with and without refresh. ``rested`` has the points that a refresh falls on.

    Returns ``{"config", "note", "drift": {"kept" | "refreshed" | "rested": {slides: {"window" | "stream": {...}, ...}}}}``.
    ``agreed`` is the mean KL to the window where both references answer alike, ``nearer`` that to the nearer reference;
    ``accuracy`` is by the generator's answer over the placed frames (window) or the frames read (stream). Intervals are
    of 95 %, over streams.
    """
    by_way: dict[str, list[Asked]] = {"kept": [], "refreshed": [], "rested": []}
    for number in range(settings.streams):
        stream = _Stream(engine, settings, number)
        by_way["kept"] += stream.ask_survivors()
        on_progress(1)
        right_after, rested = stream.ask_refreshed()
        by_way["refreshed"] += right_after
        by_way["rested"] += rested
        on_progress(1)
    note = (
        f"{settings.window} frames are placed. The stream reference reads the last {TRAINED_FRAMES} frames seen, the "
        f"range the model was trained on, not the whole stream. Refreshed: everything placed is re-formed every "
        f"{settings.refresh_every} slide(s), after the questions; rested: asked again after that."
    )
    return {
        "config": {**asdict(settings), "points": list(settings.points), "stream_frames": TRAINED_FRAMES},
        "note": note,
        "drift": {
            name: {str(n): _summary([a for a in rows if a.slides == n]) for n in sorted({a.slides for a in rows})}
            for name, rows in by_way.items()
        },
    }


class _Stream:
    """One stream: its frames, and the references of each point, which all runs along it share."""

    def __init__(self, engine: HFEngine, settings: DriftSettings, number: int) -> None:
        self.engine, self.settings, self.number = engine, settings, number
        rng = np.random.default_rng((SPACE, settings.seed, 0x64726674, number))
        length = settings.window + max(settings.points)
        self.frames = make_stream(rng, length, window=TRAINED_FRAMES)
        self._decoder = Decoder(engine)
        self._references: dict[int, tuple[list[Question], NDArray[np.float32], NDArray[np.float32]]] = {}

    def ask_survivors(self) -> list[Asked]:
        """Ask right after slides of a window that only rotates its survivors."""
        return self.run(0, self.settings.points, 0)[0]

    def ask_refreshed(self) -> tuple[list[Asked], list[Asked]]:
        """Ask right after slides, and again after the refresh due there.

        A refresh makes all placed chunks exact, so nothing that came before it matters: each point is reached from
        a window of the chunks placed at the last refresh before it, computed anew.
        """
        every = self.settings.refresh_every
        unrefreshed: list[Asked] = []
        refreshed: list[Asked] = []
        for point in sorted(set(self.settings.points)):
            right_after, rested = self.run((point - 1) // every * every, (point,), every)
            unrefreshed += right_after
            refreshed += rested
        return unrefreshed, refreshed

    def run(self, begin: int, points: Sequence[int], every: int) -> tuple[list[Asked], list[Asked]]:
        """A window that starts with what is placed after ``begin`` slides, exact, and slides on to the last point.

        Returns what was asked after those numbers of slides, and again after the refresh (``every`` so many; 0: none) there.
        """
        unrefreshed: list[Asked] = []
        refreshed: list[Asked] = []
        opened = Window(self.engine, self.settings.system_prompt, fidelity=Fidelity("patched"))
        with isolated(self.engine), opened as window:
            for i in range(begin, self.settings.window + max(points)):
                window.append(Chunk.image(render(self.frames[i]), keep_source=False))
                slides = i + 1 - self.settings.window
                if slides > begin:
                    window.slide(1)
                # An answer conditions the new chunk, as a question a step would; its text does not matter.
                window.ask("color of 00?", max_tokens=1)
                if slides <= begin:
                    continue
                if slides in points:
                    unrefreshed += self._ask(window, slides)
                if every and slides % every == 0:
                    window.maintenance.refresh()
                    if slides in points:
                        refreshed += self._ask(window, slides)
        return unrefreshed, refreshed

    def _ask(self, window: Window, slides: int) -> list[Asked]:
        """Questions about what is placed; the same ones in every run."""
        questions, of_window, of_stream = self._reference(slides)
        in_view, read = self._in_view(slides), self._read(slides)
        rows = []
        for question, now, whole in zip(questions, of_window, of_stream, strict=True):
            ours = _vector(window.ask(question.text, max_tokens=1, logprobs=-1), len(now))
            words = [self.engine.decode([int(x.argmax())]).strip() for x in (ours, now, whole)]
            truths = [answer(frames, question.text) for frames in (in_view, read)]
            rows.append(
                Asked(
                    stream=self.number,
                    slides=slides,
                    kl_window=kl_divergence(now, ours),
                    kl_stream=kl_divergence(whole, ours),
                    right=words[0] == truths[0],
                    window_right=words[1] == truths[0],
                    stream_right=words[2] == truths[1],
                    references_agree=words[1] == words[2],
                )
            )
        return rows

    def _in_view(self, slides: int) -> Sequence[Frame]:
        return self.frames[slides : slides + self.settings.window]

    def _read(self, slides: int) -> Sequence[Frame]:
        """Return the frames that the stream reference reads: the last `TRAINED_FRAMES` ones."""
        end = slides + self.settings.window
        return self.frames[max(0, end - TRAINED_FRAMES) : end]

    def _reference(self, slides: int) -> tuple[list[Question], NDArray[np.float32], NDArray[np.float32]]:
        """Questions at a point, and the logits of both re-prefills ``[questions, vocab]``. Two forwards each, once."""
        if slides not in self._references:
            in_view = self._in_view(slides)
            rng = np.random.default_rng((SPACE, self.settings.seed, 0x61736B, self.number, slides))
            questions = scene_questions(in_view, self.settings.questions, rng)
            texts = [question.text for question in questions]
            of_window, of_stream = (self._exact(frames, texts) for frames in (in_view, self._read(slides)))
            self._references[slides] = (questions, of_window, of_stream)
        return self._references[slides]

    def _exact(self, frames: Sequence[Frame], questions: Sequence[str]) -> NDArray[np.float32]:
        """Next-token logits after each question over the exact KV of these frames: one prefill, one read."""
        if not questions:
            return np.empty((0, 0), np.float32)
        encoded, span = self._decoder.system_prompt(self.settings.system_prompt)
        start, parts = encoded.advance, []
        for frame in frames:
            one = self.engine.encode(Chunk.image(render(frame), keep_source=False))
            parts.append(self._decoder.tokens([one], start))
            start += one.advance
        memory, _ = self._decoder.append(concatenated(parts), self._decoder.memory([[span]]))
        many = Memory(*(x.expand(-1, len(questions), -1, -1, -1) for x in (memory.k, memory.v)))
        return self._decoder.read(many, questions, start).numpy()


def _vector(reply: Answer, size: int) -> np.ndarray:
    vector = np.full(size, -np.inf)
    vector[list(reply.first_token_logprobs)] = list(reply.first_token_logprobs.values())
    return vector


def _summary(rows: Sequence[Asked]) -> dict[str, Any]:
    n, streams = len(rows), [str(a.stream) for a in rows]  # questions about one stream are not independent

    def figures(kls: list[float], reference_right: int) -> dict[str, Any]:
        return {
            "kl": float(np.mean(kls)),
            "kl_ci95": _listed(bootstrap_mean(kls, streams)),
            "kl_p99": float(np.quantile(kls, 0.99)),
            "kl_median": float(np.median(kls)),
            "reference_accuracy": reference_right / n,
        }

    right = sum(a.right for a in rows)
    return {
        "n": n,
        "accuracy": right / n,
        "ci95": list(share_interval([float(a.right) for a in rows], streams)),
        "references_agree": sum(a.references_agree for a in rows) / n,
        "window": figures([a.kl_window for a in rows], sum(a.window_right for a in rows)),
        "stream": figures([a.kl_stream for a in rows], sum(a.stream_right for a in rows)),
        "agreed": _mean([a.kl_window for a in rows if a.references_agree]),
        "nearer": _mean([min(a.kl_window, a.kl_stream) for a in rows]),
    }


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def drift_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    columns = "run|slides|n|accuracy|to window|to stream|to the nearer|agreed|agree"
    table = console.new_table("KL of answers after slides (nats, mean)", columns)
    for name, by_slides in result["drift"].items():
        for slides, p in by_slides.items():
            kls = p["window"]["kl"], p["stream"]["kl"]
            figures = (p["accuracy"], *kls, p["nearer"], p["agreed"], p["references_agree"])
            table.add_row(name, slides, str(p["n"]), *("-" if x is None else f"{x:.4f}" for x in figures))
    return table


def main(
    streams: Annotated[int, typer.Option(help="Independent streams.", min=1)] = 12,
    window: Annotated[int, typer.Option(help="Frames in the window.", min=2)] = 4,
    slides: Annotated[str, typer.Option(help="After how many slides to measure.")] = "1,8,32,128",
    questions: Annotated[int, typer.Option(help="Questions a stream and point.", min=1)] = 6,
    refresh_every: Annotated[int, typer.Option(help="The refreshed run re-forms all placed every so many slides.")] = 1,
    seed: Seed = 0,
    model: Model = "tiny",
    system_prompt: Annotated[str, typer.Option(help="System prompt.")] = SYSTEM_PROMPT,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Slide a window along a stream: how far its answers drift from a re-prefill, with and without refresh."""
    with errors():
        points = tuple(sorted(set(console.numbers(slides))))
        settings = DriftSettings(streams, window, points, questions, refresh_every, seed, system_prompt)
        engine = console.open_model(model, dtype, device, threads)
        with progress("streams", 2 * streams) as advance:
            result = measure(engine, settings, advance)
        write_result(output, "drift.json", result)
        console.show(result, as_json, drift_table(result), result["note"])


if __name__ == "__main__":
    typer.run(main)
