"""Description of a running server, for any holder of a key: ``GET /v1/ctxwin/about``, which ``ctxwin doctor URL`` reads."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ctxwin import __version__
from ctxwin.audit.auditor import auditor_of
from ctxwin.engines import vllm_support as versions
from ctxwin.fidelity import LANES
from ctxwin.profiles import find_profile, resolve
from ctxwin.store.base import Store

if TYPE_CHECKING:
    from ctxwin_server.app.service import Service, TenantState


def describe_server(service: Service, tenant_state: TenantState) -> dict[str, Any]:
    """Return versions, the model and how it is served, the store, and the tenant. Blocks: it writes to the store and reads it."""
    engine, store = tenant_state.engine, tenant_state.engine.repo.store
    fidelity = resolve(service.limits.fidelity, engine.spec.model)
    strategies = auditor_of(engine).evidence_of(engine).record.strategies
    stats = store.stats()
    return {
        "object": "ctxwin.about",
        "status": service.readiness(),
        "version": __version__,
        "vllm": " ".join(versions.installed() or ()),
        "engine": engine.spec.name,
        "models": list(service.models),
        "max_tokens": engine.spec.max_tokens,
        "vision": engine.spec.vision,
        "fidelity": fidelity.mode,
        "profile": find_profile(engine.spec.model) is not None,
        "lanes": [lane for lane in LANES if fidelity.allows(lane)],
        "promoted": sorted(name for name, strategy in strategies.items() if strategy.promoted),
        "store": {"fault": store_fault(store), "items": stats.items, "bytes": stats.bytes, "limit": store.limit()},
        "windows": service.chat_defaults.windows,
        "tenant": tenant_state.tenant,
        "tenants": service.authentication.keys.tenants,
        "keys": bool(service.authentication.keys.by_hash),
        "metrics_open": service.authentication.metrics_open,
    }


def store_fault(store: Store) -> str:
    """Return why a store does not store and return a value; "" if it does."""
    key, value = f"check/{secrets.token_hex(8)}", b"ctxwin"
    try:
        if not store.put(key, value):
            return "it takes no new value: it is full of leased ones"
        stored = store.get(key)
        store.delete(key)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if stored == value else "what was written was not found again"
