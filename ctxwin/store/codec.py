"""Blobs: one frame for tensors, for raw payloads, and for the records of a store.

Layout, little-endian::

    0   8  magic  b"CTXWBLOB"
    8   2  version (2)
    10  2  kind (1 tensors, 2 bytes, 3 record with a checksum, 4 record with a keyed code)
    12  4  header length H
    16  8  body length B
    24  8  length S of the tail: 0, 32 or 64
    32  H  header: canonical JSON (sorted keys, no blanks)
    ..     zeros up to the next multiple of 64
    ..  B  body; every tensor starts at a multiple of 64 of the blob
    ..  S  SHA-256 of everything before it, in a record with a keyed code behind that code (`Seal`)

Bytes are digested once for each boundary that they cross: a store seals its records, so what it holds needs no checksum
of its own (``checked=False``). Nothing is pickled, and no length is trusted: it is first compared with the bytes at hand.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from mmap import mmap
from typing import TYPE_CHECKING, Any, Final

from ctxwin.errors import StoreCorrupt

if TYPE_CHECKING:
    import torch

Buffer = bytes | memoryview

MAGIC: Final = b"CTXWBLOB"
VERSION: Final = 2
ALIGN: Final = 64
PREFIX: Final = struct.Struct("<8sHHIQQ")
SUM_BYTES: Final = 32
MAX_HEADER: Final = 64 << 20

TENSORS: Final = 1
BYTES: Final = 2
RECORD: Final = 3
SEALED: Final = 4
_TAILS: Final = {RECORD: SUM_BYTES, SEALED: 2 * SUM_BYTES}

# Names only: torch is imported by the functions that need it. The order of a dtype's bytes is the machine's own,
# little-endian on every machine that torch supports.
DTYPES: Final = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)

_WARNING: Final = threading.Lock()


class ForeignRecordError(StoreCorrupt):
    """A record of another key (or of none) or of another version: nothing to believe, and nothing to delete."""


@dataclass(frozen=True)
class Prefix:
    """The checked fixed part of a frame; offsets in bytes from the frame's start."""

    kind: int
    header_bytes: int
    body_bytes: int
    sum_bytes: int

    @property
    def body_offset(self) -> int:
        """Where the body begins."""
        return _aligned(PREFIX.size + self.header_bytes)

    @property
    def body_end(self) -> int:
        """Where the tail begins."""
        return self.body_offset + self.body_bytes

    @property
    def total(self) -> int:
        """Bytes of the whole frame."""
        return self.body_end + self.sum_bytes


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN


def frame_head(kind: int, header: Mapping[str, Any], body_bytes: int, sum_bytes: int) -> bytes:
    """Everything before the body. Raises TypeError or ValueError where ``header`` is not plain JSON (NaN included)."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()
    if len(text) > MAX_HEADER:
        raise ValueError(f"a blob's header must be at most {MAX_HEADER} bytes, got {len(text)}; store bulk as tensors")
    head = PREFIX.pack(MAGIC, VERSION, kind, len(text), body_bytes, sum_bytes) + text
    return head + bytes(_aligned(len(head)) - len(head))


def read_prefix(raw: Buffer, available: int | None) -> Prefix:
    """Check the first 32 bytes of a frame of ``available`` bytes (None: of any number); raise StoreCorrupt. O(1)."""
    if len(raw) < PREFIX.size:
        raise StoreCorrupt(f"a blob must have at least {PREFIX.size} bytes, got {len(raw)}")
    magic, version, kind, header_bytes, body_bytes, sum_bytes = PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise StoreCorrupt(f"a blob must start with {MAGIC!r}, got {bytes(magic)!r}")
    if version != VERSION:
        # A small one is another ctxwin's, and may be a library's only copy of a file; others are damage.
        kind_of_error = ForeignRecordError if 0 < version < 16 else StoreCorrupt
        raise kind_of_error(f"blob version must be {VERSION}, got {version}")
    if sum_bytes not in (0, SUM_BYTES, 2 * SUM_BYTES):
        raise StoreCorrupt(f"the sum of a blob must have {SUM_BYTES} bytes or twice that, got {sum_bytes}")
    prefix = Prefix(kind, header_bytes, body_bytes, sum_bytes)
    if header_bytes > MAX_HEADER or prefix.total != (prefix.total if available is None else available):
        raise StoreCorrupt(f"a blob must have {prefix.total} bytes by its prefix, got {available}")
    return prefix


def parse_header(head: Buffer, prefix: Prefix) -> dict[str, Any]:
    """The JSON header in a frame's first bytes; raises StoreCorrupt where it is not an object."""
    try:
        header = json.loads(bytes(head[PREFIX.size : PREFIX.size + prefix.header_bytes]))
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(f"a blob's header must be JSON: {error}") from None
    if not isinstance(header, dict):
        raise StoreCorrupt(f"a blob's header must be an object, got {type(header).__name__}")
    return header


class Seal:
    """Code at the end of a store's records, and its check on reading.

    A record binds a value to its key by a SHA-256 over both, which finds damage. With a secret, a keyed code
    (HMAC-SHA256 over head and value's digest) stands in front of that sum, and nobody forges it without the secret: whoever
    lacks it can only cause misses. As the sum covers the code, damage is told from a record of another secret.

    Args:
        secret: at least 16 bytes; None for the checksum alone.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and len(secret) < 16:
            raise ValueError(f"a store's key must have at least 16 bytes, got {len(secret)}")
        self._secret = secret
        self._kind = RECORD if secret is None else SEALED

    def close(self, key: str, value: bytes) -> tuple[bytes, bytes]:
        """Return the bytes before and after ``value`` in its record. Cost: one SHA-256 (about 1 GB/s a core)."""
        head = frame_head(self._kind, {"key": key}, len(value), _TAILS[self._kind])
        hashed = hashlib.sha256(head)
        hashed.update(value)
        code = self._code(hashed.digest())
        hashed.update(code)
        return head, code + hashed.digest()

    def check(self, key: str, head: Buffer, value: Buffer, tail: Buffer) -> None:
        """Check that ``head`` and ``tail`` are what `close` gave for ``key`` and ``value``. Cost: as there.

        Raises:
            ForeignRecordError: they are whole, and sealed with another secret.
            StoreCorrupt: anything else.
        """
        prefix = read_prefix(head, len(head) + len(value) + len(tail))
        if len(tail) != _TAILS.get(prefix.kind):
            raise StoreCorrupt(f"it must be a record, got kind {prefix.kind} with {len(tail)} bytes behind its value")
        hashed = hashlib.sha256(head)
        hashed.update(value)
        code, expected = tail[:-SUM_BYTES], self._code(hashed.digest())
        hashed.update(code)
        if hashed.digest() != tail[-SUM_BYTES:]:
            raise StoreCorrupt("its checksum does not match its content")
        if not hmac.compare_digest(expected, code):
            sealed = "without a key" if not code else "with another key" if expected else "with a key, and none given"
            raise ForeignRecordError(f"it was sealed {sealed}")
        header = parse_header(head, prefix)
        if header != {"key": key}:
            raise StoreCorrupt(f"it was stored under another key, {header.get('key')!r}"[:200])

    def open(self, key: str, record: bytes) -> bytes:
        """The value in a whole record; raises StoreCorrupt. Cost: as `check`, and one copy."""
        prefix = read_prefix(record[: PREFIX.size], len(record))
        view = memoryview(record)
        at, end = prefix.body_offset, prefix.body_end
        self.check(key, view[:at], view[at:end], view[end:])
        return record[at:end]

    def _code(self, summed: bytes) -> bytes:
        return b"" if self._secret is None else hmac.digest(self._secret, summed, "sha256")


def _open(blob: bytes | mmap, kind: int, checked: bool) -> tuple[dict[str, Any], Prefix]:
    if not isinstance(blob, bytes | mmap):
        raise TypeError(f"a blob must be bytes, got {type(blob).__name__}")
    prefix = read_prefix(blob[: PREFIX.size], len(blob))
    if bool(prefix.sum_bytes) != checked:
        raise StoreCorrupt(f"a blob must come {'with' if checked else 'without'} a checksum here")
    view = memoryview(blob)
    if checked and hashlib.sha256(view[: prefix.body_end]).digest() != view[prefix.body_end :]:
        raise StoreCorrupt("a blob's checksum does not match its content")
    if prefix.kind != kind:
        raise StoreCorrupt(f"blob kind must be {kind}, got {prefix.kind}")
    return parse_header(view, prefix), prefix


def _meta(header: dict[str, Any]) -> dict[str, Any]:
    meta = header.get("meta")
    if not isinstance(meta, dict):
        raise StoreCorrupt("a blob's header must have a meta object")
    return meta


def encode_bytes(payload: bytes, meta: Mapping[str, Any]) -> bytes:
    """Frame a raw payload (an encoded image, JSON), without a checksum. Cost: one copy."""
    return frame_head(BYTES, {"meta": dict(meta)}, len(payload), 0) + payload


def decode_bytes(blob: bytes) -> tuple[bytes, dict[str, Any]]:
    """The payload and meta of `encode_bytes`; raises StoreCorrupt on anything that is off."""
    header, prefix = _open(blob, BYTES, checked=False)
    return blob[prefix.body_offset : prefix.body_end], _meta(header)


def encode_tensors(
    tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any] | None = None, *, checked: bool = True
) -> bytes:
    """Frame named dense tensors of any shape, on any device.

    Args:
        tensors: by name; strided tensors with one of `DTYPES`. Values are stored bit for bit (NaN payloads too).
        meta: plain JSON with str keys; tuples come back as lists.
        checked: whether the blob ends with a checksum; not needed for what a store seals.

    Raises:
        TypeError: a dtype or layout that has no raw form here.

    Cost: one copy of the bytes, and one SHA-256 (about 1 GB/s a core) where ``checked``.
    """
    import torch

    head, table, size = _tensors_head(tensors, meta, SUM_BYTES if checked else 0)
    # Nobody has seen these bytes yet, so they may be filled: by torch, which lets other threads run meanwhile.
    blob = bytes(len(head) + size + SUM_BYTES * checked)
    _take_warning()
    frame = torch.frombuffer(blob, dtype=torch.uint8)
    frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for entry in table:
        tensor, begin = tensors[entry["name"]].detach(), len(head) + entry["offset"]
        if tensor.numel():
            body = frame[begin : begin + tensor.numel() * tensor.element_size()]
            body.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    if checked:
        checksum = hashlib.sha256(memoryview(blob)[:-SUM_BYTES]).digest()
        frame[-SUM_BYTES:] = torch.frombuffer(bytearray(checksum), dtype=torch.uint8)
    return blob


def tensor_pieces(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> list[Buffer]:
    """Return what `encode_tensors` returns with ``checked=False`` in pieces to be written one after the other, not copied.

    Args:
        tensors: as there, contiguous and on the host; the pieces are views of them.
        meta: as there.
    """
    head, table, _ = _tensors_head(tensors, meta, 0)
    pieces: list[Buffer] = [head]
    at = 0
    for entry in table:
        raw = raw_bytes(tensors[entry["name"]])
        pieces += [bytes(entry["offset"] - at), raw]
        at = entry["offset"] + len(raw)
    return pieces


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor on the host."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _tensors_head(
    tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any] | None, sum_bytes: int
) -> tuple[bytes, list[dict[str, Any]], int]:
    """Return a frame's bytes before its body, the table of its tensors and the bytes of its body."""
    import torch

    table: list[dict[str, Any]] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES or tensor.layout != torch.strided:
            raise TypeError(f"tensor {name!r} must be dense and of {DTYPES}, got {tensor.dtype} {tensor.layout}")
        offset = _aligned(offset)
        table.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
        offset += tensor.numel() * tensor.element_size()
    return frame_head(TENSORS, {"meta": dict(meta or {}), "tensors": table}, offset, sum_bytes), table, offset


def decode_tensors(blob: bytes | mmap, *, checked: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and meta of `encode_tensors`, with the same ``checked``; raises StoreCorrupt on anything that is off.

    The tensors are views on ``blob`` (they keep it alive) and are READ-ONLY: torch cannot enforce that, and writing
    into one would change an immutable object, or end the process where a file is mapped. Clone before any in-place
    operation. Cost: one SHA-256 where ``checked``, no copy.
    """
    import torch

    header, prefix = _open(blob, TENSORS, checked)
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


@cache
def _take_warning() -> None:
    """Take torch's once-a-process warning about read-only buffers, so that no caller ever sees it.

    `warnings.catch_warnings` is not thread-safe, so it is entered once, under a lock, and not around every decode.
    """
    import torch

    with _WARNING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
