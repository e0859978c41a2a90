"""What several servers remember of one conversation's prompts: they serve and foresee what a single one would."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chats.changing_prompts import DIALECTS, body, user, words
from ctxwin.store import open_store
from ctxwin.store.disk import DiskStore
from ctxwin_chats.prediction import Histories, Prediction
from ctxwin_chats.shared_records import MOST_BYTES, SharedConversations
from ctxwin_chats.volatile import VolatilePrompts


class Server:
    """What one server remembers of prompts; without a folder it shares nothing."""

    def __init__(self, folder: str = "") -> None:
        self.volatile = VolatilePrompts(16, 1e9)
        self.histories = Histories(16, 1e9, lambda prediction: None)
        store = open_store(f"disk:{folder}" if folder else "memory:")
        store.shared = True  # as a Redis is, whose records may change hands at any time
        self.counts: list[str] = []
        saved = [*self.volatile.saved(), *self.histories.saved()]
        self.shared = SharedConversations(store, saved, 64, 1e9, self.counts.append)

    def serve(self, data: dict[str, Any], *, appends: bool) -> tuple[str, Prediction | None]:
        """The body as it is served, and what is foreseen behind it."""
        if (reading := self.shared.begin("n")) is not None:
            reading.ended.result(60)
        served = copy.deepcopy(data)
        late = self.volatile.take(served, "n", words, "n")
        turns = served.get("messages", served.get("input"))
        foresight = self.histories.follow(served, turns, "n", record_name="n")
        self.volatile.place(served, late, words, as_system=True, appends=appends)
        self.shared.save("n")
        self.shared.flush(60)
        return json.dumps(served), foresight.next


@contextmanager
def fleet(servers: int) -> Iterator[list[Server]]:
    with TemporaryDirectory() as folder:
        running = [Server(folder) for _ in range(servers)]
        yield running
        for server in running:
            server.shared.close()
            assert not {"failed", "refused"} & {*server.counts}


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2), st.lists(st.sampled_from(["Rule.", "Other.", "It is late.", "It is 3."]), max_size=2),
        st.integers(0, 3),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DIALECTS[:-1]), REQUESTS, st.booleans())
def test_servers_that_alternate_serve_the_prompts_of_one(
    dialect: str, requests: list[tuple[int, list[str], int]], appends: bool
) -> None:
    """System prompts that change and turns that leave the front, each request at a server of its own."""
    alone = Server()
    with fleet(3) as servers:
        for number, (at, lines, dropped) in enumerate(requests):
            turns = [user(f"turn {i}") for i in range(number + 1)]
            sent = body(dialect, ["You watch doors.", *lines, "You are brief."], "\n", turns[min(dropped, number) :])
            (text, foreseen), (expected, by_one) = (
                server.serve(sent, appends=appends) for server in (servers[at], alone)
            )
            assert text == expected
            assert (foreseen and (foreseen.body, foreseen.leaves)) == (by_one and (by_one.body, by_one.leaves))


def test_a_habit_is_known_to_the_next_server() -> None:
    """A server foresees from the first request on what the client did at another one."""
    with fleet(2) as (first, second):
        for i in range(4):
            first.serve({"messages": [user(f"turn {j}") for j in range(max(0, i - 1), i + 2)]}, appends=False)
        _, foreseen = second.serve({"messages": [user(f"turn {j}") for j in range(3, 6)]}, appends=False)
        assert foreseen is not None and foreseen.body["messages"] == [user("turn 4"), user("turn 5")]
        assert second.counts == ["taken_up", "written"]


def test_what_is_too_large_stays_where_it_is() -> None:
    with fleet(2) as (first, second):
        large = body("chat", ["a" * (MOST_BYTES // 2), "b"], "\n", [user("hi")])
        first.serve(large, appends=True)
        first.serve({**large, "messages": [*large["messages"], user("there")]}, appends=True)
        second.serve(large, appends=True)
        assert first.counts == ["refused"] * 2 and second.counts == ["refused"]
        for server in (first, second):
            server.counts.clear()


@pytest.mark.parametrize("turns", [None, 3, [], [{"role": "system", "content": "s"}], "text", [user("hi")]])
def test_a_conversation_without_a_name_is_known_by_its_first_turn(turns: Any) -> None:
    from ctxwin_chats.continuation import first_turn

    name = first_turn(turns)
    assert bool(name) == (turns in (3, "text", [user("hi")]))
    if turns == [user("hi")]:
        system = {"role": "system", "content": "other"}
        assert first_turn([system, user("hi"), user("more")]) == name != first_turn([user("ho")])


def test_what_is_read_before_the_first_write_ended_replaces_nothing_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's next request comes while the record of its first one is being written: it is read, and is an older one."""
    server, gate, writing = Server(str(tmp_path)), threading.Event(), threading.Event()
    claim = DiskStore.claim

    def wait_and_claim(store: DiskStore, name: str) -> Any:
        writing.set()
        assert gate.wait(60)
        return claim(store, name)

    monkeypatch.setattr(DiskStore, "claim", wait_and_claim)
    prompts = [body("chat", ["Rule.", f"It is {n}."], " ", [user(f"{n}") for n in range(n + 1)]) for n in range(2)]
    server.volatile.take(prompts[0], "n", words, "n")
    server.shared.save("n")
    assert writing.wait(60), "the record is in the store, and its writer does not know of it yet"
    reading = server.shared.begin("n")
    assert reading is not None
    server.volatile.take(prompts[1], "n", words, "n")
    remembered = server.volatile.find_saved("n")
    gate.set()
    reading.ended.result(60)
    assert server.volatile.find_saved("n") == remembered
    server.shared.close()


def test_a_request_that_is_cancelled_leaves_the_record_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of a conversation come at once, and the client of the first one leaves while their record is taken up."""
    first, second = Server(str(tmp_path)), Server(str(tmp_path))
    second.shared._wait_s = 60.0
    first.serve(body("chat", ["Rule.", "It is 1."], " ", [user("1")]), appends=False)
    inside, gate = threading.Event(), threading.Event()
    take_up = second.shared._take_up

    def wait_and_take_up(record_name: str, raw: bytes) -> None:
        inside.set()
        assert gate.wait(60)
        take_up(record_name, raw)

    monkeypatch.setattr(second.shared, "_take_up", wait_and_take_up)

    async def main() -> str:
        requests = [asyncio.create_task(second.shared.open("n", {})) for _ in range(2)]
        await asyncio.to_thread(inside.wait, 60)
        await asyncio.sleep(0.01)  # both stand behind the record
        requests[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await requests[0]
        gate.set()
        return await asyncio.wait_for(requests[1], 60)

    assert asyncio.run(main()) == "n"
    assert second.counts == ["taken_up"]


def test_a_store_that_hangs_keeps_no_request_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More conversations than threads that wait for the store, and requests without a name among them."""
    server, gate = Server(str(tmp_path)), threading.Event()
    monkeypatch.setattr(DiskStore, "claim", lambda store, name: gate.wait(60) and (1, b""))

    async def main() -> list[str]:
        requests = [server.shared.open("" if i % 2 else f"n {i}", {"messages": [user(f"{i}")]}) for i in range(12)]
        return await asyncio.wait_for(asyncio.gather(*requests), 30)

    try:
        names = asyncio.run(main())
        assert len(set(names)) == 12 and not server.counts, "no record was read yet"
    finally:
        gate.set()
        server.shared.close()
