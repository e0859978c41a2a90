"""`Fidelity`: which approximations a window may use. A pure value; `ctxwin.profiles.resolve` looks up what ``auto`` means."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Mode = Literal["auto", "exact", "patched", "blind"]
Lane = Literal["computed", "resident", "survivor", "orbit", "patched", "formed", "partial", "merged", "canonical"]
Reference = Literal["stricter", "window", "stream", "nearer"]
LANES: tuple[Lane, ...] = get_args(Lane)
KV_ONLY: tuple[Lane, ...] = ("patched", "orbit", "partial", "merged")
"""Lanes that change KV and say nothing of the states that a hybrid's recurrent layers keep."""


class Fidelity(BaseModel):
    """How close to a full re-prefill a window must stay.

    Attributes:
        mode: ``exact`` serves only KV with exactly the provenance a re-prefill would have; ``patched`` also survivors,
            patches and (with ``orbit``) orbit patches; ``blind`` canonicals only; ``auto`` follows the model's profile.
            Without one it begins ``exact``, and admits what audits of its own answers show to be safe (`ctxwin.trust`).
        rank: rank of stored patches, of a hybrid's states in each recurrent layer too; None where ``bytes_share`` decides.
        bytes_share: largest share of a chunk's bf16 KV bytes a patch may take; overrides ``rank``.
        layers: ``all``, or ``deep`` for the deeper half only (Kamera, appendix C.3); of a shared basis, those it covers.
        layout: ``joint``: every patch has directions of its own. ``shared``: patches are coefficients over directions that
            all patches of the model share (`ctxwin.profiles`), ``rank`` numbers a token; a window of a model without a basis
            is refused.
        basis: id of the shared basis; always that of the model where a window opens, whatever is given.
        survivors: what happens to a chunk whose antecedents left: ``keep`` rotates it as it is, ``slid`` only where those were
            the first in front of it, as when a window slides (it re-forms others), ``removal`` corrects it with a removal
            patch (formed by one forward, served from the next ask on), ``refresh`` re-forms it.
        orbit: whether one patch may serve every order of its antecedents: one that `Window.prepare_orbit` formed, or the
            mean over the orders met. Wrong by definition where the answer depends on the order, so off by default.
        recompute: the first tokens of each picture that are computed in context, beside all text, where a chunk stands behind
            neighbours it has no KV for; the rest of it is its canonical (MPIC-k; the paper takes 32). None: never.
        merge: share of its slots that a chunk keeps when it is merged (Elastic Cache): by `Window.merge`, and what was evicted,
            while bytes are short, in `Window.compress`. None: never.
        eliminate: with it: while an answer is generated over merged chunks no larger share of all tokens is held; beyond that
            the token 25 behind the newest is dropped. On transformers only: vLLM keeps every token that it has computed.
        audit: share of asks that are audited: replayed in the background as they were served, and as a re-prefill of what is
            placed, along the answer that was given; where something survives also as a re-prefill of what was seen.
        kl_budget: mean KL(re-prefill || served) a token, in nats, above which the chunks that were served approximately fall
            back to exact in that window. None: audits report, and nothing falls back.
        reference: what audits go by: the ``stricter`` of both re-prefills, that of what is placed (``window``), that of what was
            seen (``stream``), or the ``nearer`` one, where an answer may remember what has left. An answer that a re-prefill
            of what is placed gives as well counts as changed by ``stream`` only: exact serving would give no other.
        forbid: lanes that must not be used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "auto"
    rank: int | None = Field(default=32, ge=1)
    bytes_share: float | None = Field(default=None, gt=0, le=1)
    layers: Literal["all", "deep"] = "all"
    layout: Literal["joint", "shared"] = "joint"
    basis: str | None = None
    survivors: Literal["keep", "slid", "removal", "refresh"] = "keep"
    orbit: bool = False
    recompute: int | None = Field(default=None, ge=0)
    merge: float | None = Field(default=None, gt=0, lt=1)
    eliminate: bool = False
    audit: float = Field(default=0.0, ge=0, le=1)
    kl_budget: float | None = Field(default=None, gt=0)
    reference: Reference = "stricter"
    forbid: tuple[Lane, ...] = ()

    def __init__(self, mode: Mode = "auto", **data: Any) -> None:
        super().__init__(mode=mode, **data)

    @model_validator(mode="after")
    def _lanes(self) -> Fidelity:
        # Something must always be able to serve a chunk.
        if {"computed", "formed"} & set(self.forbid):
            raise ValueError(f"forbid must leave computed and formed allowed, got {self.forbid}")
        return self

    @property
    def patch_name(self) -> str:
        """What distinguishes one stored patch of the same provenance from another.

        Patches over a shared basis also carry its id, so that those of another basis are never found.
        """
        size = f"share={self.bytes_share}" if self.patch_rank is None else f"rank={self.rank}"
        over = "" if self.layout == "joint" else f",layout={self.layout},basis={self.basis}"
        return f"{size},layers={self.layers}{over}"

    @property
    def patch_rank(self) -> int | None:
        """``rank``, or None where ``bytes_share`` decides."""
        return self.rank if self.bytes_share is None else None

    @property
    def keeps_survivors(self) -> bool:
        """Whether a chunk whose antecedents left may be served as it is."""
        return self.survivors in ("keep", "slid")

    def allows(self, lane: Lane) -> bool:
        """Whether this (resolved) fidelity may serve ``lane``."""
        if lane in self.forbid:
            return False
        if self.mode == "exact":
            return lane in ("computed", "formed", "resident")
        if lane == "partial":
            return self.mode == "patched" and self.recompute is not None
        if lane == "merged":
            return self.mode == "patched" and self.merge is not None
        return lane != "orbit" or self.orbit
