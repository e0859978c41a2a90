"""The request router: it runs beside every handle of the replicas, that is, in the front's processes.

Ray sends this module there as a value, so it holds no state; `ctxwin.adapters.ray.owners` does.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter

from ctxwin.adapters.ray import owners
from ctxwin.adapters.ray.hints import Candidate, Hint, Request, rank


class WindowRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is untyped here
    """Sends requests where their windows and chunks are; see `ctxwin.adapters.ray.hints.rank`."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """The replicas in the order in which they should be tried."""
        asked = pending_request.args[0] if pending_request is not None and pending_request.args else None
        hint = asked.hint if isinstance(asked, Request) else Hint()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        known = {hint.window: owner} if (owner := owners.LATEST.get(hint.window)) else {}
        return [[by_name[c.name]] for c in rank(hint, [self._candidate(r) for r in candidate_replicas], known)]

    def _candidate(self, replica: Any) -> Candidate:
        said = replica.routing_stats or {}
        running = self._replica_queue_len_cache.get(replica.replica_id) or 0
        windows = frozenset(said.get("windows", ()))
        return Candidate(replica.replica_id.unique_id, windows, said.get("chunks", {}), running)
