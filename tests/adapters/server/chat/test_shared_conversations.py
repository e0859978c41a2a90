"""Windows behind plain chats that several servers share through a Redis: re-prefill is the oracle, one server's count another."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from adapters.server.chat.test_conversations import EXACT, PARTS, PATCHED, Chat, assert_exact, computed
from ctxwin import Fidelity
from ctxwin.hashing import digest
from ctxwin.store import open_store
from ctxwin.store.base import Store
from ctxwin_chats.shared_records import SharedConversations
from store.redis_server import Server as Redis
from twins import twins

pytestmark = pytest.mark.redis
FLEETS = itertools.count()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    with Redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@dataclass
class Server:
    """One server of a fleet: its own memory, and the fleet's store."""

    store: Store
    places: int = 1 << 16
    ttl: float = 3600.0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chat = Chat(store=self.store)
        self.shared = SharedConversations(self.store, self.chat.known.saved(), self.places, self.ttl, self.count, 60.0)

    def count(self, result: str) -> None:
        self.counts[result] += 1

    def ask(self, parts: list[str], name: str, fidelity: Fidelity = EXACT, *, written: bool = True) -> Any:
        """Answer a request; ``written``: and wait until the store has its conversation."""
        record_name = asyncio.run(self.shared.open(name, {}))
        turn = self.chat.turn(parts, name, fidelity, record_name)
        self.chat.known.expect_write_back(turn)
        self.chat.known.finish(turn, finished=True)
        self.shared.save(record_name)
        if written:
            self.shared.flush()
        return turn


def fleet(redis: Redis, servers: int = 2, **options: Any) -> list[Server]:
    """Servers of a fleet with a part of the Redis to itself."""
    tenant = f"fleet {next(FLEETS)}"
    return [Server(open_store(redis.url, tenant=tenant), **options) for _ in range(servers)]


SERVERS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), PARTS), max_size=9)


@pytest.fixture(scope="module", autouse=True)
def where(redis: Redis) -> Iterator[None]:
    PLACE["redis"] = redis
    yield
    PLACE.clear()


PLACE: dict[str, Redis] = {}


def check_alternation(requests: list[tuple[int, bool, list[str]]]) -> None:
    """One conversation at random servers, whose records are written before the next request or not."""
    servers = fleet(PLACE["redis"], 3)
    for server, written, parts in requests:
        prompt = ["sys", *parts, "why?"]
        assert_exact(servers[server].ask(prompt, "n", written=written), prompt)
    for server in servers:
        server.shared.close()
        assert not server.counts["failed"] and not server.counts["refused"]


test_servers_that_alternate_answer_as_a_re_prefill, test_many_servers_do = twins(check_alternation, 20, 150, SERVERS)


def check_one_server(turns: list[tuple[int, list[str]]]) -> None:
    """What is computed and in which lanes, where each record is there in time, is what one server computes."""
    servers, alone = fleet(PLACE["redis"]), Chat()
    for server, parts in turns:
        prompt = ["sys", *parts, "why?"]
        one, other = alone.ask(prompt, "n"), servers[server].ask(prompt, "n")
        assert (other.lanes, other.edits, computed(other)) == (one.lanes, one.edits, computed(one))


TURNS = st.lists(st.tuples(st.integers(0, 1), PARTS), max_size=7)
test_a_fleet_computes_what_one_server_does, test_many_fleets_do = twins(check_one_server, 20, 150, TURNS)


def test_what_has_left_the_front_is_known_to_the_next_server(redis: Redis) -> None:
    """Survivors are told by what they were conditioned on, which is nowhere but in the record."""
    alone, name = Chat(), "n"
    first, second, stranger = fleet(redis, 3)
    before, slid = ["sys", "aaaa", "bbbb", "cccc", "q1"], ["sys", "bbbb", "cccc", "q1", "dddd", "q2"]
    for chat in (alone, first):
        chat.ask(before, name, PATCHED)
    expected, taken = alone.ask(slid, name, PATCHED), second.ask(slid, name, PATCHED)
    assert taken.lanes == expected.lanes and taken.lanes["survivor"] == len("bbbbcccc")
    assert taken.edits == expected.edits and computed(taken) == computed(expected)
    assert second.counts == {"taken_up": 1, "written": 1}
    assert "survivor" not in stranger.chat.ask(slid, name, PATCHED).lanes


def test_a_former_owner_writes_nothing(redis: Redis) -> None:
    """It is overtaken with a request in hand: the record stays its successor's, and the next request takes it back."""
    first, second = fleet(redis)
    name, parts = "n", ["sys", "aaaa", "why?"]
    first.ask(parts, name)
    record_name = asyncio.run(first.shared.open(name, {}))
    in_hand = first.chat.turn([*parts, "bbbb", "when?"], name, EXACT, record_name)
    second.ask([*parts, "cccc", "who?"], name)
    (key,) = first.store.list("conversation/")
    record = first.store.read(key)
    first.chat.known.finish(in_hand, finished=True)
    for _ in range(3):
        first.shared.save(record_name)
        first.shared.flush()
    assert first.counts == {"written": 1, "fenced_off": 3} and first.store.read(key) == record
    back = first.ask([*parts, "cccc", "who?", "dddd", "where?"], name)
    assert first.counts["taken_up"] == 1 and first.counts["written"] == 2
    assert back.lanes["resident"] == len("sysaaaawhy?ccccwho?") and computed(back) == len("ddddwhere?")


def test_two_servers_that_begin_one_conversation_at_once_are_not_both_its_owner(redis: Redis) -> None:
    servers, name = fleet(redis, 4), "n"
    start = threading.Barrier(4)

    def ask(server: Server) -> None:
        record_name = asyncio.run(server.shared.open(name, {}))
        start.wait(60)
        server.chat.ask(["sys", "aaaa", "why?"], name, record_name=record_name)
        server.shared.save(record_name)
        server.shared.flush()

    threads = [threading.Thread(target=ask, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for server in servers:
        server.shared.save(name)
        server.shared.flush()
    written = [server.counts["written"] for server in servers]
    fenced = [server.counts["fenced_off"] for server in servers]
    assert sum(1 for count, off in zip(written, fenced, strict=True) if count == 2 and not off) == 1


def test_a_store_that_does_not_answer_costs_forwards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Redis(tmp_path) as redis:
        server, other = fleet(redis)
        kept = server.chat.store
        parts = ["sys", "aaaa", "why?"]
        server.ask(parts, "n")
        redis.kill()
        with caplog.at_level(logging.WARNING, "ctxwin.serve"):
            for _ in range(3):
                parts = [*parts, "bbbb", "why?"]
                assert_exact(server.ask(parts, "n"), parts)
        assert server.counts["failed"] >= 3 and server.counts["written"] == 1
        logged = [record.message for record in caplog.records if record.name == "ctxwin.serve"]
        assert len(logged) == 1 and "record of a conversation was not read" in logged[0], "the first of several"
        redis.start()  # empty, as one without persistence comes back
        end = time.monotonic() + 60
        while server.counts["written"] == 1 and time.monotonic() < end:
            assert_exact(server.ask(parts, "n"), parts)
        parts = [*parts, "cccc", "who?"]
        assert_exact(other.ask(parts, "n"), parts)
        assert other.counts["taken_up"] == 1
        kept.close()


def test_an_answer_waits_for_no_record(tmp_path: Path) -> None:
    """A store that hangs: the request is served, and the record is there for the next one."""
    hanging = threading.Event()
    first, second = (Server(open_store(f"disk:{tmp_path}")) for _ in range(2))
    first.ask(["sys", "aaaa", "bbbb", "q1"], "n", PATCHED)
    claim, second.shared._wait_s = second.store.claim, 0.001

    def hang(key: str) -> Any:
        assert hanging.wait(60)
        return claim(key)

    second.store.claim = hang  # type: ignore[method-assign]
    slid = ["sys", "bbbb", "q1", "q2"]
    alone = second.ask(slid, "n", PATCHED, written=False)
    assert "survivor" not in alone.lanes and not second.counts
    hanging.set()
    second.shared.flush()
    assert second.counts["taken_up"] == 1
    assert second.ask([*slid, "q3"], "n", PATCHED).lanes.get("computed", 0) <= len("q2q3")


def test_records_are_bounded_and_expire_and_are_their_tenants(redis: Redis) -> None:
    def of(tenant: str, **options: Any) -> Server:
        return Server(open_store(redis.url, tenant=tenant), **options)

    few, acme = of("few", places=3), of("acme")
    for i in range(12):
        few.ask(["sys", "aaaa", f"why {i}?"], f"few {i}", PATCHED)
    assert len([*few.store.list("conversation/")]) == 3 and few.counts["written"] == 12
    after = of("few", places=3)
    for i in range(12):
        reading = after.shared.begin(f"few {i}")
        assert reading is not None
        reading.ended.result(60)
    assert after.counts == {"taken_up": 3}
    acme.ask(["sys", "aaaa", "bbbb", "q"], "one name", PATCHED)
    slid = ["sys", "bbbb", "q", "q2"]
    owner, bolt, late = of("acme"), of("bolt"), of("acme", ttl=-1.0)
    assert owner.ask(slid, "one name", PATCHED).lanes["survivor"] == len("bbbb")
    assert bolt.ask(slid, "one name", PATCHED).lanes == {"computed": len("".join(slid))}
    late.ask(slid, "one name", PATCHED)
    assert [server.counts["taken_up"] for server in (owner, bolt, late)] == [1, 0, 0]


@pytest.mark.parametrize(
    "damage", ["{", '{"format": 1}', '{"format": 1, "shelf": "%s", "written": 9e99, "records": {}}']
)
def test_a_record_that_cannot_be_read_costs_a_forward(tmp_path: Path, damage: str) -> None:
    first, second = (Server(open_store(f"disk:{tmp_path}")) for _ in range(2))
    parts = ["sys", "aaaa", "why?"]
    first.ask(parts, "n")
    (key,) = first.store.list("conversation/")
    assert first.store.commit(
        key, zlib.compress(damage.replace("%s", digest("shelf", "n")).encode()), first.store.token(key)
    )
    assert_exact(second.ask([*parts, "bbbb", "who?"], "n"), [*parts, "bbbb", "who?"])
    assert second.counts == {"failed": 1, "written": 1}
    assert first.ask([*parts, "cccc"], "n").lanes["resident"] == len("sysaaaawhy?")


def test_a_store_that_ends_with_its_process_is_not_used() -> None:
    for place in ("memory:", "tiered:memory:,memory:"):
        server = Server(open_store(place))
        server.ask(["sys", "aaaa", "why?"], "n")
        assert not server.counts and not [*server.store.list("conversation/")]
