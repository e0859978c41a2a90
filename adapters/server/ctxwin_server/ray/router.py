"""The request router, which runs with every handle of the replicas, that is, in the front's processes.

Ray sends this module there as a value, so it holds no state; `ctxwin_server.ray.owners` does.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter

from ctxwin_server.ray import owners
from ctxwin_server.ray.hints import Candidate, Hint, Request, rank


class WindowRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is untyped here
    """Sends requests to the replicas that hold their windows and chunks; see `ctxwin_server.ray.hints.rank`."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """Return the replicas in the order in which to try them."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        hint = request.hint if isinstance(request, Request) else Hint()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        owned = {hint.window: owner} if (owner := owners.LATEST.get(hint.window)) else {}
        return [[by_name[c.name]] for c in rank(hint, [self._candidate(r) for r in candidate_replicas], owned)]

    def _candidate(self, replica: Any) -> Candidate:
        stats = replica.routing_stats or {}
        running = self._replica_queue_len_cache.get(replica.replica_id) or 0
        windows = frozenset(stats.get("windows", ()))
        return Candidate(replica.replica_id.unique_id, windows, stats.get("chunks", {}), running)
