"""Ways to compress a deficit, fitted on contexts of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ctxwin.evals.group import Group
from ctxwin.evals.patching import BASIS_RANK, Patcher, make_weight, parse_variant
from ctxwin.evals.probe.contexts import Context
from ctxwin.evals.probe.listen import Listener, bare
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.pooling import fit_basis

VARIANTS = ("", "deep", "per_layer", "per_layer+deep", "balanced", "output", "shared", "shared+deep")
"""As `parse_variant` reads them; "" is one joint factorisation of all layers."""
SERVED = ("", "deep")
"""Those that windows serve."""


def variants(spec: KVSpec, fitted: bool) -> list[str]:
    """The ways that this model and these contexts allow: an output weight needs per-head values, a basis its split."""
    return [
        name
        for name in VARIANTS
        if not ("output" in name and spec.family == "mla") and (fitted or not name.startswith("shared"))
    ]


def make_patcher(listener: Listener, fitting: Callable[[], Sequence[Context]]) -> Patcher:
    """A patcher whose variants are fitted when they are first asked for, on contexts of their own split."""
    decoder = listener.decoder
    plain = Patcher(decoder.spec)

    def groups() -> Iterator[Group]:
        for batch in listener.batches(fitting()):
            yield listener.group([bare(c.item) for c in batch], Patcher(decoder.spec))

    def deficits() -> Iterator[Deficit]:
        for group in groups():
            for b in range(len(group)):
                yield from (group.deficit(b, place) for place in range(1, len(group.places)))

    def build(name: str) -> Patcher:
        parsed = parse_variant(name)
        if parsed is None:
            raise ValueError(f"a way to compress must be one of {', '.join(VARIANTS[1:])}; got {name!r}")
        layout, layers, weight = parsed
        made = Patcher(decoder.spec, layout, layers)
        if weight != "none":
            made.weight = make_weight(weight, decoder.engine.text_model, decoder.spec, next(groups()).exact[0][0])
        if layout == "shared":
            made.basis = fit_basis(deficits(), decoder.spec, BASIS_RANK, layers=layers, weight=made.weight)
        return made

    plain.build = build
    return plain


def spelling(rank: int, variant: str) -> str:
    """The arm of a rank and a way to compress."""
    return f"patched:{rank}@{variant}" if variant else f"patched:{rank}"
