"""Routers to compare with; a module of its own, as Ray sends it to the front's process as a value."""

import itertools
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter


class RoundRobin(RequestRouter):  # type: ignore[misc]  # Ray's class is untyped here
    """One replica after another."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """The replicas in the order in which they should be tried."""
        turns = self.__dict__.setdefault("_turns", itertools.count())
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))
        first = next(turns) % len(ordered)
        return [[replica] for replica in (*ordered[first:], *ordered[:first])]
