"""What a running server says about itself, to whoever has a key: ``GET /v1/ctxwin/about``, which ``ctxwin doctor URL`` reads."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ctxwin import __version__
from ctxwin.engines.vllm.lifecycle import versions
from ctxwin.fidelity import LANES
from ctxwin.profiles import find_profile, resolve
from ctxwin.store.base import Store
from ctxwin.trust.auditor import auditor_of

if TYPE_CHECKING:
    from ctxwin.serve.service import Service, Space


def about(service: Service, space: Space) -> dict[str, Any]:
    """Versions, the model and how it is served, the store, and who is served. Blocks: it writes to the store and reads back."""
    engine, repo = space.engine, space.engine.repo
    fidelity = resolve(service.limits.fidelity, engine.spec.model)
    ways = auditor_of(engine).ledger(engine).record.ways
    stats = repo.store.stats()
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
        "promoted": sorted(name for name, way in ways.items() if way.promoted),
        "store": {
            "fault": fault_of(repo.store),
            "items": stats.items,
            "bytes": stats.bytes,
            "limit": repo.store.limit(),
        },
        "windows": service.windows,
        "tenant": space.tenant,
        "tenants": service.keys.tenants,
        "keys": bool(service.keys.by_hash),
        "metrics_open": not (service.private_metrics and service.keys.by_hash) and not service.metrics_keys.by_hash,
    }


def fault_of(store: Store) -> str:
    """What is wrong with a store that should take and give back a value; "" where it does."""
    key, value = f"check/{secrets.token_hex(8)}", b"ctxwin"
    try:
        if not store.put(key, value):
            return "it takes no new value: it is full of leased ones"
        found = store.get(key)
        store.delete(key)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == value else "what was written was not found again"
