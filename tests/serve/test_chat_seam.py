"""Between vLLM's server and its engine: what happens to a chat whose window cannot be prepared, or whose load fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ctxwin import Fidelity
from ctxwin.engines.open import vllm_installed
from ctxwin.errors import EngineFailed
from ctxwin.serve.asked import ASKED, Asked
from ctxwin.serve.conversations import Conversations
from ctxwin.store import open_store
from serve.test_conversations import FakePrompt

if not vllm_installed():
    pytest.skip("vLLM is not installed", allow_module_level=True)

from ctxwin.engines.vllm.engine import VLLMEngine
from ctxwin.serve.vllm import chats

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

    def __post_init__(self) -> None:
        self.store = open_store("memory:")
        self.conversations = Conversations(4, 60.0)
        engine = VLLMEngine.__new__(VLLMEngine)
        space = SimpleNamespace(engine=engine, conversations=self.conversations)
        metrics = SimpleNamespace(
            chat=lambda *_: self.counted.append("window"),
            chat_left_alone=lambda *_, failed: self.counted.append("failed" if failed else "none"),
            fallback=lambda *_: self.counted.append("fallback"),
        )

        async def run_chat(tenant: str, work: Any) -> Any:
            return await asyncio.to_thread(work)

        service: Any = SimpleNamespace(
            space=lambda _: space,
            run_chat=run_chat,
            metrics=metrics,
            limits=SimpleNamespace(fidelity=Fidelity("exact")),
        )
        self.chats = chats._Chats(self.inner, service)

    async def inner(self, prompt: Any, sampling: Sampling, request_id: str, **options: Any) -> AsyncIterator[Any]:
        self.calls.append((prompt, sampling))
        try:
            for one in self.script.pop(0):
                yield one
        finally:
            self.closed += 1

    async def ask(self, asked: Asked | None, sampling: Sampling | None = None, take: int = 99) -> list[str]:
        ASKED.set(asked)
        found = []
        stream = self.chats.generate(PROMPT, sampling or Sampling(), "r")
        async for one in stream:
            found.append(one.outputs[0].text)
            if len(found) == take:
                break
        await stream.aclose()
        while self.chats._tasks:
            await asyncio.gather(*self.chats._tasks)
        return found


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Seam:
    made = Seam([])

    def prompt_engine(engine: Any, rendered: Any) -> Any:
        made.prompts.append(FakePrompt(made.store, ["sys", "aa", "why?"]))
        made.prompts[-1].fail = made.fail  # type: ignore[attr-defined]
        return made.prompts[-1]

    made.fail = None  # type: ignore[attr-defined]
    monkeypatch.setattr(chats, "PromptEngine", prompt_engine)
    hand_over = FakePrompt.hand_over

    def with_handle(self: FakePrompt, layout: Any, salt: str) -> Any:
        handed = hand_over(self, layout, salt)
        vars(handed).update(handle="0" * 32, prompt={"windowed": True})
        return handed

    monkeypatch.setattr(FakePrompt, "hand_over", with_handle)
    return made


def test_a_window_stands_behind_a_chat_that_has_one_alone(seam: Seam) -> None:
    seam.script = [[output("a")], [output("a"), output("b", "stop")], [output("c", "stop", 3)]]
    assert asyncio.run(seam.ask(None)) == ["a"] and seam.calls[0][0] is PROMPT and not seam.counted
    asked = Asked("", "s")
    assert asyncio.run(seam.ask(asked)) == ["a", "b"]
    assert seam.calls[1][0] == {"windowed": True} and "kv_transfer_params" in seam.calls[1][1].extra_args
    assert asked.usage["computed_tokens"] == 3 and seam.prompts[0].taken == [True] and seam.counted == ["window"]
    again = Asked("", "s")
    asyncio.run(seam.ask(again))
    assert again.usage["computed_tokens"] == 0 and again.usage["lanes"]["resident"] == len("sysaa")


def test_a_load_that_fails_is_computed_and_counted(seam: Seam) -> None:
    seam.script = [[output("", "error")], [output("whole", "stop")]]
    asked = Asked("", "s")
    assert asyncio.run(seam.ask(asked)) == ["whole"]
    assert seam.calls[1][0] is PROMPT and seam.calls[1][1].extra_args is None
    assert seam.counted == ["fallback"] and seam.prompts[0].taken == [False] and not asked.usage


def test_an_error_behind_the_first_token_is_vllms_to_tell(seam: Seam) -> None:
    seam.script = [[output("a"), output("", "error")]]
    assert asyncio.run(seam.ask(Asked("", "s"))) == ["a", ""] and len(seam.calls) == 1


def test_a_window_that_cannot_be_prepared_leaves_the_chat_alone(seam: Seam) -> None:
    seam.script = [[output("whole", "stop")], [output("whole", "stop")]]
    seam.fail = EngineFailed("down")  # type: ignore[attr-defined]
    asked = Asked("", "s")
    assert asyncio.run(seam.ask(asked)) == ["whole"] and seam.calls[0][0] is PROMPT
    assert asked.off == "the window failed" and seam.counted == ["failed"]
    unfit = Asked("", "s")
    assert asyncio.run(seam.ask(unfit, Sampling(prompt_logprobs=1))) == ["whole"]
    assert "log-probabilities" in unfit.off and seam.counted == ["failed", "none"]


def test_a_client_that_leaves_takes_its_request_along(seam: Seam) -> None:
    seam.script = [[output("a"), output("b"), output("c", "stop")]]
    assert asyncio.run(seam.ask(Asked("", "s"), take=1)) == ["a"]
    assert seam.closed == 1 and seam.prompts[0].taken == [False] and seam.counted == []
