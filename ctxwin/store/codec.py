"""Blobs: one frame for tensors and for raw payloads, checked as a whole before anything in it is believed.

Layout, little-endian::

    0   8  magic  b"CTXWBLOB"
    8   2  version (1)
    10  2  kind (1 tensors, 2 bytes, 3 record of a store)
    12  4  header length H
    16  8  body length B
    24  8  zero
    32  H  header: canonical JSON (sorted keys, no blanks)
    ..     zeros up to the next multiple of 64
    ..  B  body; every tensor starts at a multiple of 64 of the blob
    ..  32 SHA-256 of everything before it

There is no pickle and no length that is trusted: a length is first compared with the bytes that are there.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ctxwin.errors import StoreCorrupt

if TYPE_CHECKING:
    import torch

MAGIC: Final = b"CTXWBLOB"
VERSION: Final = 1
ALIGN: Final = 64
PREFIX: Final = struct.Struct("<8sHHIQQ")
SUM_BYTES: Final = 32
MAX_HEADER: Final = 64 << 20

TENSORS: Final = 1
BYTES: Final = 2
RECORD: Final = 3

# Names only: torch is imported by the functions that need it. The order of a dtype's bytes is the machine's own,
# little-endian on every machine that torch supports.
DTYPES: Final = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip

_warned = False
_warn_lock = threading.Lock()


@dataclass(frozen=True)
class Prefix:
    """The checked fixed part of a frame; offsets in bytes from the frame's start."""

    kind: int
    header_bytes: int
    body_bytes: int

    @property
    def body_offset(self) -> int:
        return _aligned(PREFIX.size + self.header_bytes)

    @property
    def total(self) -> int:
        return self.body_offset + self.body_bytes + SUM_BYTES


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def frame_head(kind: int, header: Mapping[str, Any], body_bytes: int) -> bytes:
    """Everything before the body. Raises TypeError or ValueError where ``header`` is not plain JSON (NaN included)."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()
    if len(text) > MAX_HEADER:
        raise ValueError(f"a blob's header must be at most {MAX_HEADER} bytes, got {len(text)}; store bulk as tensors")
    head = PREFIX.pack(MAGIC, VERSION, kind, len(text), body_bytes, 0) + text
    return head + bytes(_aligned(len(head)) - len(head))


def read_prefix(raw: bytes | memoryview, available: int) -> Prefix:
    """Checks the first 32 bytes of a frame of ``available`` bytes; raises StoreCorrupt. O(1)."""
    if len(raw) < PREFIX.size:
        raise StoreCorrupt(f"a blob must have at least {PREFIX.size} bytes, got {len(raw)}")
    magic, version, kind, header_bytes, body_bytes, zero = PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise StoreCorrupt(f"a blob must start with {MAGIC!r}, got {bytes(magic)!r}")
    if version != VERSION or zero:
        raise StoreCorrupt(f"blob version must be {VERSION}, got {version}")
    prefix = Prefix(kind, header_bytes, body_bytes)
    if header_bytes > MAX_HEADER or prefix.total != available:
        raise StoreCorrupt(f"a blob must have {prefix.total} bytes by its prefix, got {available}")
    return prefix


def parse_header(raw: bytes | memoryview) -> dict[str, Any]:
    """The JSON header; raises StoreCorrupt where it is not an object."""
    try:
        header = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(f"a blob's header must be JSON: {error}") from None
    if not isinstance(header, dict):
        raise StoreCorrupt(f"a blob's header must be an object, got {type(header).__name__}")
    return header


def _join(kind: int, header: Mapping[str, Any], parts: Sequence[bytes | memoryview], body_bytes: int) -> bytes:
    head = frame_head(kind, header, body_bytes)
    summed = hashlib.sha256(head)
    for part in parts:
        summed.update(part)
    return b"".join((head, *parts, summed.digest()))


def _open(blob: bytes, kind: int) -> tuple[dict[str, Any], Prefix]:
    if not isinstance(blob, bytes):
        raise TypeError(f"a blob must be bytes, got {type(blob).__name__}")
    prefix = read_prefix(blob[: PREFIX.size], len(blob))
    view = memoryview(blob)
    if hashlib.sha256(view[:-SUM_BYTES]).digest() != blob[-SUM_BYTES:]:
        raise StoreCorrupt("a blob's checksum does not match its content")
    if prefix.kind != kind:
        raise StoreCorrupt(f"blob kind must be {kind}, got {prefix.kind}")
    return parse_header(view[PREFIX.size : PREFIX.size + prefix.header_bytes]), prefix


def _meta(header: dict[str, Any]) -> dict[str, Any]:
    meta = header.get("meta")
    if not isinstance(meta, dict):
        raise StoreCorrupt("a blob's header must have a meta object")
    return meta


def encode_bytes(payload: bytes, meta: Mapping[str, Any] | None = None) -> bytes:
    """Frames a raw payload (an encoded image, JSON). Cost: one copy and one SHA-256."""
    return _join(BYTES, {"meta": dict(meta or {})}, [payload], len(payload))


def decode_bytes(blob: bytes) -> tuple[bytes, dict[str, Any]]:
    """The payload and meta of `encode_bytes`; raises StoreCorrupt on anything that is off."""
    header, prefix = _open(blob, BYTES)
    return blob[prefix.body_offset : prefix.body_offset + prefix.body_bytes], _meta(header)


def encode_tensors(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any] | None = None) -> bytes:
    """Frames named dense tensors of any shape, on any device.

    Args:
        tensors: by name; strided tensors with one of `DTYPES`. Values are stored bit for bit (NaN payloads too).
        meta: plain JSON with str keys; tuples come back as lists.

    Raises:
        TypeError: a dtype or layout that has no raw form here.

    Cost: one copy of the bytes, one SHA-256 (about 1 GB/s a core).
    """
    import torch

    table: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            raise TypeError(
                f"tensor {name!r} must be dense with a dtype of {DTYPES}, got {tensor.dtype} {tensor.layout}"
            )
        pad = _aligned(offset) - offset
        if pad:
            parts.append(bytes(pad))
            offset += pad
        size = tensor.numel() * tensor.element_size()
        table.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
        if size:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            parts.append(memoryview(flat.numpy()))  # type: ignore[arg-type]  # an ndarray is a buffer
        offset += size
    return _join(TENSORS, {"meta": dict(meta or {}), "tensors": table}, parts, offset)


def decode_tensors(blob: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and meta of `encode_tensors`; raises StoreCorrupt on anything that is off.

    The tensors are views on ``blob`` (they keep it alive) and are READ-ONLY: torch cannot enforce that, and writing
    into one would change an immutable bytes object. Clone before any in-place operation. Cost: one SHA-256, no copy.
    """
    import torch

    header, prefix = _open(blob, TENSORS)
    table = header.get("tensors")
    if not isinstance(table, list):
        raise StoreCorrupt("a tensor blob's header must have a tensor table")
    _take_warning()
    tensors: dict[str, torch.Tensor] = {}
    end = 0
    for entry in table:
        name, dtype, shape, offset = _entry(entry)
        kind = getattr(torch, dtype)
        count = math.prod(shape)
        if name in tensors or offset != _aligned(end) or offset + count * kind.itemsize > prefix.body_bytes:
            raise StoreCorrupt(f"tensor {name!r} does not fit its blob")
        end = offset + count * kind.itemsize
        try:
            if count:
                flat = torch.frombuffer(blob, dtype=kind, count=count, offset=prefix.body_offset + offset)
                tensors[name] = flat.view(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=kind)
        except (RuntimeError, ValueError, OverflowError) as error:
            raise StoreCorrupt(f"tensor {name!r} of shape {shape} cannot be made: {error}"[:200]) from None
    if end != prefix.body_bytes:
        raise StoreCorrupt(f"a tensor blob's body must have {end} bytes by its table, got {prefix.body_bytes}")
    return tensors, _meta(header)


def _entry(entry: Any) -> tuple[str, str, tuple[int, ...], int]:
    if not isinstance(entry, dict) or set(entry) != {"name", "dtype", "shape", "offset"}:
        raise StoreCorrupt("a tensor table entry must have name, dtype, shape and offset")
    name, dtype, shape, offset = entry["name"], entry["dtype"], entry["shape"], entry["offset"]
    if not isinstance(name, str) or dtype not in DTYPES or not isinstance(shape, list) or len(shape) > 64:
        raise StoreCorrupt(f"tensor table entry is off: {entry!r}"[:200])
    # bool is an int in Python; sizes are bounded so that their product cannot become absurdly expensive.
    if any(type(n) is not int or not 0 <= n < 1 << 48 for n in (*shape, offset)):
        raise StoreCorrupt(f"tensor {name!r} must have sizes of at least 0, got {shape} at {offset}"[:200])
    return name, dtype, tuple(shape), offset


def _take_warning() -> None:
    """Takes torch's once-a-process warning about read-only buffers, so that no caller ever sees it.

    `warnings.catch_warnings` is not thread-safe, so it is entered once, under a lock, and not around every decode.
    """
    global _warned
    if _warned:
        return
    import torch

    with _warn_lock:
        if not _warned:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.frombuffer(b"\0", dtype=torch.uint8)
            _warned = True
