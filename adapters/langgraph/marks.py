"""Sets of placements as short text, for notes that travel in every checkpoint.

A placement is named by its arrival, which no other placement of the window has. Sets of them have patterns: every third
one is another node's, all the oldest were removed. So thousands take some hundred bytes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable


def packed(arrivals: Iterable[int]) -> str:
    """The set as text, at most a byte for 6 arrivals; the empty text for the empty set."""
    arrivals = set(arrivals)
    if not arrivals:
        return ""
    bits = bytearray(max(arrivals) // 8 + 1)
    for arrival in arrivals:
        bits[arrival // 8] |= 1 << arrival % 8
    return base64.b64encode(zlib.compress(bits, 9)).decode()


def unpacked(text: str) -> set[int]:
    """The set that `packed` made the text of."""
    bits = zlib.decompress(base64.b64decode(text)) if text else b""
    return {8 * i + k for i, byte in enumerate(bits) for k in range(8) if byte >> k & 1}
