"""Snapshots that come from clients: taken where they are true, refused where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ctxwin.serve.limits import Limits
from serve.serving import Server, serving
from serve.test_routes import call


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Limits(max_pixels=100_000, max_windows=8, window_ttl_s=1000)) as running:
        yield running


def opened(server: Server, **body: object) -> str:
    return str(call(server, "/v1/windows", {"system_prompt": "h", **body})[1]["id"])


@pytest.fixture(scope="module")
def snapshot(server: Server) -> str:
    window = opened(server, budget=500)
    call(server, f"/v1/windows/{window}/append", {"chunk": {"type": "text", "text": "hello there"}})
    return json.dumps(call(server, f"/v1/windows/{window}/snapshot")[1])


@pytest.mark.parametrize(
    "lie",
    [
        lambda s: s["placed"][0].update(tokens=-100),  # room for more than the budget
        lambda s: s["placed"][0].update(advance=-50),  # positions below 0 reach the engine
        lambda s: s["placed"][0].update(advance=10**7),
        lambda s: s.update(system_prompt_advance=-(10**6)),
        lambda s: s.update(system_prompt_tokens=-(10**6)),
        lambda s: s.update(placed=s["placed"] * 2),
        lambda s: s["placed"][0].update(chunk_id="0" * 64),
        lambda s: s.update(budget=-5),
        lambda s: s.update(budget=6),
        lambda s: s.update(arrivals=-3),
        lambda s: s["placed"][0]["chunk"].update(parts=[{"kind": "tokens", "ids": [10**8]}]),
    ],
)
def test_a_snapshot_that_lies_is_refused(server: Server, snapshot: str, lie: Callable[[Any], None]) -> None:
    data = json.loads(snapshot)
    lie(data)
    status, answer = call(server, "/v1/windows", {"snapshot": data})
    assert (status, answer.get("error", {}).get("code")) == (400, "invalid_value"), answer


def test_a_snapshot_that_does_not_is_taken(server: Server, snapshot: str) -> None:
    status, answer = call(server, "/v1/windows", {"snapshot": json.loads(snapshot)})
    assert (status, answer["tokens"]) == (200, json.loads(snapshot)["system_prompt_tokens"] + 4)
