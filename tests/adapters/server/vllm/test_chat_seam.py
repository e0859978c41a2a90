"""Between vLLM's server and its engine: what happens to a chat whose window cannot be prepared, or whose load fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.server.chat.test_conversations import FakePrompt
from ctxwin import Fidelity
from ctxwin.engines.cost import CostModel
from ctxwin.errors import EngineFailed
from ctxwin.store import open_store
from ctxwin_chats.shared_records import SharedConversations
from ctxwin_server.app.request_options import PendingRequests, RequestOptions
from ctxwin_server.chat.conversations import Conversations

chats = pytest.importorskip("ctxwin_server.vllm.chats", reason="vLLM is not installed", exc_type=ImportError)
transport = pytest.importorskip("ctxwin_vllm.transport", reason="vLLM is not installed", exc_type=ImportError)
base = pytest.importorskip("ctxwin_vllm.transport.base", reason="vLLM is not installed", exc_type=ImportError)
pytestmark = pytest.mark.vllm

HANDLE = "0" * 32
PROMPT: dict[str, Any] = {"type": "token", "prompt_token_ids": [1, 2, 3]}


@dataclass
class Sampling:
    extra_args: Any = None
    prompt_logprobs: int | None = None
    max_tokens: int = 8
    min_tokens: int = 0
    n: int = 1

    def clone(self) -> Sampling:
        return Sampling(self.extra_args, self.prompt_logprobs, self.max_tokens, self.min_tokens, self.n)


def output(text: str, reason: str | None = None, cached: int = 0) -> Any:
    part = SimpleNamespace(text=text, finish_reason=reason)
    return SimpleNamespace(
        outputs=[part], finished=reason is not None, num_cached_tokens=cached, prompt_token_ids=[1, 2, 3]
    )


@dataclass
class Seam:
    """The seam over a scripted engine: what each call of it yields."""

    script: list[list[Any]]
    calls: list[tuple[Any, Sampling]] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    prompts: list[FakePrompt] = field(default_factory=list)
    closed: int = 0
    continues: bool = False
    hashed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store, self.asked = open_store("memory:"), PendingRequests()
        self.conversations = Conversations(4, 60.0)
        engine = chats.VLLMEngine.__new__(chats.VLLMEngine)
        engine.costs, engine.spec = CostModel(), SimpleNamespace(model="tiny", kv=SimpleNamespace(recurrent=False))
        prefixes = SimpleNamespace(continues=lambda names: self.continues, hit=lambda names: 0)
        self.transport = transport.local.LocalTransport(SimpleNamespace())
        engine._core = SimpleNamespace(has_prefix_cache=True, prefixes=prefixes, transport=self.transport)
        engine.prompts = SimpleNamespace(salted_names=lambda *_: self.hashed.append("") or [b""])
        shared = SharedConversations(self.store, self.conversations.saved(), 4, 60.0)
        tenant_state = SimpleNamespace(engine=engine, conversations=self.conversations, shared=shared)
        metrics = SimpleNamespace(
            chat=lambda *_: self.counted.append("window"),
            chat_left_alone=lambda _, why, *, failed: self.counted.append(f"{'failed' if failed else 'none'}: {why}"),
            fallbacks="fallback",
            count=lambda metric, _: self.counted.append(metric),
        )

        async def run(tenant: str, work: Any, *args: Any) -> Any:
            return await asyncio.to_thread(work, *args)

        def pending_request(headers: Any) -> tuple[Any, Any, Any]:
            request, others = self.asked.read(headers)
            return request, tenant_state, others

        service: Any = SimpleNamespace(
            pending_request=pending_request,
            chat_pool=SimpleNamespace(run=run),
            metrics=metrics,
            limits=SimpleNamespace(fidelity=Fidelity("exact")),
            requests=SimpleNamespace(draining=False),
        )
        self.requests = service.requests
        self.chats = chats.ChatClient(SimpleNamespace(generate=self.inner), service)

    async def inner(self, prompt: Any, sampling: Sampling, request_id: str, **options: Any) -> AsyncIterator[Any]:
        self.calls.append((prompt, sampling))
        assert options["trace_headers"] == {"traceparent": "of a client"}  # the key goes no further
        try:
            for one in self.script.pop(0):
                yield one
        finally:
            self.closed += 1

    async def ask(self, asked: RequestOptions | None, sampling: Sampling | None = None, take: int = 99) -> list[str]:
        found = []
        scope: dict[str, Any] = {"headers": [(b"traceparent", b"of a client")]}
        with nullcontext() if asked is None else self.asked.carry(asked, scope):
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            stream = self.chats.generate(PROMPT, sampling or Sampling(), "r", trace_headers=headers)
            async for one in stream:
                found.append(one.outputs[0].text)
                if len(found) == take:
                    break
            await stream.aclose()
        while self.chats._tasks:
            await asyncio.gather(*self.chats._tasks)
        return found

    async def leave(self, inside: threading.Event) -> None:
        """Ask, and leave once ``inside`` is set."""
        asking = asyncio.create_task(self.ask(RequestOptions(name="s")))
        await asyncio.to_thread(inside.wait, 30)
        asking.cancel()
        await asyncio.wait([asking])
        while self.chats._tasks:
            await asyncio.gather(*self.chats._tasks)


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Seam:
    made = Seam([])

    def prompt_engine(engine: Any, rendered: Any, handle: str) -> Any:
        assert base.is_reserved(handle) if made.continues else handle == ""
        assert rendered.block_names(engine) == [b""]
        made.prompts.append(FakePrompt(made.store, ["sys", "aa", "why?"]))
        made.prompts[-1].fail = made.fail  # type: ignore[attr-defined]
        return made.prompts[-1]

    made.fail = None  # type: ignore[attr-defined]
    monkeypatch.setattr(chats, "RenderedRequest", prompt_engine)
    submit = FakePrompt.submit

    def with_handle(self: FakePrompt, layout: Any, salt: str) -> Any:
        submitted = submit(self, layout, salt)
        vars(submitted).update(handle=HANDLE, prompt={"windowed": True}, transfer=transport.Transfer())
        self.submitted = submitted  # type: ignore[attr-defined]
        return submitted

    monkeypatch.setattr(FakePrompt, "submit", with_handle)
    return made


def test_a_window_stands_behind_a_chat_that_has_one_alone(seam: Seam) -> None:
    seam.script = [[output("a")], [output("a"), output("b", "stop")], [output("c", "stop", 3)]]
    assert asyncio.run(seam.ask(None)) == ["a"] and seam.calls[0][0] is PROMPT and not seam.counted
    asked = RequestOptions(name="s")
    assert asyncio.run(seam.ask(asked)) == ["a", "b"]
    assert seam.calls[1][0] == {"windowed": True} and "kv_transfer_params" in seam.calls[1][1].extra_args
    assert asked.usage["computed_tokens"] == 3 and seam.prompts[0].taken == [True] and seam.counted == ["window"]
    again = RequestOptions(name="s")
    asyncio.run(seam.ask(again))
    assert again.usage["computed_tokens"] == 0 and again.usage["lanes"]["resident"] == len("sysaa")


def test_a_chat_that_asks_the_engine_for_every_token_counts_once(seam: Seam) -> None:
    seam.script = [[output("a", "length")], [output("b", "stop")], [output("c", "stop")]]
    beam = RequestOptions(name="s", off="beam search")
    assert [asyncio.run(seam.ask(asked)) for asked in (beam, beam, RequestOptions(off="media"))] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    assert seam.counted == ["none: beam search", "none: media"]


def test_a_load_that_fails_is_computed_and_counted(seam: Seam) -> None:
    seam.script = [[output("", "error")], [output("whole", "stop")]]
    asked = RequestOptions(name="s")
    assert asyncio.run(seam.ask(asked)) == ["whole"]
    assert seam.calls[1][0] is PROMPT and seam.calls[1][1].extra_args is None
    assert seam.counted == ["fallback", "failed: its KV could not be loaded"] and asked.off
    assert seam.prompts[0].taken == [False] and not asked.usage


def test_an_error_behind_the_first_token_is_vllms_to_tell(seam: Seam) -> None:
    seam.script = [[output("a"), output("", "error")]]
    assert asyncio.run(seam.ask(RequestOptions(name="s"))) == ["a", ""] and len(seam.calls) == 1


@pytest.mark.parametrize("off", ["", "media"])
def test_an_answer_that_a_shutdown_cuts_off_is_an_error(seam: Seam, off: str) -> None:
    """One that something else aborts is vLLM's to tell."""
    from vllm.exceptions import RetryableRequestError

    seam.script = [[output("a"), output("b", "abort")] for _ in range(2)]
    assert asyncio.run(seam.ask(RequestOptions(name="s", off=off))) == ["a", "b"]
    seam.requests.draining = True
    with pytest.raises(RetryableRequestError, match="try another one"):
        asyncio.run(seam.ask(RequestOptions(name="s", off=off)))


def test_a_window_that_cannot_be_prepared_leaves_the_chat_alone(seam: Seam, caplog: pytest.LogCaptureFixture) -> None:
    seam.script = [[output("whole", "stop")], [output("whole", "stop")]]
    seam.fail = EngineFailed("down")  # type: ignore[attr-defined]
    asked = RequestOptions(name="s")
    assert asyncio.run(seam.ask(asked)) == ["whole"] and seam.calls[0][0] is PROMPT
    assert asked.off == "its window failed" and seam.counted == ["failed: its window failed"]
    assert "no window behind request r (down)" in caplog.text
    unfit = RequestOptions(name="s")
    assert asyncio.run(seam.ask(unfit, Sampling(prompt_logprobs=1))) == ["whole"]
    assert "log-probabilities" in unfit.off and seam.counted[1:] == [f"none: {unfit.off}"]


def test_a_client_that_leaves_takes_its_request_along(seam: Seam) -> None:
    seam.script = [[output("a"), output("b"), output("c", "stop")]]
    assert asyncio.run(seam.ask(RequestOptions(name="s"), take=1)) == ["a"]
    assert seam.closed == 1 and seam.prompts[0].taken == [False] and seam.counted == []


def test_a_client_that_leaves_while_its_window_is_prepared_leaves_nothing(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, inside = FakePrompt.submit, threading.Event()

    def slow(self: FakePrompt, layout: Any, salt: str) -> Any:
        inside.set()
        assert self.left.wait(30)  # which a forward would have been asked before
        return submit(self, layout, salt)

    monkeypatch.setattr(FakePrompt, "submit", slow)

    asyncio.run(seam.leave(inside))
    assert not seam.calls and seam.prompts[0].taken == [False] and not seam.counted and not seam.asked
    monkeypatch.setattr(FakePrompt, "submit", submit)
    seam.script = [[output("a", "stop")]]
    assert asyncio.run(seam.ask(RequestOptions(name="s"))) == ["a"] and seam.counted == ["window"]


def test_vllm_begins_while_the_window_of_a_chat_that_it_holds_is_updated(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, seam.continues = FakePrompt.submit, True

    def behind(self: FakePrompt, layout: Any, salt: str) -> Any:
        for _ in range(3000):
            if seam.calls:
                return submit(self, layout, salt)
            time.sleep(0.01)
        raise AssertionError("vLLM waits for the window")

    monkeypatch.setattr(FakePrompt, "submit", behind)
    seam.script = [[output("a", cached=2), output("b", "stop", 2)]]
    asked = RequestOptions(name="s")
    assert asyncio.run(seam.ask(asked)) == ["a", "b"] and seam.counted == ["window"]
    assert seam.calls[0][0] is PROMPT and base.is_reserved(seam.calls[0][1].extra_args["kv_transfer_params"]["ctxwin"])
    assert seam.prompts[0].taken == [True] and asked.usage["computed_tokens"] == 1 and len(seam.hashed) == 1
    assert seam.prompts[0].submitted.transfer.local_tokens == 2  # type: ignore[attr-defined]


def test_a_window_that_cannot_be_updated_behind_a_request_leaves_it_alone(seam: Seam) -> None:
    seam.script, seam.continues = [[output("a"), output("b", "stop")]], True
    seam.fail = EngineFailed("down")  # type: ignore[attr-defined]
    asked = RequestOptions(name="s")
    assert asyncio.run(seam.ask(asked)) == ["a", "b"] and len(seam.calls) == 1
    assert seam.counted == ["failed: its window failed"] and not asked.usage
    assert not seam.transport._awaited, "vLLM keeps its blocks no longer"


def test_kv_that_is_lost_behind_a_request_is_counted_and_computed_again(
    seam: Seam, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collect, seam.continues = FakePrompt.collect, True

    def lost(self: FakePrompt, submitted: Any, *, finished: bool) -> Any:
        collect(self, submitted, finished=finished)
        raise RuntimeError("its blocks are gone")

    monkeypatch.setattr(FakePrompt, "collect", lost)
    seam.script = [[output("a", "stop", 2)], [output("b", "stop", 2)]]
    for answer in "ab":  # the next request waits for nothing
        asked = RequestOptions(name="s")
        assert asyncio.run(seam.ask(asked)) == [answer] and asked.usage["lanes"] == {"computed": len("sysaawhy?")}
    assert seam.counted == ["window", "fallback"] * 2 and "its blocks are gone" in caplog.text


def test_a_client_that_leaves_while_the_window_is_updated_takes_its_request_along(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, inside, seam.continues = FakePrompt.submit, threading.Event(), True

    def slow(self: FakePrompt, layout: Any, salt: str) -> Any:
        inside.set()
        assert self.left.wait(30)
        return submit(self, layout, salt)

    monkeypatch.setattr(FakePrompt, "submit", slow)
    seam.script = [[output("a"), output("b", "stop")]]

    asyncio.run(seam.leave(inside))
    assert seam.closed == len(seam.calls) == 1 and seam.prompts[0].taken == [False] and not seam.transport._awaited
