"""Fits the basis that a model's patches share, on the deficits of contexts of their own; see `ctxwin.profiles`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctxwin.chunk import Chunk
from ctxwin.engines.segments import Segment
from ctxwin.kv.deficit import Deficit, deficit
from ctxwin.kv.pooling import fit_basis
from ctxwin.profiles import ModelBasis, model_digest
from ctxwin_evals.patching import make_weight

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine
    from ctxwin.kv.patch import Layers

_STRIDE = 1_000_000
"""Contexts between those of one seed and the next."""


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fit.

    Attributes:
        contexts: sequences of four chunks; every chunk but the first gives a deficit.
        rank: directions to keep; patches may use fewer, most important first.
        layers: those they cover: deep (the upper half), or all.
        seed: of the contexts, which belong to a probe's ``fitting`` split: evals measure on none of them, whatever the seed.
    """

    contexts: int = 120
    rank: int = 64
    layers: Layers = "deep"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.contexts < 1 or self.rank < 1 or self.seed < 0:
            raise ValueError(
                f"contexts and rank must be >= 1 and the seed >= 0, got {self.contexts}, {self.rank}, {self.seed}"
            )
        if self.layers not in ("all", "deep"):
            raise ValueError(f"layers must be all or deep, got {self.layers!r}")


@dataclass(frozen=True)
class Contexts:
    """The data for a fit: a system prompt, and sequences of chunks after it."""

    system_prompt: str
    sequences: Sequence[Callable[[], Sequence[Chunk]]]


def contexts_for(engine: HFEngine, settings: FitSettings, images: Path | None, max_pixels: int | None) -> Contexts:
    """Sequences of a user's pictures, or of the bundled world's frames for the model that knows them.

    Raises ValueError for another model without pictures: directions fitted on what it never serves would be worth little.
    """
    from ctxwin.tiny import checkpoint_dir
    from ctxwin_evals.probe.contexts import PLACED
    from ctxwin_evals.probe.folder import Images
    from ctxwin_evals.probe.generated import World

    if images is None and model_digest(engine.spec.model) != model_digest(checkpoint_dir()):
        raise ValueError(
            f"contexts are generated for the bundled model only, got {engine.spec.model!r}; fit on pictures like those "
            "that will be placed: --images DIR"
        )
    if not engine.spec.vision:
        raise ValueError(f"{engine.spec.model!r} reads text only, and bases are fitted on pictures")
    source = World() if images is None else Images(images, (), 1, max_pixels)
    first = settings.seed * _STRIDE

    def sequence(index: int) -> Sequence[Chunk]:
        return source.context("fitting", first + index).load()[:PLACED]

    return Contexts(source.system_prompt, [partial(sequence, i) for i in range(settings.contexts)])


def deficits(engine: HFEngine, system_prompt: str, chunks: Iterable[Chunk]) -> Iterator[Deficit]:
    """Yield the deficit of each chunk but the first to its KV after the system prompt alone.

    Cost: two forwards a chunk, one vision encode.
    """
    head = _head(engine, system_prompt)
    front, at = [head], head.encoded.advance
    for chunk in chunks:
        target = engine.encode(chunk)
        conditioned = engine.prefill(front, target, at)
        if len(front) > 1:
            yield deficit(conditioned, engine.prefill([head], target, head.encoded.advance), engine.spec.kv)
        front.append(Segment(target, at, span=conditioned))
        at += target.advance


def _head(engine: HFEngine, system_prompt: str) -> Segment:
    encoded = engine.encode_system_prompt(system_prompt)
    return Segment(encoded, 0, span=engine.prefill([], encoded, 0))


def fit(
    engine: HFEngine, contexts: Contexts, settings: FitSettings, progress: Callable[[int], None] = lambda done: None
) -> ModelBasis:
    """The basis of a model.

    Errors count as the output sees them (`make_weight`: values by the output projection, keys balanced against them);
    latent attention, whose values have no projection of their own, counts keys and values alike.

    Raises ValueError where the contexts give no deficit. Cost: two forwards for each chunk and a small SVD for each deficit.
    """
    spec, head = engine.spec.kv, _head(engine, contexts.system_prompt)
    sample = engine.prefill([head], engine.encode(contexts.sequences[0]()[0]), head.encoded.advance)
    weight = make_weight("balanced" if spec.family == "mla" else "output", engine.text_model, spec, sample)

    def all_of() -> Iterator[Deficit]:
        for sequence in contexts.sequences:
            yield from deficits(engine, contexts.system_prompt, sequence())
            progress(1)

    fitted_basis = fit_basis(all_of(), spec, settings.rank, layers=settings.layers, weight=weight)
    basis = replace(fitted_basis, identity=model_digest(engine.spec.model))
    return ModelBasis(basis, weight, datetime.now(UTC).isoformat(timespec="seconds"))
