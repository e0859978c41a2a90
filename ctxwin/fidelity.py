"""`Fidelity`: which approximations a window may use, and the model profile that `auto` follows.

A profile is what `ctxwin eval probe MODEL` measured of one model: ``ctxwin-profile.json`` beside the weights, or, where that
folder cannot be written or is a Hub's, a file of the user's named by the weights. A profile of other weights is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

log = logging.getLogger("ctxwin")

PROFILE_NAME = "ctxwin-profile.json"
PROFILE_FORMAT: Literal[1] = 1
PROFILES_VARIABLE = "CTXWIN_PROFILES"
"""Names the folder of the user's own profiles; ``$XDG_DATA_HOME/ctxwin/profiles`` by default."""

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
        layers: ``all``, or ``deep`` for the deeper half only (Kamera, appendix C.3); of a shared basis, those it covers.
        layout: ``joint``: every patch has directions of its own. ``shared``: patches are coefficients over directions that
            all patches of the model share (`ctxwin.profiles`), ``rank`` numbers a token; a window of a model without a basis
            is refused.
        basis: id of the shared basis; always that of the model where a window opens, whatever is given.
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
    layout: Literal["joint", "shared"] = "joint"
    basis: str | None = None
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

    def allows(self, lane: Lane) -> bool:
        """Whether this (resolved) fidelity may serve ``lane``."""
        if lane in self.forbid:
            return False
        if self.mode == "exact":
            return lane in ("computed", "formed", "resident")
        return lane != "orbit" or self.orbit

    def resolve(self, model: str) -> Fidelity:
        """This fidelity with ``auto`` replaced by what the profile of ``model`` says; ``exact`` without one.

        Where patches lie over a shared basis, the model's is named in ``basis``.

        Args:
            model: a folder or a Hub name, as the engine was opened with.

        Raises:
            ValueError: layout ``shared`` on a model without a basis, or with one of fewer than ``rank`` directions.
            Cost: where there is a profile or a basis, a digest of the weights, once a process (see `weights_digest`).
        """
        return self._followed(model)._named(model)

    def _named(self, model: str) -> Fidelity:
        """With the id of the model's shared basis, where patches need one."""
        if self.layout != "shared" or self.mode != "patched":
            return self
        from ctxwin.profiles import FIT, require_basis

        found = require_basis(model)
        if self.patch_rank is not None and self.patch_rank > found.rank:
            raise ValueError(
                f"rank must be at most {found.rank}, the directions of the model's shared basis, got {self.patch_rank}; "
                f"fit one of more with `{FIT} MODEL --rank {self.patch_rank}`"
            )
        return self.model_copy(update={"basis": found.id})

    def _followed(self, model: str) -> Fidelity:
        """With ``auto`` replaced."""
        if self.mode != "auto":
            return self
        profile = find_profile(model)
        if profile is None:
            log.info("no profile for %s: serving exactly (measure one with `ctxwin eval probe`)", model)
            return self.model_copy(update={"mode": "exact"})
        chosen = profile.fidelity.model_dump()
        # What a caller set by hand wins over the profile.
        # A restored snapshot has every field set, so what counts is which differ from the defaults.
        default = Fidelity()
        mine = {n: v for n in type(self).model_fields if n != "mode" and (v := getattr(self, n)) != getattr(default, n)}
        if "rank" in mine and "bytes_share" not in mine:
            chosen = {**chosen, "bytes_share": None}  # a rank chosen by hand must not lose against the profile's share
        return Fidelity(**{**chosen, **mine})


class Profile(BaseModel):
    """What a probe measured of one model, and what follows from it.

    Attributes:
        format: of this file.
        weights: `model_digest` of the model it was measured on.
        model: its name, for people.
        verdict: one line.
        finding: ``binds``, ``chains``, ``unclear`` or ``unread``.
        fidelity: what ``auto`` stands for; never ``auto`` itself.
        measured: the figures that the verdict rests on.
        n: questions that were asked of it.
        date, ctxwin: when, and by which version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = PROFILE_FORMAT
    weights: str = Field(min_length=1)
    model: str
    verdict: str
    finding: Literal["binds", "chains", "unclear", "unread"]
    fidelity: Fidelity
    measured: dict[str, Any] = Field(default_factory=dict)
    n: int = Field(ge=0)
    date: str
    ctxwin: str

    @model_validator(mode="after")
    def _resolved(self) -> Profile:
        if self.fidelity.mode == "auto":
            raise ValueError("the fidelity of a profile must be exact, patched or blind, got auto")
        if self.finding in ("unclear", "unread") and self.fidelity.mode != "exact":
            raise ValueError(f"a profile without a verdict must be exact, got {self.fidelity.mode}")
        return self


def find_profile(model: str | Path) -> Profile | None:
    """The profile of a model, or None: of the one beside its weights and the user's own, what was measured last.

    One that cannot be read or was measured on other weights is passed over with a warning.
    """
    folder = model_folder(model)
    if folder is None:
        return None
    try:
        places, own = measured_files(folder, PROFILE_NAME)
    except (OSError, ValueError) as error:
        log.warning("the weights of %s cannot be read (%s): its profile is not used", folder, error)
        return None
    usable: list[Profile] = []
    for path in places:
        try:
            found = Profile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            log.warning("%s is not a profile of this version (%s); measure again: `ctxwin eval probe`", path, reason)
            continue
        if found.weights == own:
            usable.append(found)
        else:
            log.warning("%s was measured on other weights and is not used; measure again: `ctxwin eval probe`", path)
    # A folder that cannot be written may hold an older one, as a shipped model does.
    return max(usable, key=lambda found: found.date, default=None)


def measured_files(folder: Path, name: str) -> tuple[list[Path], str]:
    """The files ``name`` that are there of a model (beside its weights, the user's own) and, where any is, `model_digest`.

    Raises OSError or ValueError where the weights cannot be read.
    """
    places = [folder / name, *([user_profile(folder, Path(name).suffix)] if _has_own() else [])]
    found = [path for path in places if path.is_file()]
    return found, model_digest(folder) if found else ""


def profiles_folder() -> Path:
    """Where profiles lie that could not be written beside the weights; RuntimeError for a user without a home."""
    if named := os.environ.get(PROFILES_VARIABLE):
        return Path(named).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "ctxwin" / "profiles"


def _has_own() -> bool:
    try:
        return profiles_folder().is_dir()
    except (OSError, RuntimeError) as error:
        log.info("the user's own profiles cannot be looked up: %s", error)
        return False


def user_profile(model: str | Path, suffix: str = ".json") -> Path:
    """The path of the user's own profile of a model. Cost: a digest of its weights; ValueError where it has none."""
    folder = model_folder(model)
    if folder is None:
        raise ValueError(f"a model must be a local folder or a Hub name that was downloaded, got {str(model)!r}")
    return profiles_folder() / f"{model_digest(folder)}{suffix}"


def write_profile(profile: Profile, model: str | Path, folder: Path | None = None) -> Path:
    """Writes a profile to ``folder``, else beside the weights, else (a Hub's folder, no right to write) to the user's own.

    The file is replaced as a whole. Returns its path; raises OSError where none of these can be written.
    """
    text = profile.model_dump_json(indent=2) + "\n"
    return write_beside(text.encode(), PROFILE_NAME, model, folder)


def write_beside(data: bytes, name: str, model: str | Path, folder: Path | None = None) -> Path:
    """Writes what was measured of a model, as `write_profile` does; the user's own is named by the weights."""
    if folder is not None:
        return _replace(folder / name, data)
    beside = Path(model).expanduser()
    if beside.is_dir():
        try:
            return _replace(beside / name, data)
        except OSError as error:
            log.info("%s cannot be written (%s); %s goes to your own", beside, error, name)
    try:
        own = user_profile(model, Path(name).suffix)
    except RuntimeError as error:
        raise OSError(f"there is no folder for your own profiles ({error}); name one in {PROFILES_VARIABLE}") from error
    return _replace(own, data)


def model_digest(model: str | Path) -> str:
    """What tells a model from another one for a profile: its weights and its config, whatever dtype they are served in.

    Cost: as `ctxwin.engines.encoding.checkpoint.weights_digest`, once a process as long as no file changes. Raises ValueError
    where the model is not there, UnsupportedModel where it has no safetensors weights.
    """
    folder = model_folder(model)
    if folder is None:
        raise ValueError(f"a model must be a local folder or a Hub name that was downloaded, got {str(model)!r}")
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    stats = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())
    return _digest(str(folder), stats)


@lru_cache(maxsize=16)
def _digest(folder: str, stats: tuple[tuple[str, int, int], ...]) -> str:
    from ctxwin.engines.encoding.checkpoint import weights_digest
    from ctxwin.hashing import digest

    config = Path(folder) / "config.json"
    settings = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    return digest("profile", weights_digest(Path(folder)), settings)


def model_folder(model: str | Path) -> Path | None:
    """The local folder of a model; None where there is none. Never downloads."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if str(model).count("/") != 1:
        return None  # not a Hub name
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model), local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _replace(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, as writers may share a process, or a folder and not a machine.
    temporary = path.with_suffix(f".{uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path
