"""Fits the basis that a model's patches share, on the deficits of contexts of their own; see `ctxwin.profiles`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ctxwin.engines.base import Engine
from ctxwin.kv.patch import Layers
from ctxwin.profiles import ModelBasis, model_digest
from ctxwin_evals.decoder import Reader
from ctxwin_evals.items import Item
from ctxwin_evals.patching import Patcher, Weighting, fitted
from ctxwin_evals.serving import ServedGroup

_STRIDE = 1_000_000
"""Contexts between those of one seed and the next."""


def contexts_for(engine: Engine, count: int, seed: int, images: Path | None, max_pixels: int | None) -> list[Item]:
    """Sequences of a user's pictures, or of the bundled world's frames for the model that knows them, as items.

    They belong to a probe's ``fitting`` split: evals measure on none of them, whatever the seed.
    Raises ValueError for another model without pictures: directions fitted on what it never serves would be worth little.
    """
    from ctxwin.tiny import checkpoint_dir
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
    items = source.items(count, "fitting", first=seed * _STRIDE)
    # One item a context, whatever is asked about it.
    return list({item.context: replace(item, system_prompt=source.system_prompt) for item in items}.values())


def fit(
    engine: Engine,
    contexts: Sequence[Item],
    rank: int,
    layers: Layers,
    progress: Callable[[int], None] = lambda done: None,
) -> ModelBasis:
    """The basis of a model, from the deficits of each context's chunks but the first.

    It keeps ``rank`` directions over all or the deep (upper half) layers; patches may use fewer, most important first.
    Errors count as the output sees them (`make_weight`: values by the output projection, keys balanced against them);
    latent attention, whose values have no projection of their own, counts keys and values alike.

    Raises ValueError where the contexts give no deficit. Cost: two forwards for each chunk and a small SVD for each deficit.
    """
    reader: Any = Reader(engine)

    def groups() -> Iterator[ServedGroup]:
        for item in contexts:
            yield ServedGroup(reader, [item], Patcher(reader.spec), "")
            progress(1)

    weight: Weighting = "balanced" if reader.spec.family == "mla" else "output"
    patcher = fitted(reader, ("shared", layers, weight), groups, rank=rank)
    assert patcher.basis is not None
    basis = replace(patcher.basis, identity=model_digest(engine.spec.model))
    return ModelBasis(basis, patcher.weight, datetime.now(UTC).isoformat(timespec="seconds"))
