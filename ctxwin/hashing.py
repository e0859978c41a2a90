"""Content identity: SHA-256 over a canonical, type-tagged, length-prefixed encoding.

Two values with the same digest are the same value of the same type: ``1``, ``1.0``, ``True`` and ``"1"`` all
differ, and no concatenation of parts equals another (CVE-2025-25183, CVE-2025-46722 came from weaker encodings).
Digests are never truncated.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1 << 16)
def _integer(value: int) -> bytes:
    raw = str(value).encode()
    return b"i" + struct.pack(">Q", len(raw)) + raw


def _feed(h: Any, value: Any) -> None:
    if isinstance(value, str):  # most parts are digests
        try:
            raw = value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be Unicode, got half of a surrogate pair, {value[error.start]!r}") from None
        h.update(b"s" + struct.pack(">Q", len(raw)) + raw)
    elif value is None:
        h.update(b"N")
    elif isinstance(value, bool):
        h.update(b"T" if value else b"F")
    elif isinstance(value, int):
        h.update(_integer(int(value)))  # equal numbers share a cached encoding, members of an enumeration as well
    elif isinstance(value, float):
        h.update(b"f" + struct.pack(">d", value))
    elif isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value).cast("B")
        h.update(b"b" + struct.pack(">Q", len(view)))
        h.update(view)
    elif isinstance(value, Mapping):
        h.update(b"m" + struct.pack(">Q", len(value)))
        for key in sorted(value, key=str):
            _feed(h, key)
            _feed(h, value[key])
    elif isinstance(value, Sequence):
        h.update(b"l" + struct.pack(">Q", len(value)))
        if set(map(type, value)) == {int}:  # token ids: thousands, and few of them different
            h.update(b"".join(map(_integer, value)))
        else:
            for item in value:
                _feed(h, item)
    else:
        raise TypeError(f"identity must be of None, bool, int, float, str, bytes, list or dict, got {type(value)}")


def digest(*parts: Any) -> str:
    """Return the hexadecimal SHA-256 of ``parts``; raises TypeError for a type without a canonical form."""
    h = hashlib.sha256(b"l" + struct.pack(">Q", len(parts)))  # as a list is fed
    for part in parts:
        _feed(h, part)
    return h.hexdigest()
