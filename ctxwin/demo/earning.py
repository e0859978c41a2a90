"""The demo on a model without a profile: its lanes are tried between the asks, as between the frames of a camera.

Each stream is one window, so one unit of evidence: nothing is promoted within a demo, as `Earning.summary` notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.audit import Options, auditor_of
from ctxwin.audit.auditor import VARIABLE, enabled
from ctxwin.audit.evidence import BEHIND
from ctxwin.profiles import BASIS_NAME, PROFILE_NAME, PROFILES_VARIABLE, find_profile
from ctxwin.tiny import checkpoint_dir

if TYPE_CHECKING:
    from ctxwin.demo.agent import Step
    from ctxwin.engines.base import Engine


@contextlib.contextmanager
def without_profile(model: str) -> Iterator[Path]:
    """Provide a copy of a model without its measurements until the block ends; enables trials of lanes in this process.

    Raises ValueError if the model is not a folder.
    """
    source = checkpoint_dir() if model == "tiny" else Path(model)
    if not source.is_dir():
        raise ValueError(f"--no-profile needs --model tiny or the folder of a model, got {model!r}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / source.name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(PROFILE_NAME, BASIS_NAME))
        config = copy / "config.json"  # a field of no meaning, so that no shipped profile is of this model
        config.write_text(json.dumps(json.loads(config.read_bytes()) | {"without_profile": True}))
        os.environ |= {PROFILES_VARIABLE: str(Path(folder) / "profiles"), VARIABLE: "1"}
        yield copy


class Earning:
    """Audits between asks, and their costs; does nothing if lanes are not tried.

    Attributes:
        on: lanes earn trust.
    """

    def __init__(self, engine: Engine) -> None:
        self.on = enabled() and find_profile(engine.spec.model) is None
        self._engine, self._phases = engine, list[tuple[str, int]]()
        if self.on:
            auditor_of(engine, Options(share=1.0, quiet_s=0.0, queue=64))

    def steps(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Yield ``steps``; all audits run between them, none during one."""
        if not self.on:
            yield from steps
            return
        auditor = auditor_of(self._engine)
        while True:
            tokens_before = auditor.counts.tokens
            auditor.drain()
            with auditor.hold():
                strategy, step = auditor.evidence_of(self._engine).promoted(), next(steps, None)
            if step is None:
                return
            self._phases.append((strategy or "exact", auditor.counts.tokens - tokens_before))
            yield step

    def summary(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the decisions, and the prompt tokens computed by asks (audits included) by the strategy that served them."""
        by_strategy: dict[str, Counter[str]] = {}
        for step, (strategy, audited) in zip(steps, self._phases, strict=True):
            counts = {name: step[name] for name in step if name.startswith("computed_tokens")}
            lanes = {f"in lane {lane}": tokens for lane, tokens in step["tokens_by_lane"].items()}
            by_strategy.setdefault(strategy, Counter()).update({"asks": 1, "audit_tokens": audited, **counts, **lanes})
        decisions = auditor_of(self._engine).decisions(self._engine)
        return {
            "served": {strategy: dict(counts) for strategy, counts in by_strategy.items()},
            "decisions": [str(decision) for decision in decisions],
            "note": self._note(),
        }

    def _note(self) -> str:
        """Return the progress of the evidence towards a promotion, as text."""
        evidence = auditor_of(self._engine).evidence_of(self._engine)
        if (strategy := evidence.promoted()) is not None:
            return f"{strategy} is promoted"
        windows = ", ".join(
            f"{name} {e.begun} of {e.units + evidence.units_needed(name) + BEHIND}"
            for name, e in evidence.record.strategies.items()
        )
        return f"nothing is promoted: each stream is one window, and without harm it takes so many: {windows or 'none tried'}"
