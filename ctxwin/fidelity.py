"""`Fidelity`: which approximations a window may use, and the model profile that `auto` follows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

log = logging.getLogger("ctxwin")

PROFILE_NAME = "ctxwin-profile.json"

Mode = Literal["auto", "exact", "patched", "blind"]
Lane = Literal["computed", "resident", "survivor", "orbit", "patched", "formed", "canonical"]
LANES: tuple[Lane, ...] = ("computed", "resident", "survivor", "orbit", "patched", "formed", "canonical")


class Fidelity(BaseModel):
    """How close to a full re-prefill a window must stay.

    Attributes:
        mode: ``exact`` serves only KV with exactly the provenance a re-prefill would have; ``patched`` also survivors,
            patches and (with ``orbit``) orbit patches; ``blind`` canonicals only; ``auto`` follows the model's profile
            and is ``exact`` without one.
        rank: rank of stored patches; None where ``bytes_share`` decides.
        bytes_share: largest share of a chunk's bf16 KV bytes a patch may take; overrides ``rank``.
        layers: ``all``, or ``deep`` for the deeper half only (Kamera, appendix C.3).
        survivors: what happens to a chunk whose antecedents left: ``keep`` rotates it as it is, ``removal`` corrects it
            with a removal patch (formed once by a forward), ``refresh`` re-forms it.
        orbit: whether one patch may serve every order of its antecedents. Wrong by definition where the answer depends
            on the order, so off by default.
        audit, kl_budget: share of asks to re-prefill in the background and the mean KL above which a chunk falls back
            to ``exact``. Not acted on yet.
        forbid: lanes that must not be used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "auto"
    rank: int | None = Field(default=32, ge=1)
    bytes_share: float | None = Field(default=None, gt=0, le=1)
    layers: Literal["all", "deep"] = "all"
    survivors: Literal["keep", "removal", "refresh"] = "keep"
    orbit: bool = False
    audit: float = Field(default=0.0, ge=0, le=1)
    kl_budget: float | None = Field(default=None, gt=0)
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
        """What distinguishes one stored patch of the same provenance from another."""
        size = f"share={self.bytes_share}" if self.patch_rank is None else f"rank={self.rank}"
        return f"{size},layers={self.layers}"

    @property
    def patch_rank(self) -> int | None:
        """``rank``, or None where ``bytes_share`` decides."""
        return self.rank if self.bytes_share is None else None

    def allows(self, lane: Lane) -> bool:
        """Whether this (resolved) fidelity may serve ``lane``."""
        if lane in self.forbid:
            return False
        if self.mode == "exact":
            return lane in ("computed", "formed", "resident")
        return lane != "orbit" or self.orbit

    def resolve(self, model: str) -> Fidelity:
        """This fidelity with ``auto`` replaced by what the profile of ``model`` (a folder) says; ``exact`` without one.

        A profile is ``ctxwin-profile.json`` beside the weights: ``{"verdict": ..., "fidelity": {...}}``.
        """
        if self.mode != "auto":
            return self
        path = Path(model) / PROFILE_NAME
        if not path.is_file():
            log.info("no profile for %s: serving exactly (measure one with `ctxwin eval probe`)", model)
            return self.model_copy(update={"mode": "exact"})
        chosen = json.loads(path.read_text())["fidelity"]
        # What a caller set by hand wins over the profile.
        # A restored snapshot has every field set, so what counts is which differ from the defaults.
        default = Fidelity()
        mine = {n: v for n in type(self).model_fields if n != "mode" and (v := getattr(self, n)) != getattr(default, n)}
        if "rank" in mine and "bytes_share" not in mine:
            chosen = {**chosen, "bytes_share": None}  # a rank chosen by hand must not lose against the profile's share
        return Fidelity(**{**chosen, **mine})
