"""What a server with windows takes beside vLLM's arguments, each said once: for ``ctxwin serve`` and for ``vllm serve``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ctxwin.fidelity import Fidelity, Mode
from ctxwin.serve.context_management import Policy
from ctxwin.serve.limits import Limits
from ctxwin.serve.tenants import Tenant, load_tenants
from ctxwin.store import parse_bytes


@dataclass(frozen=True)
class Options:
    """`Settings`, checked, with the files that they name read.

    Attributes:
        store: where KV, patches, embeddings and uploads are kept (`open_store`); each tenant has its own in it.
        store_bytes: limit of a tenant's store unless the tenants file names another.
        tenants: see `ctxwin.serve.tenants`.
        private_metrics: whether ``/metrics`` needs a key where there are keys.
        policy: what is cleared from plain chats that have windows and say nothing of it.
        windows: ``auto`` puts windows behind plain chats that say nothing, ``off`` behind those that ask for it.
    """

    store: str = "memory:"
    store_bytes: int | str | None = None
    tenants: Sequence[Tenant] = ()
    private_metrics: bool = False
    windows: str = "off"
    policy: Policy | None = None
    limits: Limits = field(default_factory=Limits)


def _setting(default: Any, text: str, shown: str = "") -> Any:
    return field(default=default, metadata={"help": text, "metavar": shown or None})


@dataclass(frozen=True)
class Settings:
    """One option each: ``--max-windows`` of ``ctxwin serve`` is ``--ctxwin-max-windows`` of ``vllm serve``."""

    store: str = _setting("memory:", "KV and uploads: memory:, disk:PATH, redis://..., tiered:...")
    store_bytes: str = _setting("", "Limit of each tenant's store, e.g. 50GB.")
    tenants: str = _setting("", "TOML or JSON: API keys, tenants, quotas.", "FILE")
    fidelity: str = _setting("auto", "Default fidelity: auto, exact, patched or blind.")
    windows: str = _setting("off", "Windows behind plain chats that say nothing.", "auto|off")
    context_policy: str = _setting("", "TOML: what such chats lose when they say nothing of it.", "FILE")
    max_windows: int = _setting(256, "Most open windows per tenant.")
    max_windows_total: int = _setting(1024, "Most open windows of all tenants.")
    window_ttl: float = _setting(3600.0, "Seconds until an idle window is put aside.")
    max_upload_bytes: str = _setting("64MiB", "Largest body of a request.")
    max_json_values: int = _setting(300_000, "Most values and names of one JSON body.")
    max_pixels: int = _setting(64 << 20, "Most pixels of one request's media, decoded.")
    max_frames: int = _setting(256, "Most pictures and frames of one request.")
    max_text: int = _setting(0, "Most characters in a request; 0: 16 per token of context.")
    max_chunks: int = _setting(4096, "Most chunks of a window, placed and evicted.")
    max_concurrency: int = _setting(64, "Most requests of windows, and tenants' chats, at once.")
    max_waiting: int = _setting(1024, "Most requests per tenant that wait for their turn.")
    private_metrics: bool = _setting(False, "/metrics needs a key as well.")

    @classmethod
    def described(cls) -> Iterator[tuple[str, type, Any, str, str | None]]:
        """(name, type, default, help, metavar) of every option."""
        types = get_type_hints(cls)
        for f in fields(cls):
            yield f.name, types[f.name], f.default, f.metadata["help"], f.metadata["metavar"]

    def options(self) -> Options:
        """Raises ValueError for a value that cannot be, OSError for a file that cannot be read."""
        if self.fidelity not in get_args(Mode):
            raise ValueError(f"--fidelity must be auto, exact, patched or blind, got {self.fidelity!r}")
        if self.windows not in ("auto", "off"):
            raise ValueError(f"--windows must be auto or off, got {self.windows!r}")
        same = {name for name in vars(self) if name in Limits.__dataclass_fields__}
        same -= {"max_upload_bytes", "max_text", "fidelity"}
        limits = Limits(
            max_upload_bytes=parse_bytes(self.max_upload_bytes),
            max_text=self.max_text or None,
            window_ttl_s=self.window_ttl,
            threads=self.max_concurrency,
            fidelity=Fidelity(self.fidelity),  # type: ignore[arg-type]
            **{name: getattr(self, name) for name in same},
        )
        return Options(
            store=self.store,
            store_bytes=self.store_bytes or None,
            tenants=load_tenants(self.tenants) if self.tenants else (),
            private_metrics=self.private_metrics,
            windows=self.windows,
            policy=Policy.read(Path(self.context_policy)) if self.context_policy else None,
            limits=limits,
        )
