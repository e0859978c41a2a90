"""The windows behind plain chats, on an exact engine in float64: re-prefill is the oracle, however a conversation changes."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from ctxwin import Chunk, Fidelity, Window
from ctxwin.audit import attach_audits
from ctxwin.audit.evidence import EvidenceFile
from ctxwin.engines.cost import CostModel
from ctxwin.engines.results import Generation
from ctxwin.engines.segments import Encoded, Segment
from ctxwin.errors import EngineFailed
from ctxwin.kv.layout import SpanKV
from ctxwin.store import open_store
from ctxwin.store.base import Store
from ctxwin_chats.options import read_options
from ctxwin_chats.records import PER_NAME
from ctxwin_server.chat import conversations
from ctxwin_server.chat.conversations import KEPT, Conversations, Turn, WriteBackPending
from twins import twins
from window.fake import FakeEngine

EXACT, PATCHED = Fidelity("exact"), Fidelity("patched", rank=4)


@dataclass
class Handed:
    generation: Generation
    spans: list[SpanKV]
    captured: dict[int, SpanKV]
    computed: int
    costs: CostModel = field(default_factory=CostModel)


class FakePrompt(FakeEngine):
    """A prompt as `RenderedRequest` cuts it: first the system prompt, then the chunks, and the question at its end.

    ``cached_tokens``: what the engine's prefix cache is taken to hold; ``hit``: what it holds once the request runs.
    """

    def __init__(
        self, store: Store, parts: list[str], identity: str = "rendered", cached_tokens: int = 0, hit: int = 0
    ) -> None:
        super().__init__(store)
        self.identity, self._cached_tokens, self._hit = identity, cached_tokens, hit
        self._by_id: dict[str, Encoded] = {}
        chunks = [Chunk.tokens([ord(c) for c in part], keep_source=False) for part in parts]
        for chunk in chunks:
            self._by_id[chunk.id] = FakeEngine.encode(self, chunk)
        self.system_prompt, *self.chunks, self.query_chunk = chunks
        self.query = self._by_id[self.query_chunk.id]
        self.taken: list[bool] = []
        self.left = threading.Event()

    def encode(self, chunk: Chunk) -> Encoded:
        return self._by_id[chunk.id]

    def encode_system_prompt(self, system_prompt: str) -> Encoded:
        return self._by_id[self.system_prompt.id]

    def cached_tokens(self, stored: int) -> int:
        return self._cached_tokens

    def submit(self, layout: list[Segment], salt: str) -> Handed:
        if self.fail:
            raise self.fail
        assert [s.encoded for s in layout[1:-1]] == [self.encode(c) for c in self.chunks] and layout[-1].span is None
        spans, captured, computed, _ = self._run(layout)
        cached = sum(segment.tokens for segment in layout if segment.cached)
        if self._hit >= cached:
            computed -= cached
        return Handed(Generation(), spans, captured, computed)

    def collect(self, submitted: Handed, *, finished: bool) -> dict[int, SpanKV]:
        self.taken.append(finished)
        return submitted.captured if finished else {}

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        self.left.set()


@dataclass
class Chat:
    """One tenant's conversations, asked with the parts of a prompt."""

    store: Store = field(default_factory=lambda: open_store("memory:"))
    known: Conversations = field(default_factory=lambda: Conversations(8, 3600.0))

    def turn(
        self, parts: list[str], name: str = "", fidelity: Fidelity = EXACT, record_name: str = "", **options: Any
    ) -> Turn:
        engine: Any = FakePrompt(self.store, parts, **options)
        try:
            return self.known.prepare(engine, name, fidelity, record_name)
        except WriteBackPending as error:
            wait(error.pending)
        return self.known.prepare(engine, name, fidelity, record_name, patient=False)

    def ask(
        self, parts: list[str], name: str = "", fidelity: Fidelity = EXACT, record_name: str = "", **options: Any
    ) -> Turn:
        turn = self.turn(parts, name, fidelity, record_name, **options)
        self.known.expect_write_back(turn)
        self.known.finish(turn, finished=True)
        return turn


def computed(turn: Any) -> int:
    return int(turn.submitted.computed)


def assert_exact(turn: Any, parts: list[str]) -> None:
    """What the answer is read from is the KV that a forward over the whole prompt gives."""
    fresh = FakePrompt(open_store("memory:"), parts)
    encoded = [fresh.encode(c) for c in (fresh.system_prompt, *fresh.chunks, fresh.query_chunk)]
    at, layout = 0, []
    for part in encoded:
        layout.append(Segment(part, at))
        at += part.advance
    expected, *_ = fresh._run(layout)
    for had, want in zip(turn.submitted.spans, expected, strict=True):
        torch.testing.assert_close(had.v, want.v, rtol=0, atol=1e-9)
        torch.testing.assert_close(had.k, want.k, rtol=0, atol=1e-9)


PARTS = st.lists(st.sampled_from(["ab", "cde", "f", "gh", "ab", "ijkl"]), max_size=7)


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["", "one", "two"]), st.sampled_from(["sys", "other"]), PARTS), max_size=8
)


def check_re_prefill(requests: list[tuple[str, str, list[str]]]) -> None:
    chat = Chat()
    for name, system, parts in requests:
        prompt = [system, *parts, "why?"]
        assert_exact(chat.ask(prompt, name), prompt)


def check_cached(parts: list[str], expected: int, dropped: int) -> None:
    """Nothing of what the prefix cache is known to hold is read, all of it stays, and what has left is computed."""
    chat, prompt = Chat(), ["sys", *parts, "why?"]
    chat.ask(prompt)
    repositories: list[Any] = []
    for tokens in (0, expected):
        turn = chat.ask(prompt, cached_tokens=tokens, hit=expected - dropped)
        assert_exact(turn, prompt)
        repositories.append(turn.engine.repo)
        begin = 0
        for segment in turn.layout.segments:
            begin += segment.tokens
            assert segment.cached == (begin <= tokens) and segment.available and not (segment.cached and segment.span)
        assert turn.lanes["resident"] == len("".join(prompt[:-1]))
        cached_tokens = sum(segment.tokens for segment in turn.layout.segments if segment.cached)
        assert computed(turn) == len("why?") + (cached_tokens if expected - dropped < cached_tokens else 0)
    reads = [repo.counters.hits["span"] for repo in repositories]
    assert reads == [1 + len(parts), sum(not segment.cached for segment in turn.layout.segments)]


test_what_the_prefix_cache_holds_is_not_read, test_much_that_the_prefix_cache_holds_is_not_read = twins(
    check_cached, 15, 60, PARTS, st.integers(0, 24), st.integers(0, 24)
)


def test_what_is_not_read_is_used_all_the_same() -> None:
    """It stays in the store as long as what is read, for a time when the prefix cache no longer holds it."""
    chat = Chat(store=open_store("memory:", max_bytes=12000))
    for i in range(60):
        chat.ask(["sys", "long enough", "why?"], "s", cached_tokens=99, hit=99)
        chat.ask(["sys", f"passing {i}", "why?"], "other")
    assert computed(chat.ask(["sys", "long enough", "why?"], "s")) == len("why?")
    assert chat.ask(["sys", "passing 0", "why?"], "other").lanes["computed"] > len("why?")


def test_an_approximate_chat_relies_on_no_prefix_cache() -> None:
    chat, parts = Chat(), ["sys", "aaaa", "bbbb", "q1"]
    chat.ask(parts, "s", PATCHED)
    assert not any(s.cached for s in chat.ask(parts, "s", PATCHED, cached_tokens=99, hit=99).layout.segments)


test_exact_conversations_are_re_prefill, test_many_exact_conversations_are = twins(check_re_prefill, 15, 60, REQUESTS)


def test_an_append_computes_what_is_new_and_a_slide_under_a_profile_too() -> None:
    chat = Chat()
    chat.ask(["sys", "aaaa", "bbbb", "q1"], "s", PATCHED)
    grown = chat.ask(["sys", "aaaa", "bbbb", "q1", "cccc", "q2"], "s", PATCHED)
    assert grown.edits == {"insert": 2} and computed(grown) == len("cccc" + "q2")  # the last question was captured, too
    slid = chat.ask(["sys", "bbbb", "q1", "cccc", "dddd", "q3"], "s", PATCHED)
    assert slid.edits == {"evict": 1, "insert": 1} and computed(slid) < len("bbbbq1ccccddddq3")
    assert slid.lanes["survivor"] == len("bbbb" + "q1" + "cccc")


def test_a_clock_in_the_first_turn_leaves_the_others_their_kv_where_few_tokens_may_differ() -> None:
    """What left its prompt is named by a digest: the store knows its tokens."""
    chat, turns = Chat(), ["aaaa", "bbbb"]
    some = Fidelity("patched", rank=4, survivors="refresh", edited_tokens=4)
    for i in range(1, 4):
        turns.append(f"turn{i}")
        clock = chat.ask(["sys", f"it is 12:0{i}", *turns, "q"], "s", some)
        assert clock.lanes.get("edited", 0) == (len("".join(turns[:-1])) if i > 1 else 0)
    assert computed(clock) == len("it is 12:03turn3q")
    exact = chat.ask(["sys", "it is 12:04", *turns, "q"], "s", EXACT)
    assert_exact(exact, ["sys", "it is 12:04", *turns, "q"])


def test_no_promoted_strategy_serves_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of promoted strategies are audited at random, those of chats are not: without a profile a chat is exact."""
    monkeypatch.setenv("CTXWIN_AUDITS", "1")
    monkeypatch.setattr(EvidenceFile, "promoted", lambda self, forbidden: "blind")
    with FakeEngine() as engine:
        attach_audits(engine)
        with Window(engine, "s") as window:
            assert window.core.audits.in_force()[0] == "blind" and window.core.audits.fidelity.mode == "blind"
    chat, parts = Chat(), ["s", "aa", "bb", "cc", "q?"]
    chat.ask(parts, fidelity=Fidelity())
    slid = chat.ask(["s", "bb", "cc", "dd", "q?"], fidelity=Fidelity())
    assert slid.fidelity.mode == "exact" and set(slid.lanes) <= {"computed", "resident"}
    assert_exact(slid, ["s", "bb", "cc", "dd", "q?"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("windows", ["auto", "off"])
@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"audit": 0.05}, r"audit must be 0\.0 .*, got 0\.05"),
        ({"recompute": 32}, "recompute must be None .*, got 32"),
        ({"merge": 0.5}, r"merge must be None .*, got 0\.5"),
        ({"merge": 0.5, "advanced": {"eliminate": 16, "merge_prompt": True}}, r"merge must be None .*, got 0\.5"),
    ],
)
def test_a_chat_that_asks_for_what_only_windows_have_is_refused(
    path: str, windows: str, fields: dict[str, Any], complaint: str
) -> None:
    body = {"ctxwin": {"fidelity": {"mode": "patched", **fields}}}
    with pytest.raises(ValueError, match=complaint + r"; omit it, or ask a window \(POST /v1/windows\)"):
        read_options(path, {}, body, windows)


def test_texts_that_stand_at_many_places_are_not_moved() -> None:
    """The oldest turn leaves and its closing text comes again at the end: a new one, or all between had changed order."""
    chat = Chat()
    chat.ask(["sys", "a1", "end", "b2", "end", "c3"], "s", PATCHED)
    slid = chat.ask(["sys", "b2", "end", "c3", "end", "d4"], "s", PATCHED)
    assert "reorder" not in slid.edits and slid.lanes["survivor"] == len("b2" + "end")


def test_the_last_segment_is_computed_though_it_stood_there_before() -> None:
    chat = Chat()
    chat.ask(["sys", "a1", "b2", "what next?"], "s", PATCHED)
    slid = chat.ask(["sys", "b2", "c3", "what next?"], "s", PATCHED)
    assert slid.layout.segments and slid.lanes["computed"] >= len("c3" + "what next?")


def test_an_exact_chat_that_drops_a_turn_each_time_stores_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an engine whose prefix cache serves the same prompt again."""
    monkeypatch.setattr(FakePrompt, "caches_prefixes", True)
    chat, counts = Chat(), []
    for i in [0, 1, 2, 3, 3, 4]:
        parts = ["sys", *(f"turn {j}" for j in range(i, i + 4)), "why?"]
        turn = chat.ask(parts, "s")
        assert_exact(turn, parts)
        counts.append(len(turn.submitted.captured))
    # System prompt, four turns and the question; a turn dropped once; two, three times; the same again; another dropped.
    assert counts == [6, 5, 0, 0, 5, 5]


def test_an_answer_like_one_that_left_is_stored_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back behind other chunks, but the chat has not changed in front of any."""
    monkeypatch.setattr(FakePrompt, "caches_prefixes", True)
    chat, parts = Chat(), ["sys", "a long question", "q0"]
    chat.ask([*parts, *["ok"] * 4, "why?"])
    chat.ask(parts)
    for i in range(1, 5):  # the first answer is stored from before
        parts += ["ok", f"q{i}"]
        turn = chat.ask(parts)
        assert_exact(turn, parts)
        assert turn.edits["recall"] and computed(turn) == len(f"q{i}" if i == 1 else f"okq{i}")
        assert sorted(turn.submitted.captured) == [*range(len(parts) - 2 + (i == 1), len(parts))]


def test_what_came_back_is_recalled() -> None:
    chat = Chat()
    for parts in (["a1", "b2", "c3"], ["b2", "c3"], ["a1", "b2", "c3"]):
        last = chat.ask(["sys", *parts, "why?"], "s")
    assert last.edits == {"recall": 1} and computed(last) == len("why?")


def test_conversations_are_told_apart_by_name_else_by_content() -> None:
    chat = Chat()
    chat.ask(["sys", "a1", "b2", "why?"], "user:1")
    chat.ask(["sys", "a1", "b2", "why?"], "user:2")
    assert len(chat.known) == 2
    one = chat.ask(["sys", "a1", "a2", "a3", "why?"])
    two = chat.ask(["sys", "x1", "x2", "x3", "why?"])  # begins alike, no more
    assert one.conversation is not two.conversation
    assert chat.ask(["sys", "a2", "a3", "a4", "why?"]).conversation is one.conversation
    assert chat.ask(["sys", "x2", "x3", "x4", "why?"]).conversation is two.conversation
    assert len(chat.known) == 4


def test_another_salt_shares_no_kv() -> None:
    chat = Chat()
    chat.ask(["sys", "a1", "why?"], "s")
    assert computed(chat.ask(["sys", "a1", "why?"], "s")) == len("why?")
    assert computed(chat.ask(["sys", "a1", "why?"], "s", identity="another salt")) == len("sysa1why?")


def test_a_request_is_compared_with_what_may_share_more_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, compared = Chat(known=Conversations(99, 3600.0)), list[Any]()
    shared_tokens = conversations._shared_tokens
    monkeypatch.setattr(conversations, "_shared_tokens", lambda *args: compared.append(args) or shared_tokens(*args))
    first = [chat.ask(["sys", f"{i} is here", "b", "why?"]).conversation for i in range(20)]
    for i, other in ((19, "c"), (3, "c"), (3, "d")):
        compared.clear()
        assert chat.ask(["sys", f"{i} is here", other, "why?"]).conversation is first[i] and len(compared) == 1
    compared.clear()
    assert chat.ask(["sys", "3 is here", "d", "e", "why?"]).conversation is first[3] and not compared, "it grows"


def test_conversations_are_few_and_end() -> None:
    chat = Chat(known=Conversations(3, 3600.0))
    for i in range(9):
        chat.ask(["sys", f"a{i}", "why?"], f"s{i}")
    assert len(chat.known) == 3
    ending = Chat(known=Conversations(3, 0.0))
    ending.ask(["sys", "a1", "why?"], "one")
    ending.ask(["sys", "a1", "why?"], "two")
    assert len(ending.known) == 1
    for i in range(KEPT + 9):
        last = chat.ask(["sys", "long enough", f"b{i}", "why?"], "s")
    assert len(last.state.evicted) == KEPT


def test_conversations_of_one_name_are_told_apart_by_content() -> None:
    """Two tasks under one session, turn by turn: neither evicts what the other holds, and each goes on with its own."""
    chat, names = Chat(), ["one session"] * 2
    tasks = [[f"{task}{i}" for i in range(6)] for task in "ab"]
    for n in range(2, 7):
        for name, task in zip(names, tasks, strict=True):
            turn = chat.ask(["sys", *task[:n], "why?"], name)
            assert turn.edits == {"insert": 2 if n == 2 else 1} and computed(turn) <= len("sys") + 4 + len("why?")
    assert len(chat.known) == 2


def test_a_branch_leaves_its_trunk_as_it_is_and_a_regenerated_answer_is_no_branch() -> None:
    chat, trunk = Chat(), ["sys", *(f"t{i}" for i in range(8)), "why?"]
    first = chat.ask(trunk, "s")
    assert chat.ask(trunk, "s").conversation is first.conversation
    branch = chat.ask([*trunk[:3], "other", "why?"], "s")  # an early turn was edited, and what followed is gone
    assert branch.conversation is not first.conversation and computed(branch) == len("otherwhy?")
    again = chat.ask([*trunk[:-1], "t8", "why?"], "s")
    assert again.conversation is first.conversation and again.edits == {"insert": 1}
    longer = chat.ask([*trunk[:3], "other", "b2", "why?"], "s")
    assert longer.conversation is branch.conversation and longer.edits == {"insert": 1}


def test_a_name_holds_few_conversations_and_pushes_out_no_other_name() -> None:
    chat = Chat(known=Conversations(PER_NAME + 4, 3600.0))
    kept = chat.ask(["sys", "a1", "why?"], "quiet")
    for i in range(3 * PER_NAME):
        chat.ask([f"it is 12:{i:02}", "b1", "why?"], "tells the time")
    assert len(chat.known) == PER_NAME + 1
    assert chat.ask(["sys", "a1", "why?"], "quiet").conversation is kept.conversation


def test_a_chat_that_grows_opens_no_state_and_shares_all_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, parts, calls = Chat(), ["sys", "a1", "why?"], list[str]()
    chat.ask(parts)
    for name in ("initial_state", "_shared_tokens"):
        monkeypatch.setattr(conversations, name, lambda *_, name=name: calls.append(name))
    for i in range(4):
        parts = [*parts[:-1], f"b{i}", f"c{i}", "why?"]
        turn = chat.ask(parts)
        assert computed(turn) == len("b0c0why?") and turn.edits == {"insert": 2} and not calls
        assert turn.lanes == {"resident": len("".join(parts[:-3])), "computed": len("b0c0why?")}
    assert_exact(turn, parts)


def test_a_request_that_failed_or_was_left_loses_nothing() -> None:
    chat = Chat()
    chat.ask(["sys", "a1", "why?"], "s")
    broken: Any = FakePrompt(chat.store, ["sys", "a1", "b2", "why?"])
    broken.fail = EngineFailed("down")
    with pytest.raises(EngineFailed):
        chat.known.prepare(broken, "s", EXACT)
    left = chat.turn(["sys", "a1", "b2", "c3", "why?"], "s")
    chat.known.finish(left, finished=False)
    after = chat.ask(["sys", "a1", "b2", "c3", "why?"], "s")
    assert computed(after) == len("b2c3why?")
    assert_exact(after, ["sys", "a1", "b2", "c3", "why?"])


def test_the_next_request_waits_for_the_kv_of_the_last_and_others_do_not() -> None:
    chat = Chat()
    first = chat.turn(["sys", "a1", "why?"], "s")
    chat.known.expect_write_back(first)
    found: list[Turn] = []
    asking = threading.Thread(target=lambda: found.append(chat.ask(["sys", "a1", "b2", "why?"], "s")))
    asking.start()
    assert computed(chat.ask(["sys", "z9", "why?"], "other")) == len("sysz9why?")
    assert not found
    chat.known.finish(first, finished=True)
    asking.join(30)
    assert computed(found[0]) == len("b2why?")


def test_requests_of_one_conversation_at_once_stay_exact() -> None:
    chat = Chat()
    prompts = [["sys", *(f"{c}{i}" for c in "abcd"[: i % 4 + 1]), "why?"] for i in range(12)]
    turns: list[tuple[Turn, list[str]]] = []
    threads = [threading.Thread(target=lambda p=p: turns.append((chat.ask(p, "s"), p))) for p in prompts]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(turns) == len(prompts)
    for turn, prompt in turns:
        assert_exact(turn, prompt)
