"""Shared parts of the agents in this folder: command line, an engine with a ledger, and the closing report.

Every example is written like this:

    options = agent_options.parser(__doc__).parse_args()
    with agent_options.running(options) as run:  # opens the engine, creates the ledger
        window = run.watch(Window(run.engine, "You watch a camera.", budget=520, **run.serving))
        answer = window.ask("color of 17?", max_tokens=4)
        run.truth("red")  # None if it is not known
        run.say(answer.text)  # silent with --json
    # here the table (or the JSON) was printed
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.baselines import NAMES, Ledger
from ctxwin.engines.base import Engine
from ctxwin.errors import BadMedia, CtxwinError
from ctxwin.video import decode_video
from ctxwin.view import Trace

if TYPE_CHECKING:
    import numpy as np

# Progress bars and start-up messages do not belong between the lines of an agent; set where unset.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
SCRIPTED = "What this agent asks and does next is scripted; the answers are the model's."
BUNDLED = "The bundled model (1.2 M parameters) can only answer questions about pictures of its own generated world."


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every example; add your own before parsing."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="tiny", help="tiny (bundled), hf:MODEL or vllm:MODEL; default: %(default)s")
    options.add_argument("--engine", choices=("hf", "vllm"), help="fixes the engine where --model leaves it open")
    options.add_argument(
        "--mode", choices=("auto", "exact"), default="auto", help="fidelity; auto: by the model's profile"
    )
    options.add_argument("--seed", type=at_least(0), default=0, help="of the generated world and of the questions")
    options.add_argument("--json", action="store_true", help="print the figures as JSON and nothing else")
    options.add_argument("--trace", type=Path, metavar="FILE", help="record the run for `ctxwin view FILE`")
    options.set_defaults(error=options.error)
    return options


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number, ``least`` or more."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return integer


@contextmanager
def report_refusals(options: argparse.Namespace) -> Iterator[None]:
    """Ends the program with one line, as for options of another form, where what they name is refused in the block."""
    try:
        yield
    except (CtxwinError, OSError, ValueError) as error:
        options.error(str(error))


def decoded(video: Path, seconds: int, side: int = 448) -> list[np.ndarray]:
    """One frame a second of a video, the first ``seconds`` of it, at most ``side`` pixels wide and high."""
    import cv2

    try:
        frames = decode_video(video, end=seconds, fps=1.0)[0]
    except BadMedia:  # it is shorter, or the reason stands
        frames = decode_video(video, fps=1.0)[0]
    scale = min(1.0, side / max(frames.shape[1:3]))
    if scale == 1:
        return list(frames)
    return [cv2.resize(frame, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA) for frame in frames]


class Run:
    """An engine and what is counted on it.

    Attributes:
        scripted: whether a script decides what to do next, instead of the model.
        serving: options of its windows: the fidelity that ``--mode`` says, and sliding in batches where that is exact.
        reserve_tokens: tokens kept free for a question and its answer; the other users of the engine keep them free, too.
        figures: go into the JSON beside the ledger's summary.
    """

    def __init__(self, engine: Engine, options: argparse.Namespace, scripted: bool) -> None:
        self.engine, self.scripted = engine, scripted
        self.serving: dict[str, Any] = {"fidelity": Fidelity(options.mode), "low_water": "auto"}
        self.ledger = Ledger(engine, reference=True)
        self.reserve_tokens = 48
        self.figures: dict[str, Any] = {}
        self._options = options
        self._trace = Trace(options.trace, engine=engine) if options.trace else None

    def watch(self, window: Window, reserve_tokens: int | None = None) -> Window:
        """Counts a window and its later forks; the others' prompts get its budget less ``reserve_tokens``. Returns the window."""
        self.ledger.watch(window, reserve_tokens=self.reserve_tokens if reserve_tokens is None else reserve_tokens)
        if self._trace:
            self._trace.watch(window)
        return window

    def truth(self, text: str | None) -> None:
        """The right answer of the latest ask, None where it is not known. Call it after every ask."""
        if text is not None:
            self.ledger.truth(text)
        if self._trace:
            row = self.ledger.rows[-1]
            self._trace.note({name: row[f"computed_tokens_{policy}"] for policy, name in NAMES.items()}, truth=text)

    def budget(self, system_prompt: str, chunk: Chunk, count: int, reserve_tokens: int | None = None) -> int:
        """Tokens of a window that holds ``count`` chunks like ``chunk``, and a question with its answer."""
        reserve_tokens = self.reserve_tokens if reserve_tokens is None else reserve_tokens
        return (
            self.engine.encode_system_prompt(system_prompt).tokens
            + count * self.engine.encode(chunk).tokens
            + reserve_tokens
        )

    def say(self, line: str) -> None:
        """A line for people."""
        if not self._options.json:
            print(line, flush=True)

    def report(self) -> None:
        """The table, or the figures as JSON."""
        if self._trace:
            self._trace.close()
            self.say(f"recorded: ctxwin view {self._trace.path}")
        if not self._options.json:
            print(self.ledger.table())
            return
        about = {
            "example": Path(sys.argv[0]).stem,
            "model": self._options.model,
            "engine": self.engine.spec.name,
            "seed": self._options.seed,
            "mode": self._options.mode,
            "policy": "scripted" if self.scripted else "model",
        }
        print(json.dumps({**about, **self.ledger.summary(), **self.figures}))


@contextmanager
def running(options: argparse.Namespace, scripted: bool | None = None) -> Iterator[Run]:
    """Opens the engine, and prints the report once the block is through.

    ``scripted``: whether a script decides instead of the model; by default it does on the bundled model.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    bundled = options.model.partition(":")[0] == "tiny"
    with ExitStack() as stack:
        with report_refusals(options):
            engine = stack.enter_context(open_engine(options.model, engine=options.engine))
            run = Run(engine, options, bundled if scripted is None else scripted)
        if bundled:
            run.say(BUNDLED)
        if run.scripted:
            run.say(SCRIPTED)
        yield run
        run.report()
