"""How deficits are compressed in a run: layout, layers, weight, dtype; and the shared basis where there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save

from ctxwin.files import atomic_write
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.deficit import Deficit
from ctxwin.kv.layout import KVSpec, SpanKV
from ctxwin.kv.lowrank import Weight
from ctxwin.kv.patch import Layers, Layout, Patch, compress
from ctxwin.kv.pooling import fit_basis, project

if TYPE_CHECKING:
    from ctxwin_evals.decoder import Reader

Weighting = Literal["none", "balanced", "output"]
BASIS_RANK = 96


@dataclass
class Patcher:
    """Turns deficits into patches of any rank.

    A sweep over ranks costs one decomposition: the patch of the largest rank so far is kept under its key and cut, as
    truncating the same singular value decomposition would.

    Attributes:
        layout: ``joint``, ``per_layer``, ``quantized`` (in the bytes of joint factors of a rank) or ``shared`` (needs ``basis``).
        weight: measures truncation errors; None for the plain norm.
        basis: directions for ``shared``, of at least the largest rank that will be asked for.
        floor: least rank of a decomposition, so that a sweep is cut from one decomposition in any order.
        build: makes the patchers of other ways to compress, see `variant`; None where there are none.
    """

    spec: KVSpec
    layout: Layout = "joint"
    layers: Layers = "all"
    dtype: torch.dtype = torch.bfloat16
    weight: Weight | None = None
    basis: SharedBasis | None = None
    floor: int = 0
    build: Callable[[str], Patcher] | None = None
    _bases: dict[int, SharedBasis] = field(default_factory=dict)
    _variants: dict[str, Patcher] = field(default_factory=dict)

    def variant(self, name: str) -> Patcher:
        """The patcher of another way to compress, as `parse_variant` reads it; this one for "".

        Cost: on first use, fitting a basis or a weight where the way needs one. Raises ValueError where it cannot be fitted.
        """
        if not name:
            return self
        if name not in self._variants:
            if self.build is None:
                raise ValueError(f"this run has one way to compress, got {name!r}")
            self._variants[name] = self.build(name)
        self._variants[name].floor = self.floor
        return self._variants[name]

    def patch(self, lost: Callable[[], Deficit], rank: int | None, cache: dict[object, Patch], key: object) -> Patch:
        """Return the patch of a deficit at ``rank`` (None: full). ``cache`` is the caller's; ``lost`` is called on a miss."""
        if self.layout == "shared":
            return self._project(lost(), rank)
        if self.layout == "quantized":
            return compress(lost(), self.spec, rank=rank, layers=self.layers, layout="quantized", dtype=self.dtype)
        cached = cache.get(key)
        if cached is not None and rank is not None and rank <= cached.rank:
            return _cut(cached, rank)
        deficit = lost()
        options = {"layers": self.layers, "layout": self.layout, "dtype": self.dtype, "weight": self.weight}
        # Factors that would be dense at the floor are formed at the rank itself.
        for size in dict.fromkeys((rank if rank is None else max(rank, self.floor), rank)):
            patch = compress(deficit, self.spec, rank=size, **options)  # type: ignore[arg-type]
            if not patch.dense and patch.right is not None:
                cache[key] = patch
                return _cut(patch, rank) if rank is not None and rank < patch.rank else patch
        return patch

    def _project(self, lost: Deficit, rank: int | None) -> Patch:
        if self.basis is None:
            raise ValueError("layout 'shared' needs a basis, got none")
        rank = self.basis.rank if rank is None else min(rank, self.basis.rank)
        if rank < 1:  # no directions: the relocated canonical itself
            return compress(lost, self.spec, rank=0, dtype=self.dtype)
        if rank not in self._bases:
            # Directions are ordered by energy, so the first ones are the basis of a smaller rank.
            self._bases[rank] = replace(self.basis, right=self.basis.right[:, :rank].contiguous())
        return project(lost, self._bases[rank], self.spec, weight=self.weight, dtype=self.dtype)

    def basis_bytes(self, rank: int | None) -> int:
        """Bytes of the shared basis at ``rank``, paid once a model; 0 for the other layouts."""
        if self.basis is None:
            return 0
        directions = self.basis.rank if rank is None else min(rank, self.basis.rank)
        return self.basis.nbytes * directions // self.basis.rank


def _cut(patch: Patch, rank: int) -> Patch:
    assert patch.right is not None
    left_factor, right_factor = patch.left[..., :rank].contiguous(), patch.right[:, :rank].contiguous()
    return replace(patch, rank=rank, left=left_factor, right=right_factor, meta={**patch.meta, "cut_from": patch.rank})


def parse_depth(word: str) -> Layers | None:
    """Return the layers of ``deep``, or of ``FIRST-LAST`` in percents of the depth; None for anything else."""
    if word == "deep":
        return "deep"
    ends = [int(end) / 100 for end in word.split("-") if end.isdecimal()]
    return (ends[0], ends[1]) if len(ends) == 2 == len(word.split("-")) and ends[0] < ends[1] <= 1 else None


def parse_variant(name: str) -> tuple[Layout, Layers, Weighting] | None:
    """(layout, layers, weight) of words joined by ``+``, e.g. ``shared+deep``; None for anything else.

    Words: ``joint`` (the default), ``per_layer``, ``quantized`` or ``shared``; ``deep`` or percents of the depth, ``25-100`` say;
    ``balanced`` or ``output``; one each.
    """
    words, choices = name.split("+"), []
    depths = tuple(filter(parse_depth, words))
    for options, default in ((get_args(Layout), "joint"), (depths, "all"), (("balanced", "output"), "none")):
        some = [word for word in words if word in options]
        if len(some) > 1:
            return None
        choices.append(some[0] if some else default)
    if len(words) != sum(word in words for word in choices):
        return None
    return choices[0], parse_depth(choices[1]) or "all", choices[2]  # type: ignore[return-value]


def fitted(
    decoder: Reader,
    way: tuple[Layout, Layers, Weighting],
    groups: Callable[[], Iterator[Any]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    keep: Path | None = None,
    name: str = "",
    rank: int = BASIS_RANK,
) -> Patcher:
    """The patcher of a way to compress (layout, layers, weight, see `parse_variant`), and of all its variants.

    Args:
        decoder: the model.
        way: to compress.
        groups: contexts of their own (`Group`), on which weights and shared bases are fitted when they are first asked for.
        dtype: of the factors.
        keep: folder in which a shared basis is looked for first, and then kept; None fits it anew.
        name: of the variant.
        rank: directions of a shared basis.
    """
    layout, layers, weight = way
    patcher = Patcher(decoder.spec, layout, layers, dtype)
    if weight != "none":
        patcher.weight = make_weight(
            weight, getattr(decoder.engine, "text_model", None), decoder.spec, next(groups()).exact[0][0]
        )
    if layout == "shared":
        path = None if keep is None else keep / ("-".join(["basis", *filter(None, name.split("+"))]) + ".safetensors")
        patcher.basis = _basis(patcher, groups, path, rank)

    def build(name: str) -> Patcher:
        way = parse_variant(name)
        if way is None:
            raise ValueError(f"a way to compress must be a layout, deep and a weight joined by +, got {name!r}")
        return fitted(decoder, way, groups, dtype=dtype, keep=keep, name=name, rank=rank)

    patcher.build = build
    return patcher


def _basis(patcher: Patcher, groups: Callable[[], Iterator[Any]], path: Path | None, rank: int) -> SharedBasis:
    if path is not None and path.exists():
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            return SharedBasis.from_tensors(tensors, json.loads(file.metadata()["basis"]))
    deficits = (lost for group in groups() for lost in group.deficits())
    basis = fit_basis(deficits, patcher.spec, rank, layers=patcher.layers, weight=patcher.weight, dtype=patcher.dtype)
    if path is not None:
        atomic_write(path, save(basis.tensors(), metadata={"basis": json.dumps(basis.describe())}))
    return basis


def make_weight(kind: Weighting, text_model: Any, spec: KVSpec, sample: SpanKV) -> Weight:
    """How a run measures truncation errors.

    ``balanced`` counts keys and values alike in every layer. ``output`` measures values by what the output projection
    makes of them (the Cholesky factor of ``W_O W_O^T`` per KV head) and keys balanced against them.

    Raises ValueError for another kind, or for ``output`` on latent attention or on vLLM.
    """
    if kind == "balanced":
        return Weight.balanced(sample)
    if kind != "output":
        raise ValueError(f"weight must be balanced or output, got {kind!r}")
    if spec.family == "mla" or text_model is None:
        raise ValueError("weight 'output' reads a model's output projections by head, got latent attention, or vLLM")
    factors = []
    for layer in text_model.layers:
        projection = layer.self_attn.o_proj.weight.detach().cpu().double()
        # Columns of W_O belong to query heads; those of one group read the same values.
        by_group = projection.view(projection.shape[0], spec.heads, -1, spec.v_dim).permute(1, 2, 0, 3)
        gram = torch.einsum("hgod,hgoe->hde", by_group, by_group)
        gram = gram + 1e-6 * gram.diagonal(dim1=1, dim2=2).mean() * torch.eye(spec.v_dim, dtype=torch.float64)
        factors.append(torch.linalg.cholesky(gram))
    v = torch.stack(factors).float()
    # Keys act through the softmax on values of this size; a key error counts like a value error of the same share.
    values = torch.einsum("lthd,lhde->lthe", sample.v.float(), v)
    size = values.pow(2).mean(dim=(1, 2, 3)).sqrt() / sample.k.float().pow(2).mean(dim=(1, 2, 3)).sqrt()
    return Weight(k=size[:, None, None].expand(spec.layers, spec.heads, spec.k_dim).contiguous(), v=v)
