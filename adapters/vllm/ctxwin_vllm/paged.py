"""Writing and reading token slots of vLLM's paged KV cache, whatever its packing.

Attention backends pack a block as their kernels need it (transposed keys, tiles, keys and values in one tensor), and the
packing depends on the instruction set. Writing therefore goes through the backend's own ``do_kv_cache_update``, which every
backend has. There is no reading counterpart, so `PagedKV` learns the packing once: it writes the index of each number into a
scratch block, in digits that the cache dtype represents exactly, and inverts the permutation.

Most packings have constant strides, as in FlashAttention, FlashInfer, Triton and most of a CPU's. There slots are read through
strided views, and a load kernel that can write slots itself does so: keys and values then go straight from where they are
computed to where they stay. Other packings, such as tiles, are read by the permutation and written by the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ctxwin.errors import UnsupportedModel
from ctxwin.kv.kernels import CacheStrides, Kernel, LoadPlan, SpanSlice, choose
from ctxwin.kv.kernels.choice import fault_of, report, trial
from ctxwin.kv.kernels.load_stream import LoadStream
from ctxwin.kv.kernels.staging import to_device
from ctxwin.kv.kernels.strides import Shape
from ctxwin.kv.layout import KVSpec, SpanOrigin
from ctxwin.kv.rows import Pair, from_rows, layer_kinds, to_rows
from ctxwin_vllm.resident import OnDrop, ResidentSpans, Selection

_BASE = 128  # digits 0..127 are exact in bfloat16 (8 bits of mantissa) as in every wider dtype
_SHARED = "kv_sharing_target_layer_name"
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Quantised caches that spans follow, by vLLM's ``kv_cache_dtype``: one scale a layer for keys and one for values, from
the checkpoint. A span holds the dequantised numbers in the model's dtype, so KV that is loaded where it was computed is equal to
the bit; keys that move are rotated in that dtype and rounded once more."""

STREAMS: dict[torch.device, LoadStream] = {}  # which all engines of a process share: they step in turn


class PagedKV:
    """The paged cache of one engine.

    Args:
        layers: attention layers by name, as in ``compilation_config.static_forward_context``.
        kv: layout of the model's KV.
        block_size: tokens in a block, as the scheduler counts them.
        kernel: the load kernel; None is what `choose` takes for the cache's device.
        first: number of layers that earlier stages of a pipeline cache.

    Attributes:
        kv: layout of the KV that is cached here; of a rank, its own layers and heads only.
        layers: the attention layers that have a cache, in order.
        sharing_layers: layers that read the cache of another layer.
        shapes: shape of each layer's KV.
        kernel: the load kernel.
        reads_at_once: True if one launch of Triton's reads all layers; else torch's operators read each.
        loads: the order of loads and forwards on the cache's device.
        resident: copies of spans in the device's memory, for later loads; None where none are kept.

    Raises:
        UnsupportedModel: a cache that cannot be read back exactly; the message names the property. Cost: some
        seconds, in which load kernels are compiled and tried.
    """

    def __init__(
        self, layers: Mapping[str, Any], kv: KVSpec, block_size: int, kernel: Kernel | None = None, first: int = 0
    ) -> None:
        self.kv = kv
        self._first = first
        self.sharing_layers = [layer for layer in layers.values() if getattr(layer, _SHARED, None)]
        indexed = _attention_layers(layers, kv.recurrent)
        self._names, self.layers = [name for name, _ in indexed], [layer for _, layer in indexed]
        self.block_size = block_size
        kinds = layer_kinds(kv) if kv.in_rows else []
        shape = (kv.heads, kv.k_dim, kv.v_dim)
        self.shapes: list[Shape] = [(k.heads, k.head_dim, k.head_dim) for k in kinds] or [shape] * kv.layers
        if len(self.layers) != len(self.shapes):
            raise UnsupportedModel(
                f"the cache must have one attention layer per decoder layer ({len(self.shapes)}), got {len(self.layers)}; "
                "models with layers of other kinds cannot be served from spans"
            )
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            self._check_layer(layer, shape)
        self.dtype: torch.dtype = getattr(torch, kv.dtype)
        self._fp8 = FP8.get(self.layers[0].kv_cache_dtype)
        self._base = _BASE if self._fp8 is None else 8  # 0..7 are exact in E5M2, too
        self.device: torch.device = self.layers[0].kv_cache.device
        self.loads = STREAMS.setdefault(self.device, LoadStream(self.device))
        self._gathers: dict[Shape, torch.Tensor] = {}
        self._found_strides: dict[Any, CacheStrides | None] = {}
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            if shape not in self._gathers:
                self._gathers[shape] = self._probe(layer, shape)
        self.kernel = choose(kv, self.dtype, self.device, kernel=kernel)
        self.resident = ResidentSpans(self.device, range(first, first + kv.layers)) if self.kernel == "triton" else None
        self._strides = self._find_strides() if self.kernel in ("llvm", "triton") and self._fp8 is None else None
        self.reads_at_once = self.kernel == "triton" and self._works("read", self._trial_read)

    @property
    def direct(self) -> bool:
        """True if the load kernel itself writes spans into their slots."""
        return self._strides is not None

    def _check_layer(self, layer: Any, shape: Shape) -> None:
        cache = layer.kv_cache
        per_token = shape[0] * (shape[1] + shape[2])
        unquantised = cache.dtype == getattr(torch, self.kv.dtype) and layer.kv_cache_dtype in ("auto", self.kv.dtype)
        if not unquantised and not (layer.kv_cache_dtype in FP8 and cache.itemsize == 1):
            raise UnsupportedModel(
                f"kv_cache_dtype must be the model's own dtype ({self.kv.dtype}) or {', '.join(FP8)}, got "
                f"{layer.kv_cache_dtype!r} ({cache.dtype})"
            )
        if cache[0].numel() != self.block_size * per_token:
            tokens, got = self.block_size, tuple(cache.shape)
            raise UnsupportedModel(f"a cache block must hold {tokens} tokens of {per_token} numbers, got {got}")

    def slots(self, blocks: Sequence[int], begin: int, end: int) -> torch.Tensor:
        """Return the slot of each token ``[begin, end)`` of a request that owns ``blocks``: int64 ``[end - begin]``."""
        block, offset = np.divmod(np.arange(begin, end), self.block_size)
        return torch.from_numpy(np.array(blocks, dtype=np.int64)[block] * self.block_size + offset)

    def write(self, plan: LoadPlan, slots: torch.Tensor) -> int:
        """Write spans layer by layer, so that each layer's work stays in the CPU's cache; return the bytes written.

        Args:
            plan: as many tokens as there are slots, in the cache's dtype, on its device; else ValueError. Only the layers
                that are cached here are written.
            slots: int64 ``[T]``.
        """
        end = self._first + self.kv.layers
        if plan.tokens != len(slots) or plan.layers < end:
            raise ValueError(
                f"spans must fill {len(slots)} slots of {end} layers, got {plan.tokens} tokens of {plan.layers}"
            )
        slots = to_device(slots, self.device)
        if self._strides is not None and plan.stores:
            caches = [layer.kv_cache for layer in self.layers]
            for strides, alike in groupby(range(len(caches)), self._strides.__getitem__):
                numbers = list(alike)
                for at in range(0, len(numbers), plan.launched):
                    some = numbers[at : at + plan.launched]
                    write = partial(plan.store, self._first + some[0], [caches[i] for i in some], strides, slots)
                    self.loads.queue(write, [self._names[i] for i in some])
            return plan.nbytes
        rows = (plan.layer(i) for i in range(self._first, end))
        pairs = from_rows(self.kv, lambda _: next(rows))
        for name, layer, (k, v) in zip(self._names, self.layers, pairs, strict=True):
            self.loads.queue(partial(_update, layer, k, v, layer.kv_cache, slots), [name])
        return plan.nbytes

    def clear(self, block: int) -> None:
        """Zero one block."""
        for layer in self.layers:
            layer.kv_cache[block].zero_()

    def plan(self, parts: Sequence[SpanSlice], kv: KVSpec, heads: slice | None) -> LoadPlan:
        """Return the argument of `write` for parts of the whole model's layout ``kv``, of which this cache has ``heads``."""
        if self.resident is not None:
            parts = self.resident.attach(parts, heads)
        return LoadPlan(parts, kv, dtype=self.dtype, device=self.device, heads=heads, kernel=self.kernel)

    def keep(self, origin: SpanOrigin, k: torch.Tensor, v: torch.Tensor, on_drop: OnDrop = None) -> bool:
        """Keep what was `read` of a span on the device, for later loads; see `ResidentSpans.keep`."""
        if self.resident is None:
            return False
        # Once they are dropped, their memory stays until loads have read them.
        for x in (k, v) if self.device.type == "cuda" else ():
            x.record_stream(self.loads.stream)
        return self.resident.keep(origin, k, v, on_drop)

    def select(self, origin: SpanOrigin, selection: Selection) -> SpanOrigin | None:
        """Keep what is selected of a copy; return its origin, or None where the copy is gone or there is no room."""
        copy, selected = None if self.resident is None else self.resident.get(origin), SpanOrigin()
        kept = copy is not None and self.keep(selected, *selection.apply(copy.k, copy.v, copy.first))
        return selected if kept else None

    def read(self, blocks: Sequence[int], begin: int, end: int) -> Pair:
        """Return KV of the tokens ``[begin, end)`` of a request that owns ``blocks``.

        Returns:
            ``(k, v)``, each ``[layers, end - begin, heads, dim]``, new on the cache's device, side by side where one launch reads
            both; another stream must wait for this one (`LoadStream.event`). Cost: a copy of the numbers, or two layer by layer.
        """
        if not 0 <= begin < end or end > len(blocks) * self.block_size:
            raise ValueError(f"tokens [{begin}, {end}) must be non-empty and lie in {len(blocks)} blocks")
        if self.reads_at_once:
            k, v = self._read_layers([layer.kv_cache for layer in self.layers], blocks, begin, end)
            if self._fp8 is None:
                return k, v
            pairs: Iterable[Pair] = zip(k, v, strict=True)
        else:
            slots = self._places(to_device(self.slots(blocks, begin, end), self.device))
            pairs = (self._read_slots(*cache, slots) for cache in self._caches())
        layers = zip(self.layers, pairs, strict=True)  # one by one: what is copied twice stays in the CPU's cache
        return to_rows(self.kv, (self._dequantise(layer, *pair) for layer, pair in layers))

    def _read_layers(self, caches: Sequence[torch.Tensor], blocks: Sequence[int], begin: int, end: int) -> Pair:
        from ctxwin.kv.kernels.triton_kernel import read_layers

        strides = self._strides_of(caches[0], self.shapes[0])
        assert strides is not None
        return read_layers(caches, strides, self.shapes[0], blocks, begin, end)

    def _trial_read(self) -> str | None:
        """Return a fault of Triton's kernel in scattered blocks of a scratch cache, which torch's operators read as well."""
        alike = {self._strides_of(*cache) for cache in self._caches()}
        if self.kv.in_rows or None in alike or len(alike) > 1:
            return "its layers are not packed alike, in constant strides"
        scratch, size = torch.empty_like(self.layers[0].kv_cache[:2]), self.block_size
        scratch.view(torch.uint8).random_(generator=torch.Generator(self.device).manual_seed(0))
        begin, end = 3 * size // 4, 2 * size - 1
        places = self._places(self.slots([1, 0], begin, end).to(self.device))
        pairs = self._read_layers([scratch], [1, 0], begin, end), self._read_slots(scratch, self.shapes[0], places)
        same = all(torch.equal(x[0].view(torch.uint8), y.view(torch.uint8)) for x, y in zip(*pairs, strict=True))
        return None if same else "it reads other numbers than lie there"

    def _works(self, act: str, check: Callable[[], str | None]) -> bool:
        """Return True if ``check`` finds no fault in an act of the load kernel's; else report the fault."""
        if (fault := fault_of(check)) is not None:
            report(f"the {self.kernel} load kernel does not {act} the paged cache itself on {self.device}: {fault}")
        return fault is None

    def _caches(self) -> Iterator[tuple[torch.Tensor, Shape]]:
        return zip((layer.kv_cache for layer in self.layers), self.shapes, strict=True)

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block of each slot, and its place there."""
        return slots // self.block_size, slots % self.block_size

    def _read_slots(self, cache: torch.Tensor, shape: Shape, places: Pair) -> Pair:
        """Return the numbers in slots, given by `_places`, of a layer's cache: new ``k [slots, H, k_dim]`` and ``v``."""
        size, (heads, k_dim, v_dim) = self.block_size, shape
        (blocks, offsets), strides = places, self._strides_of(cache, shape)
        if strides is not None:
            k, v = (
                cache.as_strided((len(cache), size, heads, dim), steps, cache.storage_offset() + first)
                for dim, (first, *steps) in ((k_dim, strides.k), (v_dim, strides.v))
            )
        else:
            index, blocks = torch.unique_consecutive(blocks, return_inverse=True)
            numbers = cache[index].reshape(len(index), -1)[:, self._gathers[shape]]
            keys, values = torch.split(numbers, [size * heads * k_dim, size * heads * v_dim], dim=1)
            k, v = keys.view(-1, size, heads, k_dim), values.view(-1, size, heads, v_dim)
        return k[blocks, offsets], v[blocks, offsets]

    def _dequantise(self, layer: Any, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """Return the numbers of a cache in the model's dtype; those of an unquantised one unchanged."""
        if self._fp8 is None:
            return k, v
        scales = (layer._k_scale_float, layer._v_scale_float)
        return tuple((x.view(self._fp8).float() * s).to(self.dtype) for x, s in zip((k, v), scales, strict=True))

    def _probe(self, layer: Any, shape: Shape) -> torch.Tensor:
        """Return the place of each number of (k, v) within a block: int64 ``[block_size * heads * (k_dim + v_dim)]``.

        Raises UnsupportedModel where the packing is not the same permutation for every block.
        """
        (heads, k_dim, v_dim), size = shape, self.block_size
        scratch = torch.zeros_like(layer.kv_cache[:2])
        keys, total = size * heads * k_dim, scratch[0].numel()
        digits, base = 1, self._base
        while base**digits < total:
            digits += 1
        indices = torch.zeros(2, total, dtype=torch.int64, device=scratch.device)
        numbers = torch.arange(total, device=scratch.device)
        for digit in range(digits):
            value = (numbers // base**digit % base).to(self.dtype)
            k = value[:keys].reshape(size, heads, k_dim)
            v = value[keys:].reshape(size, heads, v_dim)
            if self._fp8 is not None:
                k, v = k * layer._k_scale_float, v * layer._v_scale_float
            for block in range(2):
                slots = torch.arange(size, device=scratch.device) + block * size
                _update(layer, k, v, scratch, slots)
            digits_read = scratch if self._fp8 is None else scratch.view(self._fp8).float()
            indices += digits_read.reshape(2, total).to(torch.int64) * base**digit
        if not torch.equal(indices[0], indices[1]) or not torch.equal(indices[0].sort().values, numbers):
            raise UnsupportedModel(
                f"the cache packing of attention backend {type(layer.impl).__name__} is not a permutation within a "
                "block; spans cannot be read back from it: choose another attention backend"
            )
        gather = torch.empty_like(numbers)
        gather[indices[0]] = numbers
        self._gathers[shape] = gather
        self._round_trip(layer, scratch, shape)
        return gather

    def _round_trip(self, layer: Any, scratch: torch.Tensor, shape: Shape) -> None:
        """Write tokens at scattered slots, as real loads do, and check that they are read back bit for bit."""
        (heads, k_dim, v_dim), size = shape, self.block_size
        noise = torch.Generator().manual_seed(0)
        scratch.zero_()
        slots = torch.randperm(2 * size, generator=noise)
        k = torch.randn(2 * size, heads, k_dim, generator=noise).to(self.device, self.dtype)
        v = torch.randn(2 * size, heads, v_dim, generator=noise).to(self.device, self.dtype)
        if self._fp8 is not None:  # only numbers that the cache can represent come back to the bit
            k, v = ((x.float() / s).to(self._fp8) for x, s in ((k, layer._k_scale_float), (v, layer._v_scale_float)))
            k, v = self._dequantise(layer, k.view(torch.uint8), v.view(torch.uint8))
        step = 2 * size // 3
        for at in range(0, 2 * size, step):
            part = slots[at : at + step]
            _update(layer, k[part], v[part], scratch, part.to(scratch.device))
        every = torch.arange(2 * size, device=self.device)
        got_k, got_v = self._dequantise(layer, *self._read_slots(scratch, shape, self._places(every)))
        if not (torch.equal(got_k, k) and torch.equal(got_v, v)):
            backend = type(layer.impl).__name__
            raise UnsupportedModel(
                f"attention backend {backend} does not return the KV that was written into its cache"
            )

    def _find_strides(self) -> list[CacheStrides] | None:
        """Return each layer's packing as constant strides; None unless all have them and the load kernel writes by them."""
        per_layer = [self._strides_of(*cache) for cache in self._caches()]
        strides = [layer for layer in per_layer if layer is not None]
        if len(strides) < len(per_layer) or self.block_size < 8:
            return None
        # All in a block and a half, so that two blocks of the scratch cache hold it.
        tokens = (self.block_size, self.block_size // 4 + 1, self.block_size // 4 + 1)
        check = partial(trial, self._scratch_kernel, self.kv, self.dtype, self.device, tokens)
        return strides if self._works("write", check) else None

    def _strides_of(self, cache: torch.Tensor, shape: Shape) -> CacheStrides | None:
        key = shape, cache.shape[1:], cache.stride()
        if key not in self._found_strides:
            heads, *dims = shape
            gathers, block = self._gathers[shape], self.block_size
            self._found_strides[key] = CacheStrides.find(cache, gathers, block, heads, (dims[0], dims[1]))
        return self._found_strides[key]

    def _scratch_kernel(self, parts: Sequence[SpanSlice], spec: KVSpec, **options: Any) -> Any:
        """Return a kernel whose layers go through scattered slots of a scratch cache, packed like the first layer's."""
        plan = LoadPlan(parts, spec, dtype=options["dtype"], device=options["device"], kernel=self.kernel)
        # A block as it is usually filled, then scattered slots.
        rest = torch.randperm(self.block_size, generator=torch.Generator().manual_seed(0)) + self.block_size
        slots = torch.cat([torch.arange(self.block_size), rest])[: plan.tokens]

        def layer(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            scratch = torch.zeros_like(self.layers[0].kv_cache[:2])
            strides = self._strides_of(scratch, self.shapes[0])
            assert strides is not None
            plan.store(i, [scratch], strides, slots.to(self.device))
            return self._read_slots(scratch, self.shapes[0], self._places(slots.to(self.device)))

        return SimpleNamespace(layer=layer)


def _update(layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    if hasattr(layer, "kv_lora_rank"):  # latent attention: c_KV is our content channel, k_pe the rope channel
        layer.impl.do_kv_cache_update(v[:, 0], k, cache, slots, layer.kv_cache_dtype, layer._k_scale)
    else:
        layer.impl.do_kv_cache_update(layer, k, v, cache, slots)


def _attention_layers(layers: Mapping[str, Any], hybrid: bool) -> list[tuple[str, Any]]:
    """Return name and decoder attention layer, of those that have a cache, by index; a hybrid's other layers have states."""
    indexed = []
    for name, layer in layers.items():
        cache = getattr(layer, "kv_cache", None)
        if getattr(layer, _SHARED, None):
            continue  # its cache is another layer's
        if cache is None or (isinstance(cache, torch.Tensor) and cache.numel() == 0):
            continue  # an encoder's layer
        if hybrid and isinstance(cache, tuple):
            continue  # see `paged_states`
        if not isinstance(cache, torch.Tensor) or not hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
            # A recurrent state, a sparse indexer's keys: they would not move with the KV.
            got = f"{type(layer).__name__} at {name!r}"
            raise UnsupportedModel(f"all of a model's caches must be attention KV, got {got}; it would not move")
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1:
            raise UnsupportedModel(f"an attention layer's name must hold its index once, got {name!r}")
        indexed.append((numbers[0], name, layer))
    return [(name, layer) for _, name, layer in sorted(indexed, key=lambda item: item[0])]
