"""What a request is about, which replica it goes to, and what the front holds meanwhile: the fleet without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed; run pip install 'ctxwin[ray]'")

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from ctxwin_server.limits import Limits
from ctxwin_server.ray import FleetArguments, fleet
from ctxwin_server.ray.front import Front
from ctxwin_server.ray.hints import Candidate, Head, Hint, hint_of, rank

PARSE = Limits().parse
A, B = "a" * 64, "b" * 64


def hint(path: str, body: Any = None, **headers: str) -> Hint:
    return hint_of(path, Headers(headers), json.dumps(body).encode() if body is not None else b"", PARSE)


def names(asked: Hint, *candidates: Candidate, **owners: str) -> list[str]:
    return [candidate.name for candidate in rank(asked, candidates, owners)]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/windows/w1", None, Hint(window="w1")),
        ("/v1/windows/w1/append", {"chunk": A}, Hint(window="w1")),
        ("/v1/windows", {"snapshot": {"placed": [{"chunk_id": A}, {"chunk_id": B}]}}, Hint(chunks=frozenset({A, B}))),
        ("/v1/chat/completions", {"messages": [{"content": [{"chunk": A}]}], "user": "u"}, Hint("", "user:u", frozenset({A}))),
        ("/v1/chat/completions", [], Hint()),
        ("/v1/windowsill/w1", None, Hint()),
        ("/v1/windows/../etc", None, Hint()),
    ],
)  # fmt: skip
def test_what_a_request_is_about(path: str, body: Any, expected: Hint) -> None:
    assert hint(path, body) == expected


def test_a_session_by_its_header_and_a_body_that_is_no_json() -> None:
    assert hint("/v1/chat/completions", {}, **{"x-session-id": "s"}).session == "session:s"
    assert hint_of("/v1/chat/completions", Headers(), b"{" * 100_000, PARSE) == Hint()
    assert hint_of("/v1/chat/completions", Headers(), b"[" + b"[]," * 1_000_000 + b"[]]", PARSE) == Hint()


def test_the_owner_comes_first_then_chunks_then_load() -> None:
    idle, busy = Candidate("idle"), Candidate("busy", frozenset({"w"}), {A: 10}, running=9)
    rich = Candidate("rich", frozenset(), {A: 10, B: 5}, running=5)
    assert names(Hint(window="w"), idle, rich, busy)[0] == "busy"
    assert names(Hint(window="w"), idle, rich, busy, w="idle")[:2] == ["idle", "busy"], (
        "an answer is newer than a report"
    )
    assert names(Hint(chunks=frozenset({A, B})), idle, busy, rich) == ["rich", "busy", "idle"]
    assert names(Hint(), busy, rich, idle) == ["idle", "rich", "busy"]
    assert names(Hint(), Candidate("x", frozenset({"1", "2"})), Candidate("y", frozenset({"3"}))) == ["y", "x"]


def test_what_nobody_holds_falls_on_one_replica_and_few_move() -> None:
    four = [Candidate(f"r{i}", running=i) for i in range(4)]
    places = {i: names(Hint(window=f"w{i}"), *four)[0] for i in range(400)}
    assert places == {i: names(Hint(window=f"w{i}"), *reversed(four))[0] for i in range(400)}
    assert min(list(places.values()).count(c.name) for c in four) > 60
    fewer = {i: names(Hint(window=f"w{i}"), *four[:3])[0] for i in range(400)}
    assert all(fewer[i] == places[i] for i in places if places[i] != "r3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": 0}, "replicas must be a number from 1 on"),
        ({"replicas": (4, 2)}, "replicas must be"),
        ({"settings": {"stor": "x"}}, "with underscores, got stor"),
        ({"settings": {"store": "memory:"}}, "must share the windows' versions in a Redis, got 'memory:'"),
        ({"settings": {"store": "tiered:memory:,redis://127.0.0.1:1/0"}}, "cannot be reached"),
        ({"vllm": ["--port", "8000"], "replicas": 1}, "no address of their own, got --port"),
    ],
)
def test_fleets_that_cannot_be_are_refused_before_anything_starts(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said):
        fleet(FleetArguments(model="tiny", **arguments))


def test_arguments_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        FleetArguments(model="tiny", replica=2)  # type: ignore[call-arg]


class Replicas:
    """Stands for Ray's handle: a replica that answers when ``ready`` says so."""

    def __init__(self, ready: asyncio.Event) -> None:
        self.ready = ready

    def options(self, **_: Any) -> Replicas:
        return self

    async def remote(self, asked: Any) -> AsyncIterator[Any]:
        await self.ready.wait()
        yield Head(200, (), "one")


def test_bodies_in_hand_are_bounded_before_anybody_has_shown_a_key() -> None:
    async def statuses() -> list[int]:
        ready = asyncio.Event()
        front = Front(Replicas(ready), Limits(max_upload_bytes=100, max_body_bytes=250))

        async def send(size: int, host: str) -> int:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b" " * size, "more_body": False}

            scope = {"type": "http", "method": "POST", "path": "/v1/chunks", "query_string": b"", "headers": []}
            return (await front(HttpRequest({**scope, "client": (host, 1)}, receive))).status_code

        waiting = [asyncio.create_task(send(100, "a"))]
        await asyncio.sleep(0.05)
        refused = [await send(101, "b"), await send(100, "a")]
        waiting.append(asyncio.create_task(send(100, "b")))
        await asyncio.sleep(0.05)
        refused.append(await send(60, "c"))
        ready.set()
        return [*refused, *(await asyncio.gather(*waiting)), await send(100, "a")]

    assert asyncio.run(statuses()) == [413, 429, 429, 200, 200, 200]
