"""`WindowMiddleware` in agents: who leaves, what is shown instead, recalls, checkpoints."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware.types import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from PIL import Image

from ctxwin import Fidelity
from ctxwin.engines.base import Engine
from ctxwin.window.events import Event
from engines.scripted import ScriptedEngine
from langchain_ctxwin.chat import ChatCtxwin
from langchain_ctxwin.middleware import KEY, LeastRecentlyReadMessages, Unit, WindowMiddleware, blocks, is_media


def talk(*kinds: str) -> list[AnyMessage]:
    """Messages by kind: h, a, and c for a call with its result; ids and texts name their place."""
    out: list[AnyMessage] = []
    for kind in kinds:
        i = len(out)
        if kind == "h":
            out.append(HumanMessage(f"h{i}", id=str(i)))
        elif kind == "a":
            out.append(AIMessage(f"a{i}", id=str(i)))
        else:
            out.append(AIMessage(f"c{i}", id=str(i), tool_calls=[{"name": "look", "args": {}, "id": f"call{i}"}]))
            out.append(ToolMessage(f"r{i}", id=str(i + 1), tool_call_id=f"call{i}"))
    return out


def ask(middleware: WindowMiddleware, messages: list[AnyMessage], **state: Any) -> tuple[list[str], dict[str, Any]]:
    """What the model sees, and the decisions, of one call."""
    seen: list[AnyMessage] = []

    def handler(request: ModelRequest) -> ModelResponse[Any]:
        seen.extend(request.messages)
        return ModelResponse(result=[AIMessage("answer")])

    model = GenericFakeChatModel(messages=iter(()))
    request = ModelRequest(
        model=model, messages=messages, tools=[*middleware.tools], state={"messages": messages, **state}
    )
    made: Any = middleware.wrap_model_call(request, handler)
    command = getattr(made, "command", None)
    return [str(m.content) for m in seen], command.update[KEY] if command else {}


def test_the_oldest_leave_and_a_line_stays() -> None:
    middleware = WindowMiddleware(trigger=("messages", 6), keep=("messages", 3))
    assert ask(middleware, talk("h", "a", "h", "a", "h")) == (["h0", "a1", "h2", "a3", "h4"], {})
    seen, decided = ask(middleware, talk("h", "a", "h", "a", "h", "a", "h"))
    assert seen == ["(Omitted in context: 1-4. recall(number) shows one again.)", "h4", "a5", "h6"]
    assert [(key, e["number"], e["out"]) for key, e in decided.items()] == [(str(i), i + 1, True) for i in range(4)]
    again, nothing = ask(middleware, talk("h", "a", "h", "a", "h", "a", "h"), **{KEY: decided})
    assert (again, nothing) == (seen, {})


def test_calls_and_results_leave_together_and_the_question_stays() -> None:
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 2))
    seen, decided = ask(middleware, talk("h", "c", "c", "c"))
    assert seen == ["h0", "(Omitted in context: 1-2. recall(number) shows one again.)", "c5", "r5"]
    assert list(decided) == ["1", "3"]


def test_without_recall_nothing_stays_and_the_user_begins() -> None:
    middleware = WindowMiddleware(trigger=("messages", 4), keep=("messages", 2), recall=False)
    assert middleware.tools == []
    assert ask(middleware, talk("h", "a", "h", "c", "a", "h"))[0] == ["h6"]
    assert ask(middleware, talk("h", "a", "h", "a", "h"))[0] == ["h4"]
    assert ask(middleware, talk("h", "c", "c", "c"))[0] == ["h0", "c5", "r5"]


def test_only_pictures_leave() -> None:
    middleware = WindowMiddleware(trigger=("messages", 3), keep=("messages", 2), media_only=True)
    image = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}
    messages = talk("h", "a", "h", "a", "h")
    for i in (0, 2, 4):
        messages[i] = HumanMessage([{"type": "text", "text": f"h{i} "}, image], id=str(i))
    seen: list[AnyMessage] = []
    model = GenericFakeChatModel(messages=iter(()))
    request = ModelRequest(model=model, messages=messages, tools=[*middleware.tools], state={"messages": messages})
    middleware.wrap_model_call(request, lambda r: seen.extend(r.messages) or ModelResponse(result=[]))
    assert seen[0].text == "h0 (Omitted in context. recall(1) shows it again.)"
    assert seen[1:] == messages[1:]
    assert messages[0].content[1] == image  # the user's own message is as it was


@pytest.mark.parametrize(
    ("trigger", "fires"),
    [
        (None, False), (("messages", 5), True), (("messages", 6), False), (("tokens", 50), True), (("tokens", 51), False),
        (("fraction", 0.5), True), (("fraction", 0.51), False), ({"messages": 5, "tokens": 51}, False),
        ({"messages": 5, "tokens": 50}, True), ([("messages", 9), ("tokens", 50)], True),
        ([{"messages": 5, "tokens": 99}, ("fraction", 0.9)], False),
    ],
)  # fmt: skip
def test_triggers(trigger: Any, fires: bool) -> None:
    model = GenericFakeChatModel(messages=iter(()), profile={"max_input_tokens": 100})
    middleware = WindowMiddleware(trigger=trigger, keep=("messages", 1), token_counter=lambda m: 10 * len(m))
    seen: list[AnyMessage] = []
    messages = talk("h", "a", "h", "a", "h")
    request = ModelRequest(model=model, messages=messages, tools=[*middleware.tools], state={"messages": messages})
    middleware.wrap_model_call(request, lambda r: seen.extend(r.messages) or ModelResponse(result=[]))
    assert (len(seen) < 5) == fires


@pytest.mark.parametrize(("keep", "left"), [(("tokens", 37), 3), (("tokens", 36), 2), (("fraction", 0.3), 2)])
def test_what_is_kept(keep: Any, left: int) -> None:
    model = GenericFakeChatModel(messages=iter(()), profile={"max_input_tokens": 100})
    middleware = WindowMiddleware(
        trigger=("messages", 5), keep=keep, token_counter=lambda m: 7 + 10 * len(m), recall=True
    )
    seen: list[AnyMessage] = []
    messages = talk("h", "a", "h", "a", "h")
    request = ModelRequest(model=model, messages=messages, tools=[*middleware.tools], state={"messages": messages})
    middleware.wrap_model_call(request, lambda r: seen.extend(r.messages) or ModelResponse(result=[]))
    assert len(seen) == left + 1


@pytest.mark.parametrize(
    "bad", [("messages", 0), ("fraction", 1.5), ("tokens", 1.5), ("tokens", True), ("words", 3), {}, {"words": 3}, "x"]
)
def test_bad_triggers_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="must"):
        WindowMiddleware(trigger=bad)
    if isinstance(bad, tuple):
        with pytest.raises(ValueError, match="keep must be"):
            WindowMiddleware(keep=bad)


def test_a_long_header_does_not_trigger_again_at_every_step() -> None:
    """Trigger and keep measure the same, so that room is made for several steps at once."""
    middleware = WindowMiddleware(
        trigger=("tokens", 200), keep=("tokens", 150), token_counter=lambda m: 100 + 10 * len(m)
    )
    state: dict[str, Any] = {}
    evictions = 0
    for turns in range(1, 20):
        messages = talk(*["h", "a"] * turns, "h")
        decided = ask(middleware, messages, **{KEY: state})[1]
        evictions += bool(decided)
        state |= decided
    assert 4 <= evictions <= 8  # two messages a step, and 50 tokens are freed


def test_only_the_pictures_tokens_are_freed_where_only_pictures_leave() -> None:
    def counter(messages: Sequence[Any]) -> int:
        return sum(100 if is_media(block) else 10 for m in messages for block in blocks(m))

    image = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}
    messages: list[AnyMessage] = [
        HumanMessage([*[{"type": "text", "text": "x"}] * 20, image], id=str(i)) for i in range(4)
    ]
    middleware = WindowMiddleware(
        trigger=("tokens", 1200), keep=("tokens", 1021), media_only=True, token_counter=counter
    )
    assert len(ask(middleware, messages)[1]) == 2  # 1200 tokens; a picture is 100, and the line in its place 10


def test_a_fraction_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="max_input_tokens"):
        ask(WindowMiddleware(trigger=("fraction", 0.5)), talk("h"))


class Named:
    """A policy of the user's own: these leave first, in this order, and no others."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def order(self, units: Sequence[Unit]) -> list[Unit]:
        return [unit for key in self.keys for unit in units if unit.key == key]


def test_policies() -> None:
    messages = talk("h", "a", "h", "a", "h")
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 1), policy=Named("3", "4", "0"))
    seen, decided = ask(middleware, messages)
    # The question itself is protected whatever a policy says.
    assert seen[1:] == ["a1", "h2", "(Omitted in context: 2. recall(number) shows one again.)", "h4"]
    assert list(decided) == ["0", "3"]
    read = {"0": {"number": 1, "out": False, "read": 4}}
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 4), policy=LeastRecentlyReadMessages())
    assert list(ask(middleware, messages, **{KEY: read})[1]) == ["1"]
    assert list(ask(WindowMiddleware(trigger=("messages", 5), keep=("messages", 4)), messages, **{KEY: read})[1]) == [
        "0"
    ]


def test_what_was_recalled_stays_for_the_answer_and_leaves_after_the_others() -> None:
    messages = talk("h", "c", "c", "c")  # h0 c1 r1 c3 r3 c5 r5
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 1))
    by_the_last_step = {"1": {"number": 1, "out": False, "read": 7}}
    assert list(ask(middleware, messages, **{KEY: by_the_last_step})[1]) == ["3"]
    by_an_earlier_one = {"1": {"number": 1, "out": False, "read": 5}}
    assert list(ask(middleware, messages, **{KEY: by_an_earlier_one})[1]) == ["1", "3"]
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 5))
    assert list(ask(middleware, messages, **{KEY: by_an_earlier_one})[1]) == ["3"]
    assert list(ask(middleware, messages)[1]) == ["1"]


def test_removing_messages_moves_no_recall() -> None:
    messages = talk("h", "a", "h", "c", "c", "c")[2:]  # h2 c3 r3 c5 r5 c7 r7
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 1))
    for by, left in {"7": ["5"], "5": ["3", "5"], "removed": ["3", "5"]}.items():
        assert list(ask(middleware, messages, **{KEY: {"3": {"number": 1, "out": False, "by": by}}})[1]) == left
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 5))
    for by, left in {"5": ["5"], "removed": ["3"]}.items():
        assert list(ask(middleware, messages, **{KEY: {"3": {"number": 1, "out": False, "by": by}}})[1]) == left
    old = {str(i): {"number": i + 1, "out": False, "read": 31} for i in range(5)}  # in a thread that was longer then
    middleware = WindowMiddleware(trigger=("messages", 6), keep=("messages", 3))
    assert ask(middleware, talk(*["h", "a"] * 12, "h"), **{KEY: old})[0][-3:] == ["h22", "a23", "h24"]


@given(st.lists(st.sampled_from("hac"), max_size=8), st.integers(1, 6), st.booleans(), st.booleans())
def test_pairs_stay_whole_and_nothing_is_shown_twice(kinds: list[str], keep: int, recall: bool, newest: bool) -> None:
    messages = talk(*kinds, "h")
    policy = Named(*(m.id or "" for m in reversed(messages))) if newest else None
    middleware = WindowMiddleware(trigger=("messages", 1), keep=("messages", keep), recall=recall, policy=policy)
    seen, decided = ask(middleware, messages)
    shown = [text for text in seen if not text.startswith("(Omitted")]
    assert len(set(shown)) == len(shown)
    assert shown == [m.text for m in messages if m.text in shown]
    assert {t[1:] for t in shown if t[0] == "c"} == {t[1:] for t in shown if t[0] == "r"}
    assert shown[-1] == messages[-1].text
    gone = [m for m in messages if m.id in decided and not isinstance(m, ToolMessage)]
    assert not {m.text for m in gone} & set(shown)
    if not newest:
        assert len(shown) >= min(keep, len(messages)) - 1 or not recall  # a pair may take one more than is over
    if recall and gone:
        assert sorted(e["number"] for e in decided.values()) == list(range(1, len(decided) + 1))


def test_the_same_words_again_are_another_message() -> None:
    """Messages that no checkpointer gave an id are told apart, too."""
    messages: list[AnyMessage] = [HumanMessage("go on"), AIMessage("one"), HumanMessage("go on"), AIMessage("two")]
    messages.append(HumanMessage("go on"))
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 3))
    seen, decided = ask(middleware, messages)
    assert seen == ["(Omitted in context: 1-2. recall(number) shows one again.)", "go on", "two", "go on"]
    assert len(decided) == 2
    assert ask(middleware, messages, **{KEY: decided})[0] == seen


def test_numbers_are_never_given_twice() -> None:
    """Also where the user removed a message whose number the model may still have in mind."""
    gone = {"removed": {"number": 7, "out": True, "read": 1}}
    middleware = WindowMiddleware(trigger=("messages", 5), keep=("messages", 4))
    assert [e["number"] for e in ask(middleware, talk("h", "a", "h", "a", "h"), **{KEY: gone})[1].values()] == [8]


@tool
def look(at: int) -> str:
    """Looks at a second of the video."""
    return f"at {at} s: " + "red circle " * 6


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPT = [*(call("look", at=i) for i in range(4)), "I saw circles", call("recall", number=1), "the first was red"]


def run(agent: Any, questions: list[str], *, asynchronous: bool) -> dict[str, Any]:
    config = {"configurable": {"thread_id": "t"}}
    state: dict[str, Any] = {}
    for question in questions:
        given = {"messages": [HumanMessage(question)]}
        state = asyncio.run(agent.ainvoke(given, config)) if asynchronous else agent.invoke(given, config)
    return state


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_agent_recalls_what_slid_out(caller: Engine, asynchronous: bool) -> None:
    engine = ScriptedEngine(caller, SCRIPT)
    middleware = WindowMiddleware(trigger=("messages", 7), keep=("messages", 4))
    with ChatCtxwin(engine=engine) as chat:
        agent = create_agent(chat, [look], middleware=[middleware], checkpointer=InMemorySaver())
        said = run(agent, ["watch it", "what was first?"], asynchronous=asynchronous)
        held = agent.get_state({"configurable": {"thread_id": "t"}}).values
    # Nothing is missing from the user's messages, and the decisions are no part of the output.
    assert [m.type for m in said["messages"]] == ["human", *["ai", "tool"] * 4, "ai", "human", "ai", "tool", "ai"]
    assert KEY not in said
    assert said["messages"][-2].text == "Message 1 is shown again, at its place."
    assert said["messages"][-1].text == "the first was red"
    # What was recalled stays until its question is answered; others left for it.
    assert {e["number"]: e["out"] for e in held[KEY].values()} == {1: False} | dict.fromkeys(range(2, 7), True)
    assert [e["by"] for e in held[KEY].values() if not e["out"]] == [said["messages"][-3].id]
    prompts = engine.prompts
    first, last = "at 0 s: red circle", prompts[-1]
    assert ['"recall"' in p for p in prompts] == [False] * 3 + [True] * 4
    assert [first in p for p in prompts] == [False, True, True, False, False, False, True]
    assert "(Omitted in context: 1-2. recall(number) shows one again.)" in prompts[3]
    assert "Omitted in context: 1" not in last


def test_a_call_without_the_tool_is_told_of_none(caller: Engine) -> None:
    """Other middleware may choose the tools of a call."""

    @wrap_model_call
    def only_look(request: ModelRequest, handler: Any) -> Any:
        return handler(request.override(tools=[look]))

    engine = ScriptedEngine(caller, SCRIPT[:5])
    middleware = WindowMiddleware(trigger=("messages", 4), keep=("messages", 2))
    with ChatCtxwin(engine=engine) as chat:
        create_agent(chat, [look], middleware=[only_look, middleware]).invoke({"messages": [HumanMessage("watch")]})
    assert "at 0 s" not in engine.prompts[-1] and "recall" not in engine.prompts[-1]


@tool
def shoot(page: int) -> list[dict[str, Any]]:
    """Takes a picture of a page."""
    out = io.BytesIO()
    Image.new("RGB", (84, 84), (page * 40, 9, 99)).save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode()
    return [{"type": "text", "text": f"page {page}: "}, {"type": "image", "base64": data, "mime_type": "image/png"}]


def test_screenshots_leave_and_come_back_as_cache_edits(seeing_caller: Engine) -> None:
    """WebVoyager's pattern: the newest pictures and all of the transcript, and a look back."""
    script = [*(call("shoot", page=i) for i in range(4)), "four pages", call("recall", number=1), "the first was dark"]
    engine, told = ScriptedEngine(seeing_caller, script), list[Event]()
    middleware = WindowMiddleware(trigger=("messages", 3), keep=("messages", 2), media_only=True, recall="always")
    with ChatCtxwin(engine=engine, fidelity=Fidelity("patched"), observers=(told.append,)) as chat:
        assert chat.open().spec.vision
        agent = create_agent(chat, [shoot], middleware=[middleware], checkpointer=InMemorySaver())
        said = run(agent, ["look around", "what was first?"], asynchronous=False)["messages"]
    assert [sum(is_media(b) for b in blocks(m)) for m in said if isinstance(m, ToolMessage)] == [1, 1, 1, 1, 0]
    pictures = [prompt.count("<|vision_start|>") for prompt in engine.prompts]
    assert pictures == [0, 1, 2, 2, 2, 2, 2]
    assert all(f"page {i}: " in engine.prompts[-1] for i in range(4))
    assert "page 1: (Omitted in context. recall(2) shows it again.)" in engine.prompts[-1]
    assert "(Omitted in context. recall(1)" not in engine.prompts[-1]
    asks = [e for e in told if e.op == "ask" and e.answer is not None]
    last = [e.op for e in told if e.window == asks[-1].window]
    assert last.count("recall") == 2  # the picture, and the call behind it, which reads as it did before
    assert last.count("evict") == 1
    answers = [e.answer.usage for e in asks if e.answer]
    assert sum(u.vision_encodes for u in answers) == 4
    assert answers[-1].reused_tokens["survivor"] > answers[-1].reused_tokens.get("computed", 0)


def test_parallel_and_wrong_recalls(caller: Engine) -> None:
    script = [
        *(call("look", at=i) for i in range(4)), "done",
        "\n".join([call("recall", number=1), call("recall", number=2), call("recall", number=9)]), "seen",
    ]  # fmt: skip
    with ChatCtxwin(engine=ScriptedEngine(caller, script)) as chat:
        middleware = WindowMiddleware(trigger=("messages", 7), keep=("messages", 4))
        agent = create_agent(chat, [look], middleware=[middleware], checkpointer=InMemorySaver())
        said = run(agent, ["watch it", "what was first?"], asynchronous=False)["messages"]
    results = [m for m in said if isinstance(m, ToolMessage)][-3:]
    assert [m.status for m in results] == ["success", "success", "error"]
    assert results[2].text == "number must be one that is omitted (1-4), got 9"


def test_a_removed_message_cannot_be_recalled(caller: Engine) -> None:
    config = {"configurable": {"thread_id": "t"}}
    script = [*(call("look", at=i) for i in range(4)), "done", call("recall", number=1), "no"]
    with ChatCtxwin(engine=ScriptedEngine(caller, script)) as chat:
        middleware = WindowMiddleware(trigger=("messages", 7), keep=("messages", 4))
        agent: Any = create_agent(chat, [look], middleware=[middleware], checkpointer=InMemorySaver())
        said = run(agent, ["watch it"], asynchronous=False)["messages"]
        agent.update_state(config, {"messages": [RemoveMessage(said[i].id) for i in (1, 2)]})
        said = run(agent, ["what was first?"], asynchronous=False)["messages"]
    assert said[-2].text == "number must be one that is omitted (2-4), got 1"


@pytest.mark.parametrize("recall", [True, False])
def test_until_the_trigger_the_answers_are_the_same(caller: Engine, recall: bool) -> None:
    """With real answers, at ``exact``: the same words for the same prompts as without the middleware."""

    def answers(middleware: list[Any]) -> list[tuple[str, int]]:
        with ChatCtxwin(engine=caller, fidelity=Fidelity("exact"), max_tokens=6) as chat:
            agent = create_agent(
                chat, [look], system_prompt="be short", middleware=middleware, checkpointer=InMemorySaver()
            )
            said = run(agent, ["one?", "two?", "three?"], asynchronous=False)["messages"]
        return [
            (m.text, m.usage_metadata["input_tokens"]) for m in said if isinstance(m, AIMessage) and m.usage_metadata
        ]

    window = WindowMiddleware(trigger=("messages", 50), keep=("messages", 4), recall=recall)
    assert answers([window]) == answers([])
    assert len(answers([])) == 3


def test_any_chat_model_will_do() -> None:
    class Fake(GenericFakeChatModel):
        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self.bind(offered=[t.name for t in tools])

    model = Fake(messages=iter([AIMessage(f"a{i}") for i in range(6)]))
    middleware = WindowMiddleware(trigger=("tokens", 30), keep=("tokens", 20))
    agent = create_agent(model, [look], middleware=[middleware], checkpointer=InMemorySaver())
    said = run(agent, ["a question of some words"] * 6, asynchronous=False)["messages"]
    assert len(said) == 12
    held = agent.get_state({"configurable": {"thread_id": "t"}}).values[KEY]
    assert held
    assert all(entry["out"] for entry in held.values())


def test_a_model_whose_template_takes_no_tools_gets_none(tiny: Engine) -> None:
    for options in ({"trigger": ("messages", 4)}, {"trigger": ("fraction", 0.8)}, {"recall": "always"}):
        with ChatCtxwin(engine=tiny, fidelity=Fidelity("exact"), max_tokens=3) as chat:
            middleware = WindowMiddleware(**{"keep": ("messages", 2), **options})  # type: ignore[arg-type]
            agent = create_agent(chat, middleware=[middleware], checkpointer=InMemorySaver())
            said = run(agent, ["color of 00?", "color of 01?", "color of 02?"], asynchronous=False)["messages"]
            assert len(said) == 6 and all(message.text for message in said)


def test_what_triggers_is_the_prompt_as_it_goes_out(caller: Engine) -> None:
    """The recall tool takes more tokens than the conversation, and is not in the prompt before the first eviction."""
    said = talk("h", "a", "h")
    with ChatCtxwin(engine=caller, fidelity=Fidelity("exact"), max_tokens=3) as chat:
        tokens = chat.get_num_tokens_from_messages(list(said))
        for trigger, evicts in ((tokens + 30, False), (tokens, True)):
            middleware = WindowMiddleware(trigger=("tokens", trigger), keep=("tokens", 5))
            agent = create_agent(chat, middleware=[middleware])
            answer = agent.invoke({"messages": said})["messages"][-1]
            assert (answer.usage_metadata["input_tokens"] > tokens + 100) == evicts


def test_what_is_kept_has_room_for_the_tool(caller: Engine) -> None:
    """It is offered from the first eviction on; were it not counted then, the next call would evict again."""
    said = talk(*["h", "a"] * 40, "h")
    with ChatCtxwin(engine=caller, fidelity=Fidelity("exact"), max_tokens=3) as chat:
        tokens = chat.get_num_tokens_from_messages(list(said))
        keep = tokens - 50
        agent = create_agent(chat, middleware=[WindowMiddleware(trigger=("tokens", tokens), keep=("tokens", keep))])
        answer = agent.invoke({"messages": said})["messages"][-1]
        line = 80  # that stands for what was evicted
        assert keep - 100 < answer.usage_metadata["input_tokens"] <= keep + line


def test_system_messages_are_counted() -> None:
    counted: list[int] = []

    def counter(messages: Sequence[Any]) -> int:
        counted.append(len(messages))
        return 0

    middleware = WindowMiddleware(trigger=("tokens", 1), token_counter=counter)
    request = ModelRequest(
        model=GenericFakeChatModel(messages=iter(())), messages=talk("h"), system_message=SystemMessage("s"),
        state={"messages": talk("h")},
    )  # fmt: skip
    middleware.wrap_model_call(request, lambda r: ModelResponse(result=[]))
    assert counted == [2]
