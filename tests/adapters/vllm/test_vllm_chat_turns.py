"""Turns of growing chats that vLLM holds, in one process: little is done for what was there before, and nothing wrong kept."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ctxwin import Fidelity, hashing, open_engine
from ctxwin.engines.encoding import segmentation
from ctxwin.window import lanes
from ctxwin_server.chat.conversations import Conversations
from ctxwin_vllm import rendered
from ctxwin_vllm.rendered import NotAWindow, Pictures, RenderedRequest
from ctxwin_vllm.requests import _next
from ctxwin_vllm.transport import PARAM

TURNS = 10


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with open_engine("tiny:vllm", dtype="float32") as opened:
        yield opened


class Chat:
    """A chat whose window is updated before its request, or behind the answer where vLLM holds all of it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.conversations = engine, Conversations(4, 600.0)
        self.tokenizer = engine.core.driver.renderer.get_tokenizer()
        self.messages = [{"role": "system", "content": "You remember what you see, and answer in a word. " * 3}]

    def output(self, prompt: Any, handle: str = "") -> Any:
        from vllm import SamplingParams

        driver, options = self.engine.core.driver, {"kv_transfer_params": {PARAM: handle}} if handle else None
        parameters = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args=options)
        ticket = driver.submit(prompt, parameters, 0)
        while not (output := _next(driver, ticket.outputs, None)).finished:
            pass
        return output

    def prepare(self, prompt: Any, handle: str) -> Any:
        return self.conversations.prepare(RenderedRequest(self.engine, prompt, handle), "", Fidelity("exact"))

    def ask(self, question: str, *, behind: bool) -> Any:
        """One turn. Its answer is that of a request without a window, from a cache of its own."""
        from vllm.inputs.engine import tokens_input

        self.messages.append({"role": "user", "content": question})
        ids = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        prompt = Pictures().read(dict(tokens_input(list(ids))))
        handle = prompt.reserve(self.engine)
        assert bool(handle) == behind
        if behind:
            output = self.output(prompt.engine_input, handle)
        turn = self.prepare(prompt, handle)
        if not behind:
            output = self.output(turn.submitted.prompt, turn.submitted.handle)
        self.conversations.finish(turn, finished=True)
        alone = self.output(dict(tokens_input(list(ids), cache_salt="alone")))
        assert list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
        self.messages.append({"role": "assistant", "content": self.tokenizer.decode(output.outputs[0].token_ids)})
        return turn


def test_what_a_window_that_is_updated_behind_the_answer_has_stored_serves_the_next_answers(engine: Any) -> None:
    engine.core.driver.reset_prefix_cache()
    chat = Chat(engine)
    for i in range(TURNS):
        turn = chat.ask(f"Step {i}: what is there?", behind=i > 0)
        assert len(turn.submitted.captures) == 2 + (not i) and not len(engine.core.transport), i
    placed = chat.conversations.find(turn.conversation.key)[-1].state.placed
    assert all(entry.kv is not None and engine.repo.contains(entry.kv.span) for entry in placed)
    assert engine.core.driver.reset_prefix_cache(), "no block is kept"
    turn = chat.ask("And now?", behind=False)
    assert turn.submitted.transfer.loaded_tokens == sum(entry.tokens for entry in turn.state.placed[:-1]) + (
        turn.state.system_prompt_tokens
    )


def test_a_turn_that_has_begun_computes_nothing_in_front_of_kv_that_it_cannot_load(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.core.driver.reset_prefix_cache()
    chat = Chat(engine)
    for i in range(4):
        turn = chat.ask(f"See {i}: what is there?", behind=i > 0)
    lost = chat.conversations.find(turn.conversation.key)[-1].state.placed[1]
    assert engine.repo.delete(lost.kv.span)
    monkeypatch.setattr(type(engine.asks), "run_one", lambda *_, **__: pytest.fail("a forward runs"))
    with pytest.raises(NotAWindow, match="has begun"):
        chat.ask("And now?", behind=True)
    for handle in [*engine.core.transport._awaited]:
        engine.core.transport.remove(handle)


def test_vllm_computes_a_short_turn_alone_while_the_window_is_updated(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is longer may be in the store, where another server put it."""
    engine.core.driver.reset_prefix_cache()
    chat = Chat(engine)
    chat.ask("What is there?", behind=False)
    chat.ask("And now?", behind=True)
    monkeypatch.setattr(rendered, "MOST_AT_ONCE", 16)
    turn = chat.ask("And behind all that?", behind=False)
    assert turn.submitted.transfer.local_tokens > 0, "vLLM's cache serves what it holds all the same"


def test_a_turn_cuts_hashes_and_looks_up_as_much_however_long_its_chat_is(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    counting(hashing, "_feed")
    counting(segmentation, "_text_begin")
    counting(rendered, "_segment_chunk")
    counting(lanes, "_admissible")
    counting(type(engine.repo), "contains")
    positions = type(engine.core.inputs).positions

    def counted_positions(self: Any, token_ids: Any, media: Any) -> Any:
        counts["positions"] += len(token_ids)
        return positions(self, token_ids, media)

    monkeypatch.setattr(type(engine.core.inputs), "positions", counted_positions)
    engine.core.driver.reset_prefix_cache()
    chat, turns = Chat(engine), list[Counter[str]]()
    prepare = chat.prepare

    def counted_turn(prompt: Any, handle: str) -> Any:
        counts.clear()
        turn = prepare(prompt, handle)
        turns.append(counts.copy())
        return turn

    monkeypatch.setattr(chat, "prepare", counted_turn)
    for i in range(3 * TURNS):
        chat.ask(f"Look {i:02}: what is there?", behind=i > 0)
    for name in turns[-1]:
        early, late = ([turn[name] for turn in part] for part in (turns[2:TURNS], turns[-TURNS:]))
        assert max(late) < 1.5 * max(early), (name, early, late)  # a chat of three times as many turns
