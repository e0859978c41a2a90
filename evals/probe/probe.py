"""The probe: stages in order, each within its share of the time, and what they found as one JSON-able object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.evals.arms import parse_arms
from ctxwin.evals.decoder import Decoder
from ctxwin.evals.patching import Patcher
from ctxwin.evals.probe import moving, structure
from ctxwin.evals.probe.arms import Oracle, Stepwise
from ctxwin.evals.probe.contexts import PLACED, Kind, Source
from ctxwin.evals.probe.cost import costs
from ctxwin.evals.probe.listen import Clock, Heard, Listener
from ctxwin.evals.probe.patchers import SERVED, make_patcher, spelling, variants
from ctxwin.evals.probe.reading import Competence, competence, read
from ctxwin.evals.probe.sizes import Sizes
from ctxwin.evals.probe.verdict import (
    Judgement,
    Limits,
    Setting,
    candidate,
    cheapest,
    judge,
    may_keep,
    proven,
    sentence,
    smallest_safe,
    summary,
    survivors_sentence,
    with_margin,
)

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

FORMAT = 1
RANKS = (1, 2, 4, 8, 16, 32, 64)
LADDER = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
"""Ranks that may end up in a profile."""
_RUNGS = 5
"""How many ranks are held against fresh contexts."""


class Probe:
    """One probe of one model.

    Args:
        engine: the model.
        sources: where contexts come from, the first one whose questions the model answers from its context is used.
        limits: what counts as safe.
        sizes: how much is measured.
        seconds: time after which stages are cut short; each makes at least one batch.
        progress: called with a stage, what is done of it and how much there is.
    """

    def __init__(
        self,
        engine: HFEngine,
        sources: Sequence[Source],
        limits: Limits | None = None,
        sizes: Sizes | None = None,
        seconds: float = 240.0,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        if not sources:
            raise ValueError("a probe needs at least one source of contexts, got none")
        if seconds <= 0:
            raise ValueError(f"seconds must be > 0, got {seconds}")
        self.engine, self.sources = engine, tuple(sources)
        self.limits, self.sizes = limits or Limits(), sizes or Sizes()
        self.clock = Clock(seconds, progress)
        self.decoder = Decoder(engine)
        self.source = self.sources[0]
        self.listener = self._listener()
        self.setting: Setting | None = None
        self.served: Setting | None = None

    def run(self) -> dict[str, Any]:
        """Runs all stages; see the module's own words. Within a source everything depends on the sizes alone."""
        tried: dict[str, list[Competence]] = {}
        for number, source in enumerate(self.sources, 1):
            self.source, self.listener = source, self._listener(source)
            end = self.clock.until(0.1 * number)
            readings = read(self.listener, source.contexts("reading", self.sizes.reading), self.clock, end)
            kinds: tuple[Kind, ...] = ("cross", "one")
            tried[source.name] = [c for kind in kinds if (c := competence(readings, kind)) is not None]
            if any(c.kind == "cross" and c.reads for c in tried[source.name]):
                break
        found = tried[self.source.name]
        result: dict[str, Any] = {
            **self._system_prompt(), "reading": {name: [asdict(c) for c in held] for name, held in tried.items()},
        }  # fmt: skip
        effect, judgement = self._effect(found)
        result["arms"] = {
            kind: {arm: made for arm in ("stepwise", "oracle", "blind") if (made := summary(_of(effect, arm, kind)))}
            for kind in dict.fromkeys(h.kind for h in effect)
        }
        choosing = self.source.contexts("choosing", self.sizes.choosing)
        end = self.clock.until(0.5)
        result["deficit"] = structure.shape(self.listener, choosing[:8], self.clock, end)
        if judgement.evidence is not None:
            result |= self._compression(judgement.evidence)
            if judgement.finding == "binds":
                result["proving"] = self._prove(judgement.evidence, result["curve"])
            result |= self._moves()
        rank, layers = (self.served.rank, self.served.layers) if self.served else (16, "all")
        result["cost"] = costs(
            self.decoder, self.source.system_prompt, rank, layers, self.clock, self.clock.until(1.0), self.sizes.chunks
        )
        blind = result["arms"].get(judgement.evidence or "cross", {}).get("blind")
        result["verdict"] = {
            "finding": judgement.finding, "sentence": sentence(judgement, self.served, blind),
            "evidence": judgement.evidence, "reasons": list(judgement.reasons), "limits": asdict(self.limits),
        }  # fmt: skip
        result["served"] = (
            None if self.served is None else {k: getattr(self.served, k) for k in ("rank", "layers", "share")}
        )
        survivors = result.get("survivors", [])
        result["fidelity"] = self._fidelity(judgement, survivors)
        if survivors and "survivors" in result["fidelity"]:
            said = survivors_sentence(survivors, result["fidelity"]["survivors"])
            result["verdict"]["reasons"].append(said)
        result["seconds"] = round(self.clock.spent, 1)
        return result

    def _listener(self, source: Source | None = None) -> Listener:
        chosen = self.source if source is None else source
        listener = Listener(self.decoder, Patcher(self.decoder.spec), chosen.system_prompt, chosen.max_tokens)
        listener.patcher = make_patcher(listener, lambda: chosen.contexts("fitting", self.sizes.fitting))
        return listener

    def _effect(self, found: Sequence[Competence]) -> tuple[list[Heard], Judgement]:
        """Blind reuse, the mask oracle and the noise floor, in growing numbers until there is a verdict."""
        arms = [Stepwise("stepwise"), Oracle("oracle"), *parse_arms("blind")]
        heard: list[Heard] = []
        contexts = self.source.contexts("moving", self.sizes.looks[-1])
        end, done = self.clock.until(0.45), 0
        # Where the model does not read, what blind reuse changes decides nothing; a few figures are enough.
        looks = self.sizes.looks if any(c.kind == "cross" and c.reads for c in found) else self.sizes.looks[:1]
        for look in looks:
            for batch in self.listener.batches(contexts[done:look]):
                heard += self.listener.hear(batch, arms)
                done += len(batch)
                self.clock.progress("what blind reuse changes", done, looks[-1])
                if self.clock.begun + self.clock.spent > end:
                    break
            over = done < look or look == looks[-1]
            made = judge(found, _of(heard, "blind"), _of(heard, "stepwise"), self.limits, last=over)
            if over or made.finding == "binds":
                break
        return heard, made

    def _compression(self, evidence: Kind) -> dict[str, Any]:
        """Every way to compress at every rank on the choosing split: bytes at equal fidelity, and the functional rank."""
        contexts = self.source.contexts("choosing", self.sizes.choosing)
        fits = bool(getattr(self.source, "fits", True))
        ways = variants(self.decoder.spec, fits) if self.sizes.layouts else list(SERVED)
        self.listener.patcher.floor = RANKS[-1]
        heard: dict[str, list[Heard]] = {}
        end, done = self.clock.until(0.65), 0
        arms = {(way, rank): spelling(rank, way) for way in ways for rank in RANKS}
        named = parse_arms(",".join(["blind", *arms.values()]))
        for batch in self.listener.batches(contexts):
            for one in self.listener.hear(batch, named, kinds=(evidence,)):
                heard.setdefault(one.arm, []).append(one)
            done += len(batch)
            self.clock.progress("ways to compress", done, len(contexts))
            if self.clock.begun + self.clock.spent > end:
                break
        base = heard["blind"]
        curve = []
        for (way, rank), name in arms.items():
            made = summary(heard[name], base)
            assert made is not None
            keep = ("n", "flips", "flips_ci95", "kl", "eta", "eta_ci95", "share")
            basis = self.listener.patcher.variant(way).basis_bytes(rank)
            curve.append({"way": way or "joint", "rank": rank, **{k: made[k] for k in keep}, "basis_bytes": basis})
        ranks = {}
        for way in ("", "per_layer"):
            if way in ways:
                kls = np.array([[h.kl for h in heard[arms[way, rank]]] for rank in RANKS])
                blind = np.array([h.kl for h in base])
                ranks[way or "joint"] = structure.functional_rank(RANKS, kls, blind, [h.cluster for h in base])
        return {"curve": curve, "cheapest": cheapest(curve, self.limits), "functional_rank": ranks}

    def _prove(self, evidence: Kind, curve: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The cheaper of the ways that windows serve, on fresh contexts, at ranks around the one that was enough."""
        layers, rank = candidate(curve, self.limits, LADDER[-1])
        at = next((i for i, r in enumerate(LADDER) if r >= rank), len(LADDER) - 1)
        rungs = LADDER[max(0, at - 1) : max(0, at - 1) + _RUNGS]
        way = "deep" if layers == "deep" else ""
        arms = [Stepwise("stepwise"), *parse_arms(",".join(["blind", *(spelling(r, way) for r in rungs)]))]
        self.listener.patcher.floor = rungs[-1]
        contexts = self.source.contexts("proving", self.sizes.proving)
        heard: list[Heard] = []
        end, done = self.clock.until(0.85), 0
        for batch in self.listener.batches(contexts):
            heard += self.listener.hear(batch, arms)
            done += len(batch)
            self.clock.progress("a setting on fresh contexts", done, len(contexts))
            if self.clock.begun + self.clock.spent > end:
                break
        blind, noise = _of(heard, "blind"), _of(heard, "stepwise")
        settings = [proven(r, layers, _of(heard, spelling(r, way)), blind, noise, evidence, self.limits) for r in rungs]
        self.setting = smallest_safe(settings)
        self.served = with_margin(self.setting, settings)
        return [asdict(s) for s in settings]

    def _moves(self) -> dict[str, Any]:
        """Slides, orders and recalls, at the setting that was found safe."""
        rank, layers = (self.served.rank, self.served.layers) if self.served else (16, "all")
        once = [self.source.stream(i, 1) for i in range(self.sizes.survivors)]
        slid = moving.slide(self.listener, once, self.clock, self.clock.until(0.9))
        streams = [self.source.stream(i, self.sizes.slides) for i in range(self.sizes.streams)]
        slid += [s for s in moving.slide(self.listener, streams, self.clock, self.clock.until(0.95)) if s.slides > 1]
        contexts = self.source.contexts("choosing", self.sizes.moving)
        orders = moving.reorder(self.listener, contexts, rank, layers)
        self.clock.progress("orders and recalls", 1, 2)
        recalls = moving.recall(self.listener, contexts, rank, layers)
        self.clock.progress("orders and recalls", 2, 2)
        exact, orbit = f"patched:{rank}", f"orbit:{rank}"
        return {
            "survivors": moving.survival(slid),
            "reorder": {
                "rank": rank,
                **{
                    name: summary(_of(orders, arm), _of(orders, "blind"))
                    for name, arm in (("exact", exact), ("transfer", f"transfer:{rank}"), ("orbit", orbit))
                },
                "moved": _mean([h.extra["moved"] for h in _of(orders, orbit)]),
            },
            "recall": [
                {
                    "replaced": turned / (PLACED - 1),
                    "stale": summary(_of(heard, f"stale:{rank}"), _of(heard, "blind")),
                    "fresh": summary(_of(heard, f"update:{rank}"), _of(heard, "blind")),
                }
                for turned, heard in recalls.items()
            ],
        }

    def _fidelity(self, judgement: Judgement, survivors: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What `auto` should do with this model: `exact` unless something else was shown to be safe."""
        if judgement.finding == "chains":
            return {"mode": "blind"}
        if judgement.finding != "binds" or self.served is None:
            return {"mode": "exact"}
        # Shares in whole percents upwards, so that the rank that was proven is not lost to rounding.
        share = min(1.0, float(np.ceil(round(100 * self.served.share, 6)) / 100))
        kept = may_keep(survivors, self.limits)
        return {
            "mode": "patched", "bytes_share": share, "layers": self.served.layers,
            "survivors": "keep" if kept else "refresh",
        }  # fmt: skip

    def _system_prompt(self) -> dict[str, Any]:
        import platform

        from ctxwin import __version__

        spec = self.engine.spec
        group = self.listener.group([self.source.context("choosing", 0).item])
        return {
            "format": FORMAT,
            "ctxwin": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": spec.model,
            "engine": {
                "family": spec.kv.family, "layers": spec.kv.layers, "dtype": spec.kv.dtype,
                "machine": platform.processor() or platform.machine(),
            },
            "source": {
                "name": self.source.name, "about": self.source.about, "notes": list(self.source.notes),
                "chunks": len(group.places), "chunk_tokens": [p.tokens for p in group.places],
                "system_prompt": self.source.system_prompt, "max_tokens": self.source.max_tokens,
            },
            "sizes": asdict(self.sizes),
        }  # fmt: skip


def _of(heard: Sequence[Heard], arm: str, kind: Kind | None = None) -> list[Heard]:
    return [h for h in heard if h.arm == arm and kind in (None, h.kind)]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
