"""Loading spans: patch, rotate and line up what an engine is about to write into its cache, one layer at a time."""

from collections.abc import Sequence
from typing import Any

import torch

from ctxwin.kv.kernels.choice import Kernel, choose, load_class
from ctxwin.kv.kernels.parts import SpanSlice
from ctxwin.kv.kernels.strides import CacheStrides
from ctxwin.kv.layout import KVSpec
from ctxwin.kv.rows import Pair


class LoadPlan:
    """The KV of a run of parts as it is served, layer by layer: ``R(start) (K0 + dK)``, ``V0 + dV`` (Kamera, eq. 1).

    Exactness is `apply_patch`'s and `relocate`'s: keys turn once, by the float64 difference of the engine's own angles;
    cosine and sine are float64; arithmetic is float32 (float64 for float64 spans); the result is rounded once, to
    ``dtype``. A patch that does not cover a layer adds nothing there.

    Args:
        parts: what stands one behind the other in the prompt, at least one.
        spec: layout of the whole model.
        dtype: dtype that is served, that of the engine's cache.
        device: where the result is wanted; spans and patches may lie elsewhere. Only ``cpu`` is tested.
        heads: the KV heads to serve (a tensor-parallel rank's share); None is all of them.
        kernel: which implementation; None is what `choose` takes for the device. ``cpu`` stands in for
            ``llvm`` where that does not take the parts (float64).

    Attributes:
        kernel: the implementation.
        tokens: tokens of all parts.
        layers: layers of the model; launched: those that `store` writes at once.
        nbytes: bytes that are served, over all layers.

    Raises:
        ValueError: parts that do not fit the spec or their patch, no parts, no heads, an unknown kernel.
        Cost: one pass over the angles; the layers are computed when they are asked for.
    """

    def __init__(
        self,
        parts: Sequence[SpanSlice],
        spec: KVSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        heads: slice | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        if not parts:
            raise ValueError("parts must hold at least one part, got none")
        for part in parts:
            part.validate(spec)
        first, last, step = (heads or slice(None)).indices(spec.heads)
        if step != 1 or first >= last:
            raise ValueError(f"heads must be a slice of some of {spec.heads} KV heads without a step, got {heads}")
        self.tokens = sum(part.tokens for part in parts)
        self.layers, self._dtype = spec.layers, dtype
        self.nbytes = self.layers * self.tokens * (last - first) * (spec.k_dim + spec.v_dim) * dtype.itemsize
        device = torch.device(device)
        self.kernel = choose(spec, dtype, device, last - first, kernel)
        if self.kernel == "llvm":
            from ctxwin.kv.kernels.llvm_kernel import fits

            self.kernel = "llvm" if fits(parts, spec, dtype, device) else "cpu"
        make = load_class(self.kernel)
        self._kernel: Any = make(tuple(parts), spec, dtype=dtype, device=device, heads=(first, last))
        self.launched = int(getattr(self._kernel, "launched", self.layers))

    def layer(self, i: int) -> Pair:
        """``(k [T, H, k_dim], v [T, H, v_dim])`` of layer ``i``, contiguous.

        They are valid until the next call but one, which may write over them, so that a layer can be computed while
        the one before is used; they must not be written to: what needs no work may be a view of the stored span. Any
        order of layers will do.

        Raises:
            IndexError: a layer out of range. Cost: about one read and one write of the layer; with a patch also one
            ``[T, m] @ [m, W]`` product.
        """
        self._check(i)
        pair: Pair = self._kernel.layer(i)
        return pair

    @property
    def stores(self) -> bool:
        """True if `store` can be called: the kernel writes into paged caches itself."""
        return hasattr(self._kernel, "store")

    def store(self, first: int, caches: Sequence[torch.Tensor], strides: CacheStrides, slots: torch.Tensor) -> None:
        """Write layers straight into slots of their paged caches; the numbers are those of `layer`.

        Args:
            first: the first layer; any order will do.
            caches: the paged cache of this layer and of each that follows it, on the device and of the dtype that is served.
            strides: where the numbers of a slot lie in each of them.
            slots: int64 ``[T]``, on the device; each must lie within the caches.

        Raises:
            IndexError: a layer out of range. ValueError: no cache, another dtype, device or number of slots.
            Cost: one read of the layers and one write, and the patch's products.
        """
        if not caches:
            raise ValueError("caches must hold at least one layer's, got none")
        self._check(first)
        self._check(first + len(caches) - 1)
        for cache in caches:
            if cache.dtype != self._dtype or len(slots) != self.tokens or cache.device != slots.device:
                raise ValueError(
                    f"cache must hold {self._dtype} and there must be {self.tokens} slots on its device, got {cache.dtype} on "
                    f"{cache.device} and {len(slots)} on {slots.device}"
                )
        self._kernel.store(first, caches, strides, slots)

    def _check(self, i: int) -> None:
        if not 0 <= i < self.layers:
            raise IndexError(f"layer must be in [0, {self.layers}), got {i}")
