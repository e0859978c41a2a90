"""Data types of KV: the layout of a model's cache (`KVSpec`) and the tensors of one token span (`SpanKV`).

Every attention family is read through one split into a *rope* channel, which relocation rotates, and a *content*
channel, which it never touches (seed: Kamera, section 3, "One mechanism for MLA, GQA, and MHA"):

| family   | ``k`` (rope channel)             | ``v`` (content channel)        |
|----------|----------------------------------|--------------------------------|
| gqa, mha | keys ``[L, T, H_kv, D]``         | values ``[L, T, H_kv, D_v]``   |
| mla      | decoupled ``k_pe [L, T, 1, D_r]``| latent ``c_KV [L, T, 1, rank]``|

With partial rotary embedding only the first ``rotary_dim`` of the key's last axis turns.

Where layers differ in their heads (Gemma 4), all of a layer's heads stand side by side in one or more *rows* of one width, the
last one filled up with zeros: ``[rows, T, 1, width]`` (`ctxwin.kv.rows`). All but an engine's own cache sees rows as layers.

In a hybrid some layers keep no KV but a state of everything so far (Gated DeltaNet: a matrix a head, and the last inputs of a
convolution). Such a span also holds the states behind its last token. They have no positions, and are of all that stood in front:
a state is right only where exactly that stands in front again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Family = Literal["gqa", "mha", "mla"]
_OUTPUT = "output."
_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class RopeSpec:
    """How a model turns positions into angles.

    Attributes:
        inv_freq: final inverse frequencies ``[rotary_dim / 2]``, after any composing scaling (YaRN, Llama-3, linear).
        rotary_dim: how many of the key's last-axis dimensions turn.
        pairing: ``half`` pairs dimension i with i + rotary_dim/2 (NeoX), ``interleaved`` pairs 2i with 2i + 1 (GPT-J).
        sections: M-RoPE section sizes over the ``rotary_dim / 2`` frequencies for (t, h, w); None for one-axis RoPE.
        mrope_interleaved: frequencies cycle t, h, w, t, h, w, ... (Qwen3-VL) instead of standing in three blocks.
        magnitude: factor on cos and sin (YaRN's attention scaling); it cancels under relocation.
    """

    inv_freq: tuple[float, ...]
    rotary_dim: int
    pairing: Literal["half", "interleaved"] = "half"
    sections: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    magnitude: float = 1.0


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that turn alike.

    Attributes:
        layers: their numbers, ascending.
        rope: how they turn positions into angles.
        heads: KV heads of such a layer, where layers differ in that and ``layers`` counts rows; 0 elsewhere.
        head_dim: numbers of a key, and of a value, of such a head.
    """

    layers: tuple[int, ...]
    rope: RopeSpec
    heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True)
class KVSpec:
    """The layout of one model's KV cache.

    Attributes:
        identity: digest of everything that makes KV of this model interchangeable (name, weights, dtype, rope, ...).
        layers: those that keep KV.
        rope: how keys turn; of the first layer, where there are `kinds`.
        dtype: name of the dtype that KV is served in, e.g. ``bfloat16``.
        state_bytes: of the states of recurrent layers behind a token; 0 for a model that has none.
        maps: whether a span also has its map on them, so that it may stand behind others (`ctxwin.kv.states`).
        kinds: the layers by how they turn, where they do not all turn alike (Gemma 3: sliding layers and others); else empty.
    """

    identity: str
    family: Family
    layers: int
    heads: int
    k_dim: int
    v_dim: int
    rope: RopeSpec
    dtype: str
    state_bytes: int = 0
    maps: bool = False
    kinds: tuple[LayerKind, ...] = ()

    @property
    def alike(self) -> tuple[LayerKind, ...]:
        """All layers by how they turn: `kinds`, or a single one."""
        return self.kinds or (LayerKind(tuple(range(self.layers)), self.rope),)

    @property
    def in_rows(self) -> bool:
        """True if layers differ in their heads, so that a layer here is a row of one; see `ctxwin.kv.rows`."""
        return any(kind.heads for kind in self.kinds)

    @property
    def recurrent(self) -> bool:
        """True if some of its layers keep a state in place of KV."""
        return self.state_bytes > 0

    @property
    def width(self) -> int:
        """Numbers per token over all layers, rope and content channel together."""
        return self.layers * self.heads * (self.k_dim + self.v_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV as it is served."""
        return self.span_bytes(1, _ITEMSIZE.get(self.dtype, 2))

    def span_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of a span's KV; two bytes a number (bf16) unless told otherwise."""
        return tokens * self.width * itemsize


class SpanOrigin:
    """An object that all copies of one span share: equal numbers, wherever they lie. It names nothing but itself."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True)
class SpanKV:
    """The KV of one contiguous span of tokens.

    Attributes:
        k: rope channel ``[L, T, H, k_dim]``, rotated at ``positions + start``.
        v: content channel ``[L, T, H, v_dim]``.
        positions: int64 ``[3, T]``, M-RoPE coordinates (t, h, w) relative to the span's own origin; text and
            one-axis models have three equal rows.
        start: the position at which the keys are rotated now; 0 is the canonical frame.
        outputs: what else the forward gave for each token, ``[T, ...]`` by name, where the engine keeps it, see
            `ctxwin.engines.outputs`; and a speculative drafter's KV.
        states: of recurrent layers behind the last token, by name; empty in a part that ends earlier.
        blob: the checked bytes (`ctxwin.store.codec`) that the tensors are views of, where a store read them. It can be
            handed on as it is; a span made from another one has none.
        origin: shared by the copies of a span, and by nothing else; a span made from another one has one of its own.
    """

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    start: int
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    states: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    blob: bytes | None = field(default=None, init=False, repr=False, compare=False)
    origin: SpanOrigin = field(default_factory=SpanOrigin, init=False, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Tokens of the span."""
        return int(self.k.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and states."""
        return sum(x.numel() * x.element_size() for x in (self.k, self.v, *self.states.values()))

    def validate(self, spec: KVSpec) -> None:
        """Raises ValueError where shapes do not fit ``spec``; O(1)."""
        want_k = (spec.layers, self.tokens, spec.heads, spec.k_dim)
        want_v = (spec.layers, self.tokens, spec.heads, spec.v_dim)
        if tuple(self.k.shape) != want_k:
            raise ValueError(f"k must be {want_k}, got {tuple(self.k.shape)}")
        if tuple(self.v.shape) != want_v:
            raise ValueError(f"v must be {want_v}, got {tuple(self.v.shape)}")
        if tuple(self.positions.shape) != (3, self.tokens):
            raise ValueError(f"positions must be (3, {self.tokens}), got {tuple(self.positions.shape)}")
        for name, rows in self.outputs.items():
            if rows.shape[:1] != (self.tokens,):
                raise ValueError(f"the output {name} must have {self.tokens} rows, got {tuple(rows.shape)}")

    def slice(self, begin: int, end: int) -> SpanKV:
        """The tokens ``[begin, end)``, sharing memory; same frame."""
        outputs = {name: rows[begin:end] for name, rows in self.outputs.items()}
        k, v, positions = self.k[:, begin:end], self.v[:, begin:end], self.positions[:, begin:end]
        states = self.states if begin <= end == self.tokens else {}
        return replace(self, k=k, v=v, positions=positions, outputs=outputs, states=states)


def outputs_named(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A span's outputs as tensors of a record, beside others."""
    return {_OUTPUT + name: rows for name, rows in outputs.items()}


def outputs_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs among a record's tensors, see `outputs_named`."""
    return {name.removeprefix(_OUTPUT): rows for name, rows in tensors.items() if name.startswith(_OUTPUT)}
