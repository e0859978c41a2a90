"""Shared bases as windows use them: the file of a model's basis, and patches of deficits over it.

`ctxwin eval basis MODEL` fits a basis on deficits of many contexts: directions that hold most of what conditioning does to
KV, whatever the chunk. A patch is then ``rank`` numbers a token; the directions are paid once a model, not once a chunk.

The file is in the safetensors format, under a name of its own: whatever ends in ``.safetensors`` beside the weights is taken
for weights, by vLLM and by the digest that a model is known by. It lies where a profile does (`ctxwin.fidelity`) and belongs
to the model, whoever's window asks: it holds nothing of any chunk.
"""

from __future__ import annotations

import json
import logging
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxwin.fidelity import Fidelity, measured_files, model_folder, write_beside

if TYPE_CHECKING:
    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.deficit import Deficit
    from ctxwin.kv.layout import KVSpec
    from ctxwin.kv.lowrank import Weight
    from ctxwin.kv.patch import Patch

log = logging.getLogger("ctxwin")

BASIS_NAME = "ctxwin-basis.st"
BASIS_FORMAT = "1"
FIT = "ctxwin eval basis"
_KV_ITEMSIZE = 2  # budgets are shares of a chunk's KV in bf16


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
        return self.basis.id

    @property
    def rank(self) -> int:
        return self.basis.rank


def find_basis(model: str | Path) -> ModelBasis | None:
    """The basis of a model, or None: of the one beside its weights and the user's own, what was fitted last.

    One that cannot be read or was fitted on other weights is passed over with a warning. Cost: a digest of the weights, once
    a process, and a read of each file, once for every version of it.
    """
    return max(_look_up(model)[0], key=lambda found: found.date, default=None)


def require_basis(model: str | Path) -> ModelBasis:
    """As `find_basis`; ValueError where there is none, with what was passed over and the command that fits one."""
    usable, refused = _look_up(model)
    if not usable:
        why = f" ({'; '.join(refused)}; the log names the file)" if refused else ""
        raise ValueError(
            f"model {name_of(model)!r} has no shared basis{why}; fit one with `{FIT} MODEL`, or take Fidelity(layout='joint')"
        )
    return max(usable, key=lambda found: found.date)


def _look_up(model: str | Path) -> tuple[list[ModelBasis], list[str]]:
    """The bases of a model that can be used, and why others cannot."""
    folder = model_folder(model)
    if folder is None:
        return [], []
    try:
        places, own = measured_files(folder, BASIS_NAME)
    except (OSError, ValueError) as error:
        return [], [f"its weights cannot be read: {_said(error)}"]
    usable, refused = [], []
    for path in places:
        try:
            stat = path.stat()
            found = _read(path, stat.st_size, stat.st_mtime_ns)
        except (OSError, ValueError) as error:
            refused.append(f"one is no basis of this version: {_said(error)}")
            log.warning("%s is not used: %s", path, refused[-1])
            continue
        if found.basis.identity == own:
            usable.append(found)
        else:
            refused.append("one was fitted on other weights")
            log.warning("%s is not used: %s", path, refused[-1])
    return usable, refused


def name_of(model: str | Path) -> str:
    """A model's name without the folders it lies in: a server tells clients of these errors."""
    return str(model) if not Path(model).expanduser().is_dir() else Path(model).name


def _said(error: Exception) -> str:
    """Half a line about an error, without the path that an OSError tells."""
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
    return _ordered(save(tensors, said))


def decode_basis(data: bytes) -> ModelBasis:
    """What `encode_basis` made; ValueError for anything else."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    from ctxwin.kv.basis import SharedBasis
    from ctxwin.kv.lowrank import Weight

    try:
        tensors = load(data)
        said = _metadata(data)
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


def _metadata(data: bytes) -> dict[str, str]:
    (length,) = struct.unpack_from("<Q", data)
    found: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return found


def _ordered(data: bytes) -> bytes:
    """The same file with its header in one order: safetensors writes metadata in that of a hash table."""
    (length,) = struct.unpack_from("<Q", data)
    system_prompt = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    system_prompt += b" " * (-len(system_prompt) % 8)
    return struct.pack("<Q", len(system_prompt)) + system_prompt + data[8 + length :]


def write_basis(made: ModelBasis, model: str | Path, path: Path | None = None) -> Path:
    """Writes a basis to ``path``, else beside the weights, else (a Hub's folder, no right to write) to the user's own.

    Returns its path; raises OSError where none of these can be written.
    """
    if path is not None:
        return write_beside(encode_basis(made), path.name, model, path.parent)
    return write_beside(encode_basis(made), BASIS_NAME, model)


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
    from ctxwin.kv.basis import project
    from ctxwin.kv.patch import compress

    if fidelity.layout == "shared":
        over = served_basis(model, spec, fidelity)
        if over.basis is None:
            return compress(lost, spec, rank=0, layers=fidelity.layers)
        return project(lost, over.basis, spec, weight=over.weight)
    return compress(lost, spec, rank=fidelity.patch_rank, bytes_share=fidelity.bytes_share, layers=fidelity.layers)
