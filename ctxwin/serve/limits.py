"""What a server allows: sizes, counts and times."""

from __future__ import annotations

from dataclasses import dataclass, field

from ctxwin.fidelity import Fidelity


@dataclass(frozen=True)
class Limits:
    """Bounds of one server; every one keeps its memory bounded.

    Attributes:
        max_upload_bytes: of one request's body.
        max_pixels: of the media of one request together, decoded (frames x height x width).
        max_windows: open windows of a tenant; the least recently used idle one is closed for a new one.
        window_ttl_s: seconds after which an idle window is closed; its snapshot stays in the store.
        threads: requests that may be answered at once; tenants that wait share them fairly (`ctxwin.serve.fair`).
        max_logprobs: log-probabilities of a plain request for each token, as vLLM's own argument; -1 is no limit.
        fidelity: of windows and chats that say nothing else.
    """

    max_upload_bytes: int = 64 << 20
    max_pixels: int = 64 << 20
    max_windows: int = 256
    window_ttl_s: float = 3600.0
    threads: int = 64
    max_logprobs: int = 20
    fidelity: Fidelity = field(default_factory=Fidelity)

    def __post_init__(self) -> None:
        for name in ("max_upload_bytes", "max_pixels", "max_windows", "window_ttl_s", "threads"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)!r}")
