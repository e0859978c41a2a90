"""What a request is about, which replica it goes to, and what the front holds meanwhile: the fleet without Ray."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed; run pip install 'ctxwin[ray]'")

from ray.serve._private.common import DeploymentID, ReplicaID
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from ctxwin_ray import FleetArguments, fleet
from ctxwin_ray.front import Front
from ctxwin_ray.hints import TRIED, Head, Hint, Places, Request, hint_of, window_prefix
from ctxwin_ray.replica import _scope
from ctxwin_ray.router import WindowRouter
from ctxwin_ray.run import running
from ctxwin_server.app.accounts import parse_json
from ctxwin_server.protocol.limits import Limits

PARSE = partial(parse_json, Limits())
A, B = "a" * 64, "b" * 64


def hint(path: str, body: Any = None, **headers: str) -> Hint:
    return hint_of(path, Headers(headers), json.dumps(body).encode() if body is not None else b"", PARSE)


def idle(_: str) -> int:
    return 0


def busy(name: str, running: int = 999) -> Callable[[str], int]:
    return lambda other: running if other == name else 0


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


REPLICAS = [f"r{i}" for i in range(20)]


def opened_by(replica: str, number: int) -> Hint:
    return Hint(window=f"{window_prefix(replica)}{number:012x}")


def test_a_window_goes_to_the_replica_that_opened_it_however_busy_it_is() -> None:
    places = Places(REPLICAS)
    for replica in REPLICAS:
        assert places.order(opened_by(replica, 1), busy(replica))[0] == replica


def test_without_its_replica_a_window_falls_on_one_and_few_move() -> None:
    """Every front finds the same place, whatever order it heard of the replicas in."""
    hints = [opened_by("gone", i) for i in range(4000)]
    places = [Places(REPLICAS).order(hint, idle)[0] for hint in hints]
    assert places == [Places(reversed(REPLICAS)).order(hint, busy("r0"))[0] for hint in hints]
    counts = Counter(places)
    assert len(counts) == 20 and max(counts.values()) < 1.35 * 200
    for known, others in ((REPLICAS[:-1], "r19"), ([*REPLICAS, "new"], "new")):
        moved = [Places(known).order(hint, idle)[0] for hint in hints]
        assert all(old == new or others in (old, new) for old, new in zip(places, moved, strict=True))
    assert 100 < Counter(moved)["new"] < 300


def test_a_conversation_stays_and_a_chunk_leaves_a_place_that_is_much_busier() -> None:
    places = Places(REPLICAS)
    for kind in (Hint(session="s", chunks=frozenset({A})), Hint(chunks=frozenset({A, B}))):
        first = places.order(kind, idle)[0]
        assert places.order(kind, busy(first, 8))[0] == first
        assert (places.order(kind, busy(first, 9))[0] == first) is bool(kind.session)
    assert places.order(Hint(chunks=frozenset({A, B})), idle)[0] == places.order(Hint(chunks=frozenset({A})), idle)[0]


def test_what_names_nothing_goes_to_the_least_busy() -> None:
    few = Places(["x", "y", "z"])
    assert few.order(Hint(), {"x": 2, "y": 0, "z": 1}.__getitem__) == ["y", "z", "x"]
    assert Places([]).order(Hint(window="w"), idle) == []


def test_a_decision_looks_at_as_many_replicas_of_a_thousand_as_of_twenty() -> None:
    def looks(count: int, hint: Hint) -> int:
        looked: list[str] = []

        def running(name: str) -> int:
            looked.append(name)
            return 0

        order = Places(f"r{i}" for i in range(count)).order(hint, running)
        assert len(order) == len(set(order)) == TRIED
        return len(looked)

    for hint in (Hint(), Hint(window="w"), Hint(session="s"), Hint(chunks=frozenset({A}))):
        assert looks(1000, hint) == looks(20, hint) <= 2 * TRIED + 1


def test_the_router_places_replicas_anew_only_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Places] = []

    def places(names: Any) -> Places:
        made.append(Places(names))
        return made[-1]

    monkeypatch.setattr("ctxwin_ray.router.Places", places)
    router = WindowRouter.__new__(WindowRouter)  # a live one needs Ray's event loop
    router._replica_queue_len_cache = {}
    router.initialize_state()
    replicas = [SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("replica"))) for name in REPLICAS]
    request = Request(opened_by("r3", 1), "POST", "/v1/windows", b"", (), b"")

    def first(listed: list[Any]) -> str:
        pending = SimpleNamespace(args=[request], routing_context=SimpleNamespace(should_backoff=False))
        ((replica,), *_) = asyncio.run(router.choose_replicas(listed, pending))
        assert pending.routing_context.should_backoff
        return str(replica.replica_id.unique_id)

    assert [first(replicas) for _ in range(3)] == ["r3"] * 3 and len(made) == 2
    assert first([r for r in replicas if r.replica_id.unique_id != "r3"]) != "r3" and len(made) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": 0}, "replicas must be a number from 1 on"),
        ({"replicas": (4, 2)}, "replicas must be"),
        ({"settings": {"stor": "x"}}, "with underscores: stor must be left out"),
        ({"settings": {"store": "memory:"}}, "must share the windows' versions in a Redis, got 'memory:'"),
        ({"settings": {"store": "tiered:memory:,redis://127.0.0.1:1/0"}}, "cannot be reached"),
        ({"vllm": ["--port", "8000"], "replicas": 1}, "must be without --port"),
    ],
)
def test_fleets_that_cannot_be_are_refused_before_anything_starts(
    arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((ValueError, OSError), match=said):
        fleet(FleetArguments(model="tiny", **arguments))
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("a cluster was started"))
    with pytest.raises((ValueError, OSError), match=said), running(FleetArguments(model="tiny", **arguments)):
        pass


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
        yield Head(200, ())


def test_a_redirect_of_a_replica_leads_to_the_clients_address() -> None:
    """A path with a slash too many is redirected by the replica's app, which says where by its scope alone."""
    sent: list[Request] = []

    class Sent(Replicas):
        async def remote(self, asked: Any) -> AsyncIterator[Any]:
            sent.append(asked)
            yield Head(200, ())

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "scheme": "https", "path": "/v1/windows/", "query_string": b"a=1"}
    headers = [(b"host", b"fleet.example:8443"), (b"connection", b"close"), (b"content-length", b"2")]
    front = Front(Sent(asyncio.Event()), Limits())
    asyncio.run(front.answer(HttpRequest({**scope, "headers": headers, "client": ("a", 1)}, receive)))
    assert str(HttpRequest(_scope(sent[0], None)).url) == "https://fleet.example:8443/v1/windows/?a=1"
    assert sorted(name for name, _ in sent[0].headers) == [b"content-length", b"host"]


def test_bodies_in_hand_are_bounded_before_anybody_has_shown_a_key() -> None:
    async def statuses() -> list[int]:
        ready = asyncio.Event()
        front = Front(Replicas(ready), Limits(max_upload_bytes=100, max_body_bytes=250))

        async def send(size: int, host: str) -> int:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b" " * size, "more_body": False}

            scope = {"type": "http", "method": "POST", "path": "/v1/chunks", "query_string": b"", "headers": []}
            return (await front.answer(HttpRequest({**scope, "client": (host, 1)}, receive))).status_code

        waiting = [asyncio.create_task(send(100, "a"))]
        await asyncio.sleep(0.05)
        refused = [await send(101, "b"), await send(100, "a")]
        waiting.append(asyncio.create_task(send(100, "b")))
        await asyncio.sleep(0.05)
        refused.append(await send(60, "c"))
        ready.set()
        return [*refused, *(await asyncio.gather(*waiting)), await send(100, "a")]

    assert asyncio.run(statuses()) == [413, 429, 429, 200, 200, 200]
