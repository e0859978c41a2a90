"""The demo on a model without a profile: its lanes earn trust between the asks, as between the frames of a camera."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.profiles import BASIS_NAME, PROFILE_NAME, PROFILES_VARIABLE, find_profile
from ctxwin.tiny import checkpoint_dir
from ctxwin.trust import Options, auditor_of
from ctxwin.trust.auditor import VARIABLE, enabled

if TYPE_CHECKING:
    from ctxwin.demo.agent import Step
    from ctxwin.engines.base import Engine


@contextlib.contextmanager
def without_profile(model: str) -> Iterator[Path]:
    """A copy of a model that nothing was measured of, until the block ends. Lanes earn trust in this process from now on.

    Raises ValueError for a model that is no folder.
    """
    source = checkpoint_dir() if model == "tiny" else Path(model)
    if not source.is_dir():
        raise ValueError(f"--no-profile needs --model tiny or the folder of a model, got {model!r}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(PROFILE_NAME, BASIS_NAME))
        os.environ |= {PROFILES_VARIABLE: str(Path(folder) / "profiles"), VARIABLE: "1"}
        yield copy


class Earning:
    """Audits between asks, and what they cost; does nothing where lanes are not tried.

    Attributes:
        on: whether lanes earn trust.
    """

    def __init__(self, engine: Engine) -> None:
        self.on = enabled() and find_profile(engine.spec.model) is None
        self._engine, self._phases = engine, list[tuple[str, int]]()
        if self.on:
            auditor_of(engine, Options(share=1.0, quiet_s=0.0, queue=64))

    def steps(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps; nothing is audited during one, and all of it behind each."""
        if not self.on:
            yield from steps
            return
        auditor = auditor_of(self._engine)
        while True:
            before = auditor.counts.tokens
            auditor.drain()
            with auditor.hold():
                way, step = auditor.ledger(self._engine).promoted(), next(steps, None)
            if step is None:
                return
            self._phases.append((way or "exact", auditor.counts.tokens - before))
            yield step

    def summary(self, steps: Sequence[Step]) -> dict[str, Any]:
        """What was decided, and what asks computed, by the way that served them: in prompt tokens, audits included."""
        served: dict[str, Counter[str]] = {}
        for step, (way, audited) in zip(steps, self._phases, strict=True):
            counts = {name: step[name] for name in step if name.startswith("computed_tokens")}
            lanes = {f"in lane {lane}": tokens for lane, tokens in step["tokens_by_lane"].items()}
            served.setdefault(way, Counter()).update({"asks": 1, "audit_tokens": audited, **counts, **lanes})
        decisions = auditor_of(self._engine).decisions(self._engine)
        return {
            "served": {way: dict(counts) for way, counts in served.items()},
            "decisions": [str(decision) for decision in decisions],
        }
