"""What was measured of a model: its profile, which ``auto`` follows, and its shared basis, which patches may lie over.

A profile is what `ctxwin eval probe MODEL` measured: ``ctxwin-profile.json`` beside the weights or, where that folder cannot
be written or is the Hub's, a file of the user's named by the weights. A profile of other weights is refused.

`ctxwin eval basis MODEL` fits a basis on deficits of many contexts: directions that hold most of what conditioning does to
KV, whatever the chunk. A patch is then ``rank`` numbers a token, and the directions are paid once a model, not once a chunk.
The file is in the safetensors format under a name of its own: whatever ends in ``.safetensors`` beside the weights is taken
for weights, by vLLM and by the digest that a model is known by. It lies where a profile does and holds nothing of any chunk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ctxwin.fidelity import Fidelity
from ctxwin.files import atomic_write
from ctxwin.hashing import digest

if TYPE_CHECKING:
    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.deficit import Deficit
    from ctxwin.kv.layout import KVSpec
    from ctxwin.kv.lowrank import Weight
    from ctxwin.kv.patch import Patch

log = logging.getLogger("ctxwin")

M = TypeVar("M")

PROFILE_NAME = "ctxwin-profile.json"
PROFILE_FORMAT: Literal[1] = 1
PROFILES_VARIABLE = "CTXWIN_PROFILES"
"""Names the folder of the user's own profiles; ``$XDG_DATA_HOME/ctxwin/profiles`` by default."""

BASIS_NAME = "ctxwin-basis.st"
BASIS_FORMAT = "1"
FIT = "ctxwin eval basis"
_KV_ITEMSIZE = 2  # budgets are shares of a chunk's KV in bf16


def resolve(fidelity: Fidelity, model: str) -> Fidelity:
    """``fidelity`` with ``auto`` replaced by what the profile of ``model`` says, ``exact`` without one.

    Where patches lie over a shared basis, the model's own is named in ``basis``.

    Args:
        model: a folder or a Hub name, as the engine was opened with.

    Raises:
        ValueError: layout ``shared`` on a model without a basis, or with one of fewer than ``rank`` directions.

    Cost: where there is a profile or a basis, a digest of the weights, once a process.
    """
    resolved = _followed(fidelity, model) if fidelity.mode == "auto" else fidelity
    if resolved.layout != "shared" or resolved.mode != "patched":
        return resolved
    found = require_basis(model)
    if resolved.patch_rank is not None and resolved.patch_rank > found.rank:
        raise ValueError(
            f"rank must be at most {found.rank}, the directions of the model's shared basis, got {resolved.patch_rank}; "
            f"fit one of more with `{FIT} MODEL --rank {resolved.patch_rank}`"
        )
    return resolved.model_copy(update={"basis": found.id})


def _followed(fidelity: Fidelity, model: str) -> Fidelity:
    profile = find_profile(model)
    if profile is None:
        log.info("no profile for %s: serving exactly (measure one with `ctxwin eval probe`)", model)
        return fidelity.model_copy(update={"mode": "exact"})
    return overriding(profile.fidelity, fidelity)


def overriding(known: Fidelity, fidelity: Fidelity) -> Fidelity:
    """``known``, what ``auto`` stands for, with what ``fidelity`` sets by hand."""
    chosen = known.model_dump()
    # What a caller set by hand wins over the profile. A restored snapshot has every field set, so what counts is which
    # differ from the defaults.
    default = Fidelity()
    names = [n for n in Fidelity.model_fields if n != "mode"]
    mine = {n: getattr(fidelity, n) for n in names if getattr(fidelity, n) != getattr(default, n)}
    if "rank" in mine and "bytes_share" not in mine:
        chosen["bytes_share"] = None  # a rank chosen by hand must not lose against the profile's share
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

    def read(path: Path) -> Profile:
        return Profile.model_validate_json(path.read_bytes())

    # A folder that cannot be written may hold an older one, as a shipped model does.
    usable, _ = _look_up(model, PROFILE_NAME, read, lambda found: found.weights, "ctxwin eval probe")
    return max(usable, key=lambda found: found.date, default=None)


def _look_up(
    model: str | Path, name: str, read: Callable[[Path], M], weights: Callable[[M], str], command: str
) -> tuple[list[M], list[str]]:
    """The measurements of a model that can be used, and why the others cannot.

    Args:
        name: of the files: beside the weights, and with another stem the user's own.
        read: raises OSError or ValueError for a file that is none of this version.
        weights: the `model_digest` that a file names.
        command: makes such a file.
    """
    folder = model_folder(model)
    if folder is None:
        return [], []
    usable, refused = [], []
    try:
        places = [folder / name, *([user_profile(folder, Path(name).suffix)] if _has_own() else [])]
        found = [path for path in places if path.is_file()]
        own = model_digest(folder) if found else ""
    except (OSError, ValueError) as error:
        log.warning("the weights of %s cannot be read (%s): what was measured of it is not used", folder, error)
        return [], [f"its weights cannot be read: {_said(error)}"]
    for path in found:
        try:
            made = read(path)
            if weights(made) == own:
                usable.append(made)
                continue
            refused.append("one was made for other weights")
        except (OSError, ValueError) as error:
            refused.append(f"one is none of this version: {_said(error)}")
        log.warning("%s is not used (%s); make it again with `%s`", path, refused[-1], command)
    return usable, refused


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
    return profiles_folder() / f"{model_digest(model)}{suffix}"


def write_profile(profile: Profile, model: str | Path, folder: Path | None = None) -> Path:
    """Writes a profile to ``folder``, else beside the weights, else (a Hub's folder, no right to write) to the user's own.

    The file is replaced as a whole. Returns its path; raises OSError where none of these can be written.
    """
    path = None if folder is None else folder / PROFILE_NAME
    return _write(profile.model_dump_json(indent=2).encode() + b"\n", PROFILE_NAME, model, path)


def _write(data: bytes, name: str, model: str | Path, path: Path | None) -> Path:
    if path is not None:
        return atomic_write(path, data)
    beside = Path(model).expanduser()
    if beside.is_dir():
        try:
            return atomic_write(beside / name, data)
        except OSError as error:
            log.info("%s cannot be written (%s); %s goes to your own", beside, error, name)
    try:
        own = user_profile(model, Path(name).suffix)
    except RuntimeError as error:
        raise OSError(f"there is no folder for your own profiles ({error}); name one in {PROFILES_VARIABLE}") from error
    return atomic_write(own, data)


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


@dataclass(frozen=True)
class ModelBasis:
    """What a file holds.

    Attributes:
        basis: the directions, most important first; its ``identity`` is the `model_digest` of the model.
        weight: what errors were measured with when it was fitted, and are when deficits are projected.
        date: when it was fitted.
    """

    basis: SharedBasis
    weight: Weight | None
    date: str

    @property
    def id(self) -> str:
        """Content identity of the directions."""
        return self.basis.id

    @property
    def rank(self) -> int:
        """How many directions there are."""
        return self.basis.rank


def find_basis(model: str | Path) -> ModelBasis | None:
    """The basis of a model, or None: of the one beside its weights and the user's own, what was fitted last.

    One that cannot be read or was fitted on other weights is passed over with a warning. Cost: a digest of the weights, once
    a process, and a read of each file, once for every version of it.
    """
    return max(_bases(model)[0], key=lambda found: found.date, default=None)


def require_basis(model: str | Path) -> ModelBasis:
    """As `find_basis`; ValueError where there is none, with what was passed over and the command that fits one."""
    usable, refused = _bases(model)
    if not usable:
        why = f" ({'; '.join(refused)}; the log names the file)" if refused else ""
        raise ValueError(
            f"model {name_of(model)!r} has no shared basis{why}; fit one with `{FIT} MODEL`, or take Fidelity(layout='joint')"
        )
    return max(usable, key=lambda found: found.date)


def _bases(model: str | Path) -> tuple[list[ModelBasis], list[str]]:
    def read(path: Path) -> ModelBasis:
        stat = path.stat()
        return _read(path, stat.st_size, stat.st_mtime_ns)

    return _look_up(model, BASIS_NAME, read, lambda found: found.basis.identity, FIT)


def name_of(model: str | Path) -> str:
    """A model's name without the folders it lies in: a server tells clients of these errors."""
    return str(model) if not Path(model).expanduser().is_dir() else Path(model).name


def _said(error: Exception) -> str:
    """A short description of an error, without the path that an OSError includes."""
    text = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return text or type(error).__name__


@lru_cache(maxsize=16)
def _read(path: Path, size: int, modified: int) -> ModelBasis:
    """Raises OSError, or ValueError for whatever is no basis."""
    return decode_basis(path.read_bytes())


def encode_basis(made: ModelBasis) -> bytes:
    """A basis as a file's bytes; the same for the same basis, weight and date."""
    from safetensors.torch import save

    tensors = {f"basis.{name}": tensor for name, tensor in made.basis.tensors().items()}
    if made.weight is not None:
        parts = {"weight.k": made.weight.k, "weight.v": made.weight.v}
        tensors |= {name: part.contiguous() for name, part in parts.items() if part is not None}
    said = {"format": BASIS_FORMAT, "date": made.date, "basis": json.dumps(made.basis.describe(), sort_keys=True)}
    # In one order: safetensors writes metadata in that of a hash table.
    header, body = _split(save(tensors, said))
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def decode_basis(data: bytes) -> ModelBasis:
    """What `encode_basis` made; ValueError for anything else."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.lowrank import Weight

    try:
        tensors = load(data)
        said = _split(data)[0]["__metadata__"]
        if said["format"] != BASIS_FORMAT:
            raise ValueError(f"format must be {BASIS_FORMAT}, got {said['format']}")
        basis = SharedBasis.from_tensors({"right": tensors["basis.right"]}, json.loads(said["basis"]))
        n, width = len(basis.layers), basis.heads * (basis.k_dim + basis.v_dim)
        if basis.right.ndim != 3 or (basis.right.shape[0], basis.right.shape[2]) != (n, width):
            raise ValueError(f"directions must be [{n}, rank, {width}], got {list(basis.right.shape)}")
        if not all(bool(torch.isfinite(part).all()) for part in tensors.values()):
            raise ValueError("directions and weights must be finite")
        k, v = tensors.get("weight.k"), tensors.get("weight.v")
        return ModelBasis(basis, None if k is None and v is None else Weight(k, v), said["date"])
    except (SafetensorError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors of a safetensors file."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_basis(made: ModelBasis, model: str | Path, path: Path | None = None) -> Path:
    """Writes a basis to ``path``, else beside the weights, else (a Hub's folder, no right to write) to the user's own.

    Returns its path; raises OSError where none of these can be written.
    """
    return _write(encode_basis(made), BASIS_NAME, model, path)


@dataclass(frozen=True)
class Served:
    """The part of a basis that patches of one fidelity lie over; ``basis`` is None where not even one direction fits."""

    basis: SharedBasis | None
    weight: Weight | None


def served_basis(model: str, spec: KVSpec, fidelity: Fidelity) -> Served:
    """The basis of an engine's model, cut to the directions and layers that ``fidelity`` (resolved) asks for.

    Args:
        model: `EngineSpec.model`.
        spec: layout of its KV; the patches are bound to it.

    Raises:
        ValueError: a basis that is gone, is another one than the window was opened with, or covers none of the layers.
        Cost: nothing but a look-up, once an engine and fidelity.
    """
    return _cut(model, spec, fidelity.basis, fidelity.patch_rank, fidelity.bytes_share, fidelity.layers)


@lru_cache(maxsize=64)
def _cut(model: str, spec: KVSpec, name: str | None, rank: int | None, share: float | None, layers: Any) -> Served:
    from ctxwin.kv.patch import select_layers

    made = require_basis(model)
    basis = made.basis
    if made.id != name:
        raise ValueError(
            f"the model got another shared basis, {made.id}, while a window used {name}; open the window again"
        )
    shape, own = (basis.heads, basis.k_dim, basis.v_dim), (spec.heads, spec.k_dim, spec.v_dim)
    if shape != own or max(basis.layers) >= spec.layers:
        raise ValueError(f"the model's shared basis must be of {own} heads and widths, got {shape}")
    wanted = set(select_layers(layers, spec.layers))
    at = [i for i, layer in enumerate(basis.layers) if layer in wanted]
    if not at:
        raise ValueError(f"layers must meet those of the shared basis, {list(basis.layers)}, got {layers}")
    kept = rank
    if kept is None:
        assert share is not None
        rows = 1 if basis.layout == "joint" else len(at)
        kept = int(share * spec.span_bytes(1, _KV_ITEMSIZE) / (rows * basis.right.element_size()))
    kept = min(kept, basis.rank)
    if kept < 1:
        return Served(None, made.weight)
    # Directions stand in the order of their energy, so the first ones are the basis of a smaller rank.
    right = basis.right[at][:, :kept].contiguous()
    cut = replace(basis, identity=spec.identity, layers=tuple(basis.layers[i] for i in at), right=right)
    return Served(cut, made.weight)


def compressed(lost: Deficit, model: str, spec: KVSpec, fidelity: Fidelity) -> Patch:
    """The patch of a deficit as ``fidelity`` (resolved) wants it: its own directions, or coefficients over the shared ones."""
    from ctxwin.kv.patch import compress
    from ctxwin.kv.pooling import project
    from ctxwin.kv.states import factors

    if fidelity.layout == "shared":
        over = served_basis(model, spec, fidelity)
        if over.basis is None:
            return compress(lost, spec, rank=0, layers=fidelity.layers)
        made = project(lost, over.basis, spec, weight=over.weight)
        return replace(made, states=factors(lost.states, fidelity.patch_rank, fidelity.bytes_share, made.dtype))
    return compress(lost, spec, rank=fidelity.patch_rank, bytes_share=fidelity.bytes_share, layers=fidelity.layers)
