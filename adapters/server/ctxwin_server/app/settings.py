"""Options of a server with windows besides vLLM's arguments, shared by ``ctxwin serve`` and ``vllm serve``."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ctxwin.fidelity import Fidelity, Mode
from ctxwin.store import check_address, parse_bytes
from ctxwin_chats.context_management import Policy
from ctxwin_chats.options import AS_SENT, ChatDefaults
from ctxwin_server.app.audit_log import AuditLog
from ctxwin_server.app.tenants import is_key, load_tenants
from ctxwin_server.protocol.limits import Limits


def _setting(default: Any, text: str, metavar: str = "") -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar or None})


@dataclass(frozen=True)
class Settings:
    """One field for each option: ``--max-windows`` of ``ctxwin serve`` is ``--ctxwin-max-windows`` of ``vllm serve``."""

    store: str = _setting("memory:", "KV and uploads: memory:, disk:PATH, redis://..., tiered:...")
    store_bytes: str = _setting("", "Limit of each tenant's store, e.g. 50GB.")
    registry: str = _setting("", "Store of windows' versions, e.g. redis://...; default: the store.")
    registry_bytes: str = _setting("", "Limit of each tenant's registry; default: 2GiB.")
    libraries: str = _setting("", "Store of libraries that tenants are granted: disk:PATH, redis://...")
    tenants: str = _setting("", "TOML or JSON: API keys, tenants, quotas.", "FILE")
    fidelity: str = _setting("auto", "Default fidelity: auto, exact, patched or blind.")
    windows: str = _setting("off", "Default of plain chats: served with windows or not.", "auto|off")
    context_policy: str = _setting("", "TOML: default context edits of such chats.", "FILE")
    lazy_drops: str = _setting("off", "What chats drop stays in prompts, up to e.g. pictures=8,tokens=4096,turns=10.")
    volatile: str = _setting(
        "off", "What changes in chats' system prompts is served in front of the question.", "late|append|off"
    )
    prefill: str = _setting("off", "What chats will likely send next is computed while the engine idles.", "idle|off")
    outputs: bool = _setting(False, "Keep what forwards give for each token, for a next stage.")
    max_output_bytes: int = _setting(256 << 20, "Most bytes of a tenant's outputs that wait for a next stage.")
    output_ttl: float = _setting(300.0, "Seconds for which an output waits.")
    max_windows: int = _setting(256, "Most open windows per tenant.")
    max_windows_total: int = _setting(1024, "Most open windows of all tenants.")
    window_ttl: float = _setting(3600.0, "Seconds until an idle window is saved and closed.")
    max_upload_bytes: str = _setting("64MiB", "Largest body of a request.")
    max_json_values: int = _setting(300_000, "Most values and names of one JSON body.")
    max_pixels: int = _setting(64 << 20, "Most pixels of one request's media, decoded.")
    max_frames: int = _setting(256, "Most pictures and frames of one request.")
    max_text: int = _setting(0, "Most characters in a request; 0: 16 per token of context.")
    max_chunks: int = _setting(4096, "Most chunks of a window, placed and evicted.")
    max_libraries: int = _setting(32, "Most libraries of a tenant.")
    max_concurrency: int = _setting(64, "Most requests of windows, and tenants' chats, at once.")
    max_memory: str = _setting("", "Memory above which new work is refused; default: 80 % of the machine's.")
    max_waiting: int = _setting(1024, "Most requests per tenant that wait for their turn.")
    private_metrics: bool = _setting(False, "/metrics needs a key as well.")
    metrics_key_file: str = _setting("", "The key that /metrics needs, and that opens nothing else.", "FILE")
    audit_log: str = _setting("", "Records who stored, shared and deleted what, as lines of JSON.", "FILE")

    @classmethod
    def options(cls) -> Iterator[tuple[str, type, Any, str, str | None]]:
        """Yield (name, type, default, help, metavar) of every option."""
        types = get_type_hints(cls)
        for f in fields(cls):
            yield f.name, types[f.name], f.default, f.metadata["help"], f.metadata["metavar"]

    def service(self) -> dict[str, Any]:
        """Return the arguments of `Service`, with the contents of named files.

        Raises ValueError for an invalid value, OSError for a file that cannot be read or, of the audit log, written.
        """
        if self.fidelity not in get_args(Mode):
            raise ValueError(f"--fidelity must be auto, exact, patched or blind, got {self.fidelity!r}")
        if self.windows not in ("auto", "off"):
            raise ValueError(f"--windows must be auto or off, got {self.windows!r}")
        if "mooncake://" in self.store and not self.registry:
            raise ValueError(
                "--store mooncake://... must have a --registry redis://HOST:PORT/DB beside it, got none: Mooncake evicts"
            )
        for address in filter(None, (self.store, self.registry, self.libraries)):
            check_address(address)
        for name in ("store_bytes", "registry_bytes"):
            if getattr(self, name):
                self._size(name)
        if self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency must be > 0, got {self.max_concurrency}")
        try:
            AuditLog(self.audit_log).close()
        except OSError as error:
            raise OSError(f"--audit-log must be a file of this server's alone to write, got {error}") from None
        same = {name for name in vars(self) if name in Limits.__dataclass_fields__}
        same -= {"max_upload_bytes", "max_text", "max_memory", "fidelity"}
        limits = Limits(
            max_upload_bytes=self._size("max_upload_bytes"),
            max_text=self.max_text or None,
            max_memory=self._size("max_memory") if self.max_memory else None,
            window_ttl_s=self.window_ttl,
            threads=self.max_concurrency,
            fidelity=Fidelity(self.fidelity),  # type: ignore[arg-type]
            **{name: getattr(self, name) for name in same},
        )
        policy = Policy.read(Path(self.context_policy)) if self.context_policy else None
        return {
            "limits": limits,
            "tenants": load_tenants(self.tenants) if self.tenants else (),
            "chat_defaults": ChatDefaults(self.windows, policy, AS_SENT.replace(vars(self))),
            "metrics_key": _key_in(self.metrics_key_file) if self.metrics_key_file else "",
            **{name: getattr(self, name) for name in ("private_metrics", "audit_log")},
        }

    def _size(self, name: str) -> int:
        try:
            return parse_bytes(getattr(self, name))
        except ValueError as error:
            raise ValueError(f"--{name.replace('_', '-')}: {error}") from None


def _key_in(path: str) -> str:
    key = Path(path).read_text(encoding="utf-8-sig", errors="replace").strip()
    if not is_key(key):
        raise ValueError(f"--metrics-key-file must be a file with one key in printable ASCII in it, got {path!r}")
    return key
