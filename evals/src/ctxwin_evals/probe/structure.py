"""The shape of what blind reuse loses: by layer, by channel, and in how many directions (Kamera, section 4)."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.relocate import relocation_error
from ctxwin_evals.group import Group

ENERGY = 0.9
CLOSED = 0.95
"""A rank is enough where it closes this share of what the largest one closes."""


def shape(groups: Iterable[Group], spec: KVSpec) -> dict[str, Any]:
    """Relative norm of the deficit by layer and the number of directions that hold 90 % of its energy.

    ``rope`` and ``content`` are the two channels of a layer (keys and values; for latent attention its rope keys and the
    latent). Norms pool all chunks after at least one other; ranks are means over them.
    """
    lost, base = ({name: np.zeros(spec.layers) for name in ("rope", "content")} for _ in range(2))
    joint, single, tokens, errors = [], [], [], []
    for group in groups:
        for b, place in product(range(len(group)), range(1, len(group.places))):
            deficit, canonical = group.deficit(b, place), group.canonical[b][place]
            for name, part, whole in (("rope", deficit.k, canonical.k), ("content", deficit.v, canonical.v)):
                lost[name] += _energy(part)
                base[name] += _energy(whole)
            ranks = energy_ranks(deficit)
            joint.append(ranks[0])
            single.append(ranks[1])
            tokens.append(deficit.tokens)
            errors.append(relocation_error(canonical, group.exact[b][place], spec))
    both = (lost["rope"] + lost["content"]) / (base["rope"] + base["content"])
    return {
        "chunks": len(joint),
        "tokens": float(np.mean(tokens)),
        "relative_norm": np.sqrt(both).tolist(),
        **{f"relative_norm_{name}": np.sqrt(lost[name] / base[name]).tolist() for name in lost},
        "energy": ENERGY,
        "energy_rank_joint": float(np.mean(joint)),
        "energy_rank_by_layer": np.mean(single, 0).tolist(),
        "relocation_error": max(errors),
    }


def energy_ranks(deficit: Deficit, share: float = ENERGY) -> tuple[int, list[int]]:
    """Directions that hold ``share`` of the energy: in all layers side by side, and in each layer; 0 where it has no energy.

    Layers whose deficit is arithmetic noise count as having none. Cost: an SVD of each, without vectors.
    """
    layers = range(deficit.k.shape[0])
    covered = deficit.covered(tuple(layers))
    single = [_directions(deficit.matrix(layer), share) if layer in covered else 0 for layer in layers]
    if not covered:
        return 0, single
    return _directions(torch.cat([deficit.matrix(layer) for layer in covered], 1), share), single


def functional_rank(
    ranks: Sequence[int], kls: np.ndarray, blind: np.ndarray, clusters: Sequence[str]
) -> dict[str, Any] | None:
    """Smallest rank on the plateau of the divergence (Kamera, section 4 and appendix C.2).

    Args:
        ranks: ascending.
        kls: ``[ranks, n]``, divergence to re-prefill.
        blind: ``[n]``, the same without a patch.
        clusters: of the n questions.

    Returns ``{"rank", "ci95", "plateau"}``: the rank that closes `CLOSED` of what the largest one closes, its interval over
    draws of whole clusters, and the share of the blind divergence that the largest one leaves. None where blind reuse loses
    nothing to speak of.
    """
    if float(blind.mean()) <= 0 or float(kls[-1].mean()) >= float(blind.mean()):
        return None
    names = sorted(set(clusters))
    member = np.array([[c == name for c in clusters] for name in names], dtype=np.float64)
    draws = np.random.default_rng(0x72616E6B).multinomial(len(names), np.full(len(names), 1 / len(names)), size=500)
    weights = np.concatenate([np.ones((1, len(clusters))), draws @ member])
    means, without = weights @ kls.T, weights @ blind
    closed = (without[:, None] - means) / np.maximum(without - means[:, -1], 1e-30)[:, None]
    plateaus = np.array(ranks)[(closed >= CLOSED).argmax(1)]
    low, high = np.quantile(plateaus[1:], [0.025, 0.975], method="nearest")
    return {"rank": int(plateaus[0]), "ci95": [int(low), int(high)], "plateau": float(kls[-1].mean() / blind.mean())}


def _directions(matrix: torch.Tensor, share: float) -> int:
    values = torch.linalg.svdvals(matrix.double()).square()
    return int((values.cumsum(0) / values.sum() < share).sum()) + 1


def _energy(x: torch.Tensor) -> np.ndarray:
    return np.asarray(x.flatten(1).double().square().sum(1).cpu())
