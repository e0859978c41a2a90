"""Measurements of a model: its profile, which ``auto`` follows, and its shared basis, over which patches may be stored.

A profile is the result of `ctxwin eval probe MODEL`: ``ctxwin-profile.json`` beside the weights or, if that folder cannot be
written or is the Hub's, a file of the user's own named by the weights. A profile of other weights is refused. Profiles of some
released models come with the library (`SHIPPED`).

`ctxwin eval basis MODEL` fits a basis on deficits of many contexts: directions that capture most of the effect of conditioning
on KV, for any chunk. A patch is then ``rank`` numbers per token, and the directions are stored once per model, not per chunk.
The file is in the safetensors format with another suffix: vLLM and the model digest take every ``.safetensors`` file beside the
weights for weights. It is stored where a profile is and contains nothing of any chunk.
"""

from __future__ import annotations

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
"""Environment variable with the folder of the user's own profiles; default: ``$XDG_DATA_HOME/ctxwin/profiles``."""

SHIPPED = Path(__file__).parent / "model_profiles"
"""Profiles of released models: files named ``BYTES-WEIGHTS.json``, by the size of all weights and by `model_digest`."""

BASIS_NAME = "ctxwin-basis.st"
BASIS_FORMAT = "1"
FIT = "ctxwin eval basis"
_KV_ITEMSIZE = 2  # budgets are shares of a chunk's KV in bf16


def resolve(fidelity: Fidelity, model: str) -> Fidelity:
    """Return ``fidelity`` with ``auto`` replaced by the fidelity in the profile of ``model``, ``exact`` without one.

    If patches use a shared basis, ``basis`` of the result is the id of the model's own.

    Args:
        model: a folder or a Hub name, as the engine was opened with.

    Raises:
        ValueError: layout ``shared`` on a model without a basis, or with one of fewer than ``rank`` directions.

    Cost: if there is a profile or a basis, a digest of the weights, once per process.
    """
    resolved = _from_profile(fidelity, model) if fidelity.mode == "auto" else fidelity
    if resolved.advanced.layout != "shared" or resolved.mode != "patched":
        return resolved
    basis = require_basis(model)
    if resolved.patch_rank is not None and resolved.patch_rank > basis.rank:
        raise ValueError(
            f"rank must be at most {basis.rank}, the directions of the model's shared basis, got {resolved.patch_rank}; "
            f"fit one of more with `{FIT} MODEL --rank {resolved.patch_rank}`"
        )
    return resolved.with_advanced(basis=basis.id)


def _from_profile(fidelity: Fidelity, model: str) -> Fidelity:
    profile = find_profile(model)
    if profile is None:
        log.info("no profile for %s: serving exactly (measure one with `ctxwin eval probe`)", model)
        return fidelity.model_copy(update={"mode": "exact"})
    return with_overrides(profile.fidelity, fidelity)


def with_overrides(base: Fidelity, fidelity: Fidelity) -> Fidelity:
    """Return ``base``, the meaning of ``auto``, with the fields that ``fidelity`` sets explicitly."""
    fields = {n: value for n, value in base if n != "advanced"}
    # Explicit fields take precedence over the profile. A restored snapshot has every field set, so explicit are those that
    # differ from the defaults.
    default = Fidelity()
    overrides = {n: v for n, v in fidelity if n not in ("mode", "advanced") and v != getattr(default, n)}
    advanced = {n: v for n, v in fidelity.advanced if v != getattr(default.advanced, n)}
    return Fidelity(**{**fields, **overrides, "advanced": base.advanced.model_copy(update=advanced)})


class Profile(BaseModel):
    """Results of a probe of one model, and the fidelity that follows from them.

    Attributes:
        format: of this file.
        weights: `model_digest` of the measured model.
        model: its name, for display.
        verdict: one line.
        finding: ``binds``, ``chains``, ``unclear`` or ``unread``.
        fidelity: the meaning of ``auto``; never ``auto`` itself.
        measured: the figures on which the verdict is based.
        n: number of questions of the probe.
        date, ctxwin: date and ctxwin version of the probe.
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
    def _check_fidelity(self) -> Profile:
        if self.fidelity.mode == "auto":
            raise ValueError("the fidelity of a profile must be exact, patched or blind, got auto")
        if self.finding in ("unclear", "unread") and self.fidelity.mode != "exact":
            raise ValueError(f"a profile without a verdict must be exact, got {self.fidelity.mode}")
        return self


def find_profile(model: str | Path) -> Profile | None:
    """Return the profile of a model, or None: the latest of the one beside its weights, the user's own and a shipped one.

    A profile that cannot be read or was measured on other weights is skipped with a warning.
    """

    def read(path: Path) -> Profile:
        return Profile.model_validate_json(path.read_bytes())

    # A folder that cannot be written may hold an older one, as that of the bundled model does.
    usable, _ = _look_up(model, PROFILE_NAME, read, lambda profile: profile.weights, "ctxwin eval probe")
    return max(usable, key=lambda profile: profile.date, default=None)


def _look_up(
    model: str | Path, name: str, read: Callable[[Path], M], weights: Callable[[M], str], command: str
) -> tuple[list[M], list[str]]:
    """Return the usable measurements of a model, and the reasons why others are not.

    Args:
        name: name of the file beside the weights; its suffix is also that of the user's own file.
        read: reads a file; raises OSError or ValueError if it is not one of this version.
        weights: returns the `model_digest` in a measurement.
        command: the command that creates such a file.
    """
    folder = model_folder(model)
    if folder is None:
        return [], []
    usable, refused = [], []
    try:
        places = [folder / name, *([user_profile(folder, Path(name).suffix)] if _has_own() else [])]
        paths = [path for path in places if path.is_file()]
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        alike = [path for path in SHIPPED.glob(f"{size}-*{Path(name).suffix}") if name == PROFILE_NAME]
        weights_digest = model_digest(folder) if paths or alike else ""
        paths += [path for path in alike if path.stem == f"{size}-{weights_digest}"]
    except (OSError, ValueError) as error:
        log.warning("the weights of %s cannot be read (%s): its measurements are not used", folder, error)
        return [], [f"its weights cannot be read: {_describe(error)}"]
    for path in paths:
        try:
            measurement = read(path)
            if weights(measurement) == weights_digest:
                usable.append(measurement)
                continue
            refused.append("one was made for other weights")
        except (OSError, ValueError) as error:
            refused.append(f"one is none of this version: {_describe(error)}")
        log.warning("%s is not used (%s); make it again with `%s`", path, refused[-1], command)
    return usable, refused


def profiles_folder() -> Path:
    """Return the folder of the user's own profiles. Raises RuntimeError for a user without a home."""
    if folder := os.environ.get(PROFILES_VARIABLE):
        return Path(folder).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "ctxwin" / "profiles"


def _has_own() -> bool:
    try:
        return profiles_folder().is_dir()
    except (OSError, RuntimeError) as error:
        log.info("the user's own profiles cannot be looked up: %s", error)
        return False


def user_profile(model: str | Path, suffix: str = ".json") -> Path:
    """Return the path of the user's own profile of a model. Cost: a digest of its weights; raises ValueError if it has none."""
    return profiles_folder() / f"{model_digest(model)}{suffix}"


def write_profile(profile: Profile, model: str | Path, folder: Path | None = None) -> Path:
    """Write a profile to ``folder``, else beside the weights, else (a Hub's folder, no write permission) to the user's own.

    The file is replaced atomically. Returns its path; raises OSError if none of these can be written.
    """
    path = None if folder is None else folder / PROFILE_NAME
    return _write(profile.model_dump_json(indent=2).encode() + b"\n", PROFILE_NAME, model, path)


def _write(data: bytes, name: str, model: str | Path, path: Path | None) -> Path:
    if path is not None:
        return atomic_write(path, data)
    folder = Path(model).expanduser()
    if folder.is_dir():
        try:
            return atomic_write(folder / name, data)
        except OSError as error:
            log.info("%s cannot be written (%s); %s goes to your own folder", folder, error, name)
    try:
        user_path = user_profile(model, Path(name).suffix)
    except RuntimeError as error:
        raise OSError(f"there is no folder for your own profiles ({error}); name one in {PROFILES_VARIABLE}") from error
    return atomic_write(user_path, data)


def model_digest(model: str | Path) -> str:
    """Return the identity of a model in profiles: a digest of its weights and config, independent of the serving dtype.

    Fields of the config that only say which library wrote it do not count; a setting that it spells otherwise does.

    Cost: as `ctxwin.engines.encoding.checkpoint.weights_digest`, once per process while no file changes. Raises ValueError
    if the model is not found or its config is not JSON, UnsupportedModel if it has no safetensors weights.
    """
    folder = model_folder(model)
    if folder is None:
        raise ValueError(f"a model must be a local folder or a Hub name that was downloaded, got {str(model)!r}")
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return _digest(str(folder), tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()))


@lru_cache(maxsize=16)
def _digest(folder: str, stats: tuple[tuple[str, int, int], ...]) -> str:
    from ctxwin.engines.encoding.checkpoint import weights_digest, without_origin

    config = Path(folder) / "config.json"
    settings = json.loads(config.read_bytes(), object_hook=without_origin) if config.is_file() else None
    return digest("profile", weights_digest(Path(folder)), settings)


def model_folder(model: str | Path) -> Path | None:
    """Return the local folder of a model, or None. Never downloads."""
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
    """A shared basis, as read from its file.

    Attributes:
        basis: the directions, most important first; its ``identity`` is the `model_digest` of the model.
        weight: weight of errors in the fit, and in projections of deficits.
        date: date of the fit.
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
        """Number of directions."""
        return self.basis.rank


def find_basis(model: str | Path) -> ModelBasis | None:
    """Return the basis of a model, or None: the latest of the one beside its weights and the user's own.

    A basis that cannot be read or was fitted on other weights is skipped with a warning. Cost: a digest of the weights, once
    per process, and a read of each version of a file.
    """
    return max(_bases(model)[0], key=lambda basis: basis.date, default=None)


def require_basis(model: str | Path) -> ModelBasis:
    """Return the basis as `find_basis`. Raises ValueError if there is none, with the reasons and the command that fits one."""
    usable, refused = _bases(model)
    if not usable:
        why = f" ({'; '.join(refused)}; the log names the file)" if refused else ""
        raise ValueError(
            f"model {name_of(model)!r} has no shared basis{why}; fit one with `{FIT} MODEL`, or take "
            "Fidelity(advanced={'layout': 'quantized'})"
        )
    return max(usable, key=lambda basis: basis.date)


def _bases(model: str | Path) -> tuple[list[ModelBasis], list[str]]:
    def read(path: Path) -> ModelBasis:
        stat = path.stat()
        return _read(path, stat.st_size, stat.st_mtime_ns)

    return _look_up(model, BASIS_NAME, read, lambda basis: basis.basis.identity, FIT)


def name_of(model: str | Path) -> str:
    """Return a model's name without its folders, as servers send these errors to clients."""
    return str(model) if not Path(model).expanduser().is_dir() else Path(model).name


def _describe(error: Exception) -> str:
    """Return a short description of an error, without the path that an OSError includes."""
    text = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    return text or type(error).__name__


@lru_cache(maxsize=16)
def _read(path: Path, size: int, modified: int) -> ModelBasis:
    return decode_basis(path.read_bytes())


def encode_basis(basis: ModelBasis) -> bytes:
    """Return a basis as a file's bytes; deterministic in basis, weight and date."""
    from safetensors.torch import save

    tensors = {f"basis.{name}": tensor for name, tensor in basis.basis.tensors().items()}
    if basis.weight is not None:
        parts = {"weight.k": basis.weight.k, "weight.v": basis.weight.v}
        tensors |= {name: part.contiguous() for name, part in parts.items() if part is not None}
    metadata = {"format": BASIS_FORMAT, "date": basis.date, "basis": json.dumps(basis.basis.describe(), sort_keys=True)}
    # The header is sorted: safetensors writes metadata in the order of a hash table.
    header, body = _split(save(tensors, metadata))
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def decode_basis(data: bytes) -> ModelBasis:
    """Decode the bytes of `encode_basis`. Raises ValueError for anything else."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.lowrank import Weight

    try:
        tensors = load(data)
        metadata = _split(data)[0]["__metadata__"]
        if metadata["format"] != BASIS_FORMAT:
            raise ValueError(f"format must be {BASIS_FORMAT}, got {metadata['format']}")
        basis = SharedBasis.from_tensors({"right": tensors["basis.right"]}, json.loads(metadata["basis"]))
        n, width = len(basis.layers), basis.heads * (basis.k_dim + basis.v_dim)
        if basis.right.ndim != 3 or (basis.right.shape[0], basis.right.shape[2]) != (n, width):
            raise ValueError(f"directions must be [{n}, rank, {width}], got {list(basis.right.shape)}")
        if not all(bool(torch.isfinite(part).all()) for part in tensors.values()):
            raise ValueError("directions and weights must be finite")
        k, v = tensors.get("weight.k"), tensors.get("weight.v")
        return ModelBasis(basis, None if k is None and v is None else Weight(k, v), metadata["date"])
    except (SafetensorError, KeyError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the tensors of a safetensors file."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_basis(basis: ModelBasis, model: str | Path, path: Path | None = None) -> Path:
    """Write a basis to ``path``, else beside the weights, else (a Hub's folder, no write permission) to the user's own.

    Returns its path; raises OSError if none of these can be written.
    """
    return _write(encode_basis(basis), BASIS_NAME, model, path)


@dataclass(frozen=True)
class ServedBasis:
    """The part of a basis that patches of one fidelity use; ``basis`` is None if not even one direction fits."""

    basis: SharedBasis | None
    weight: Weight | None


def served_basis(model: str, spec: KVSpec, fidelity: Fidelity) -> ServedBasis:
    """Return the basis of an engine's model, cut to the directions and layers of ``fidelity`` (resolved).

    Args:
        model: `EngineSpec.model`.
        spec: layout of its KV; the patches are bound to it.

    Raises:
        ValueError: the basis is gone, is not the one the window was opened with, or covers none of the layers.

    Cost: a look-up, after the first call per engine and fidelity.
    """
    return _cut(model, spec, fidelity.advanced.basis, fidelity.patch_rank, fidelity.bytes_share, fidelity.layers)


@lru_cache(maxsize=64)
def _cut(model: str, spec: KVSpec, name: str | None, rank: int | None, share: float | None, layers: Any) -> ServedBasis:
    from ctxwin.kv.patch import select_layers

    model_basis = require_basis(model)
    basis = model_basis.basis
    if model_basis.id != name:
        raise ValueError(
            f"the model got another shared basis, {model_basis.id}, while a window used {name}; open the window again"
        )
    shape, expected = (basis.heads, basis.k_dim, basis.v_dim), (spec.heads, spec.k_dim, spec.v_dim)
    if shape != expected or max(basis.layers) >= spec.layers:
        raise ValueError(f"the model's shared basis must be of {expected} heads and widths, got {shape}")
    selected = set(select_layers(layers, spec.layers))
    at = [i for i, layer in enumerate(basis.layers) if layer in selected]
    if not at:
        raise ValueError(f"layers must meet those of the shared basis, {list(basis.layers)}, got {layers}")
    count = basis.rank if rank is None else rank  # all directions if neither decides
    if share is not None:
        rows = 1 if basis.layout == "joint" else len(at)
        count = int(share * spec.span_bytes(1, _KV_ITEMSIZE) / (rows * basis.right.element_size()))
    count = min(count, basis.rank)
    if count < 1:
        return ServedBasis(None, model_basis.weight)
    # Directions are sorted by energy, so the first ones form the basis of a smaller rank.
    right = basis.right[at][:, :count].contiguous()
    cut = replace(basis, identity=spec.identity, layers=tuple(basis.layers[i] for i in at), right=right)
    return ServedBasis(cut, model_basis.weight)


def compress_deficit(deficit: Deficit, model: str, spec: KVSpec, fidelity: Fidelity) -> Patch:
    """Compress a deficit to a patch as ``fidelity`` (resolved) says: with its own directions, or over the shared ones."""
    from ctxwin.kv.patch import compress
    from ctxwin.kv.pooling import project
    from ctxwin.kv.states import factors

    if fidelity.advanced.layout == "shared":
        part = served_basis(model, spec, fidelity)
        if part.basis is None:
            return compress(deficit, spec, rank=0, layers=fidelity.layers)
        patch = project(deficit, part.basis, spec, weight=part.weight)
        return replace(patch, states=factors(deficit.states, fidelity.patch_rank, fidelity.bytes_share, patch.dtype))
    rank, share, layout = fidelity.patch_rank, fidelity.bytes_share, fidelity.advanced.layout
    return compress(deficit, spec, rank=rank, bytes_share=share, layers=fidelity.layers, layout=layout)
