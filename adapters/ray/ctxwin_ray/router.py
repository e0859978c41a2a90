"""The request router, which runs with every handle of the replicas, that is, in the front's processes."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter

from ctxwin_ray.hints import Hint, Places, Request


class WindowRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is untyped here
    """Sends requests to the places of their windows, conversations and chunks; see `ctxwin_ray.hints.Places`."""

    def initialize_state(self, **_: Any) -> None:
        """Begin without replicas; Ray calls it once."""
        self._candidates: list[Any] = []
        self._places = Places(())
        self._by_name: dict[str, Any] = {}

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """Return the replicas in the order in which to try them."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        hint = request.hint if isinstance(request, Request) else Hint()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if candidate_replicas is not self._candidates:  # Ray makes a new list where replicas come or go
            self._candidates = candidate_replicas
            self._by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            self._places = Places(self._by_name)
        return [[self._by_name[name]] for name in self._places.order(hint, self._running)]

    def _running(self, name: str) -> int:
        return self._replica_queue_len_cache.get(self._by_name[name].replica_id) or 0
