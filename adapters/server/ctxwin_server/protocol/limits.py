"""Limits of a server, and what is left of them for the media and chunks of one request."""

from dataclasses import dataclass, field

from ctxwin.errors import BudgetExceeded
from ctxwin.fidelity import Fidelity
from ctxwin_client.errors import TooLarge

_TEXT_PER_TOKEN = 16
"""Characters that a context window must hold for each of its tokens, by default: prose has 4 to 5, indented code 10."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one server; every one keeps its memory or its time bounded. What is refused names the bound.

    Attributes:
        max_upload_bytes: of one request's body.
        max_body_bytes: of all bodies that are held at once; with tenants, half of it for each.
        max_json_values: values and names in one JSON body, counted by its commas, colons and brackets before it is parsed.
        max_json_depth: levels of one JSON body.
        max_text: characters of one request's text, checked before it is tokenised; None is 16 for each token of context.
        max_pixels: of the media of one request together, decoded (frames x height x width).
        max_frames: pictures and frames of one request, whatever their size: small ones cost a run of the vision tower, too.
        max_chunks: of one window, placed and evicted, and of one call.
        max_libraries: of a tenant; max_library_files, max_library_bytes: of one of them, which has at most max_chunks passages.
        max_output_bytes, output_ttl: of a tenant's stage outputs that wait for a next stage, and for how many seconds each does.
        max_windows: open windows of a tenant; the least recently used idle one is saved and closed for a new one.
        max_windows_total: open windows of all tenants; one of the tenant that has most is saved and closed for a new one.
        window_ttl_s: seconds after which an idle window is closed; its snapshot stays in the store.
        threads: requests that may be answered at once; tenants that wait share them fairly (`ctxwin_server.process.fair`).
        max_waiting: requests of one tenant that wait for their turn.
        decode_seconds, decode_bytes: processor time and memory of decoding one picture or file, in a process of its own.
        grammar_seconds, grammar_bytes: processor time and memory of one schema or grammar, in a process of its own.
        max_logprobs: log-probabilities of a plain request for each token, as vLLM's own argument; -1 is no limit.
        max_memory: bytes of the server's processes above which new work is refused; None is 80 % of the machine's.
        fidelity: default of windows and chats.
    """

    max_upload_bytes: int = 64 << 20
    max_body_bytes: int = 512 << 20
    max_json_values: int = 300_000
    max_json_depth: int = 200
    max_text: int | None = None
    max_pixels: int = 64 << 20
    max_frames: int = 256
    max_chunks: int = 4096
    max_libraries: int = 32
    max_library_files: int = 1000
    max_library_bytes: int = 1 << 30
    max_output_bytes: int = 256 << 20
    output_ttl: float = 300.0
    max_windows: int = 256
    max_windows_total: int = 1024
    window_ttl_s: float = 3600.0
    threads: int = 64
    max_waiting: int = 1024
    decode_seconds: float = 10.0
    decode_bytes: int = 3 << 29
    grammar_seconds: float = 2.0
    grammar_bytes: int = 1 << 30
    max_logprobs: int = 20
    max_memory: int | None = None
    fidelity: Fidelity = field(default_factory=Fidelity)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("max_logprobs", "fidelity") and value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value!r}")

    def text(self, max_tokens: int) -> int:
        """Return the most characters of text of one request, for an engine with a context of ``max_tokens``."""
        return self.max_text or _TEXT_PER_TOKEN * max_tokens


class Allowance:
    """Remaining allowance for the media and chunks of one request, all of which are in memory at the same time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pixels = self._frames = 0

    def take_picture(self, width: int, height: int) -> None:
        """Count a picture or frame before it is decoded; raise TooLarge beyond a limit."""
        self.take_frames(1, width * height)

    def take_frames(self, frames: int, pixels: int) -> None:
        """Count ``frames`` frames of ``pixels`` pixels together."""
        self._frames += frames
        self._pixels += pixels
        limits = self._limits
        frames_and_pixels = {"frames": (self._frames, limits.max_frames), "pixels": (self._pixels, limits.max_pixels)}
        for unit, (amount, most) in frames_and_pixels.items():
            if amount > most:
                raise TooLarge(
                    f"the media of a request must have at most {most} {unit} together (--max-{unit}), got {amount} or more; "
                    "send them in several requests, scale them down, or raise it"
                )

    def check_chunks(self, count: int) -> None:
        """Raise BudgetExceeded where a window would have ``count`` chunks, evicted ones included."""
        most = self._limits.max_chunks
        if count > most:
            raise BudgetExceeded(
                f"a window must have at most {most} chunks (--max-chunks), evicted ones included, got {count}; evict some "
                "with forget, open a window for them, or raise it",
                needed=count,
                budget=most,
            )
