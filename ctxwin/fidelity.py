"""`Fidelity`: the approximations that a window may use. A pure value; `ctxwin.profiles.resolve` resolves ``auto``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ctxwin.validation import validate

Mode = Literal["auto", "exact", "patched", "blind"]
Lane = Literal[
    "computed", "resident", "edited", "survivor", "orbit", "patched", "formed", "partial", "merged", "canonical"
]
Reference = Literal["stricter", "window", "stream", "nearer"]
LANES: tuple[Lane, ...] = get_args(Lane)
KV_ONLY: tuple[Lane, ...] = ("patched", "orbit", "partial", "merged")
"""Lanes that change KV but not the states of a hybrid's recurrent layers."""


class AdvancedFidelity(BaseModel):
    """Fields of `Fidelity` for research: `Fidelity(advanced=AdvancedFidelity(...))`, or the same as a dict.

    Attributes:
        layout: ``quantized``: each layer of a patch has directions of its own, in 2 to 8 bits a number (`ctxwin.kv.quantize`).
            ``joint``: its layers share them, in bfloat16, which takes fewer products to load, restores less in the same bytes and
            may harm. ``shared``: patches are coefficients over directions all patches of the model share (`ctxwin.profiles`),
            ``rank`` numbers a token; a window of a model without a basis is refused. A hybrid's states have joint ones always.
        basis: id of the shared basis; always that of the model where a window opens, whatever is given.
        eliminate: with `Fidelity.merge`: an answer over merged chunks keeps the same share of all tokens while it is generated;
            beyond that the token 25 before the newest is dropped. True or 1: with each token; 16: sixteen tokens at once; 0:
            never.
        merge_prompt: with `Fidelity.merge`: the prompt of each ask is merged to that share for its answer, by the attention of
            all of it. All of it is computed, as `Window.plan` counts. The chunks stay whole, and so do asks that are remembered
            or have a chunk without its context (`Window.toggle`).
        reference: reference of audits: the ``stricter`` of both re-prefills, that of the placed chunks (``window``), that of all
            chunks seen (``stream``), or the ``nearer`` one, if an answer may remember evicted chunks. While trust is earned both
            are valid by default: where they disagree, nothing is lost (`ctxwin.audit`).
        forbid: lanes that must not be used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Literal["joint", "quantized", "shared"] = "quantized"
    basis: str | None = None
    eliminate: int = Field(default=0, ge=0)
    merge_prompt: bool = False
    reference: Reference = "stricter"
    forbid: tuple[Lane, ...] = ()

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __init__(self, **data: Any) -> None:
            validate(lambda fields: super(AdvancedFidelity, self).__init__(**fields), data, "")

    @model_validator(mode="after")
    def _lanes(self) -> AdvancedFidelity:
        # At least one lane must always be able to serve a chunk.
        if {"computed", "formed"} & set(self.forbid):
            raise ValueError(f"forbid must leave computed and formed allowed, got {self.forbid}")
        return self


class Fidelity(BaseModel):
    """Required closeness of a window to a full re-prefill.

    Attributes:
        mode: ``exact`` serves only KV with exactly the provenance a re-prefill would have; ``patched`` also survivors,
            patches and, where their fields say so, other lanes; ``blind`` canonicals only; ``auto`` follows the model's profile.
            Without one it begins ``exact``, and admits lanes that audits of its own answers show to be safe (`ctxwin.audit`).
        bytes_share: largest share of a chunk's KV in bf16 that a patch may take in bytes, and of a hybrid's states theirs. None
            if ``rank`` decides, as it does by default where it is given; without both a patch holds all directions.
        rank: the same by the bytes of joint factors of this rank: ``2 * rank * (T + n * W)``, for n layers of T tokens by W
            numbers; of a hybrid's states, directions in each recurrent layer. ``bytes_share`` overrides it.
        layers: ``all``, ``deep`` for the deeper half only, or shares of the depth ``(first, last)``: ``(0.25, 1)`` leaves out the
            first quarter (Kamera, appendix C.3: how deep depends on the model). Of a shared basis, those it covers.
        survivors: treatment of a chunk whose antecedents were evicted: ``keep`` only rotates it; ``slid`` does so only if they
            were the first of those before it, as after a slide, and forms it again otherwise; ``removal`` corrects it,
            and one of whose antecedents at most half are others, with a removal patch (formed by the forward of an ask, or while
            the engine is idle); ``refresh`` forms it again.
        orbit: one patch may serve every order of its antecedents: one formed by `Window.maintenance.prepare_orbit`, or the mean
            over the observed orders. Wrong by definition if the answer depends on the order, so off by default.
        recompute: how many first tokens of each picture, video or sound are computed in context, beside all text, if a chunk
            follows neighbours it has no KV for; its other tokens are its canonical (MPIC-k; the paper takes 32). None: never.
        merge: share of its slots that a chunk keeps when it is merged (Elastic Cache): by `Window.maintenance.merge`, and for
            evicted chunks in `Window.maintenance.compress` if bytes are needed. None: never.
        edited_tokens: most tokens in which the text before a chunk may differ from all that its KV was conditioned on, directly
            or through other KV: a clock in the system prompt (`Window.fork`), a chunk that was replaced. Such a chunk keeps its
            KV, moved. Counted is one range, from the first such token to the last. None: never.
        audit: share of asks that are audited: replayed in the background as they were served, and as a re-prefill of the placed
            chunks, along the answer that was given; if there are survivors also as a re-prefill of all chunks seen.
        kl_budget: mean KL(re-prefill || served) per token, in nats, above which the chunks that were served approximately fall
            back to exact in that window. None: audits report, and nothing falls back.
        advanced: fields for research.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "auto"
    bytes_share: float | None = Field(default=0.12, gt=0, le=1)
    rank: int | None = Field(default=None, ge=1)
    layers: Literal["all", "deep"] | tuple[float, float] = "all"
    survivors: Literal["keep", "slid", "removal", "refresh"] = "keep"
    orbit: bool = False
    recompute: int | None = Field(default=None, ge=0)
    merge: float | None = Field(default=None, gt=0, lt=1)
    edited_tokens: int | None = Field(default=None, ge=1)
    audit: float = Field(default=0.0, ge=0, le=1)
    kl_budget: float | None = Field(default=None, gt=0)
    advanced: AdvancedFidelity = AdvancedFidelity()

    def __init__(self, mode: Mode = "auto", **data: Any) -> None:
        if moved := data.keys() & AdvancedFidelity.model_fields:
            name = min(moved)
            raise ValueError(f"{name} must be given in advanced; write Fidelity(advanced={{{name!r}: {data[name]!r}}})")
        validate(lambda fields: super(Fidelity, self).__init__(**fields), {"mode": mode, **data}, "")

    @field_validator("layers")
    @classmethod
    def _depth(cls, layers: str | tuple[float, float]) -> str | tuple[float, float]:
        if isinstance(layers, tuple) and not 0 <= layers[0] < layers[1] <= 1:
            raise ValueError(f"layers must be all, deep or shares 0 <= first < last <= 1 of the depth, got {layers}")
        return layers

    @model_validator(mode="before")
    @classmethod
    def _by_rank(cls, data: Any) -> Any:
        """Let a rank decide where only it is given."""
        return {"bytes_share": None, **data} if isinstance(data, dict) and data.get("rank") is not None else data

    def with_advanced(self, **fields: Any) -> Fidelity:
        """Return a copy with these advanced fields."""
        return self.model_copy(update={"advanced": self.advanced.model_copy(update=fields)})

    @property
    def patch_name(self) -> str:
        """Part of a patch's key that distinguishes patches of the same provenance.

        It includes the id of a shared basis, so that patches over another basis are never found.
        """
        size = f"share={self.bytes_share}" if self.patch_rank is None else f"rank={self.rank}"
        more = self.advanced
        basis = "" if more.layout == "joint" else f",layout={more.layout},basis={more.basis}"
        return f"{size},layers={self.layers}{basis}"

    @property
    def patch_rank(self) -> int | None:
        """``rank``, or None if ``bytes_share`` decides."""
        return self.rank if self.bytes_share is None else None

    @property
    def merges_prompt(self) -> bool:
        """True if an ask computes its whole prompt and merges it for its answer."""
        return self.merge is not None and self.advanced.merge_prompt

    @property
    def keeps_survivors(self) -> bool:
        """True if a chunk whose antecedents were evicted may be served unchanged."""
        return self.survivors in ("keep", "slid")

    @property
    def forms_removals(self) -> bool:
        """True if a chunk whose antecedents were evicted may be served with a removal patch."""
        return self.survivors == "removal" and self.mode == "patched" and self.allows("patched")

    def allows(self, lane: Lane) -> bool:
        """Return True if this (resolved) fidelity may serve ``lane``."""
        if lane in self.advanced.forbid:
            return False
        if self.mode == "exact":
            return lane in ("computed", "formed", "resident")
        fields = {"partial": self.recompute, "merged": self.merge, "edited": self.edited_tokens}
        if lane in fields:
            return self.mode == "patched" and fields[lane] is not None
        return lane != "orbit" or self.orbit
