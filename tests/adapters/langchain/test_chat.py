"""`ChatCtxwin` against a forward over the whole prompt, and against what LangChain expects of a chat model."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.runnables import ConfigurableField
from langgraph.checkpoint.memory import InMemorySaver

from adapters.langchain.watching import HEADER, Watch, look, picture
from ctxwin import Chunk, Fidelity, open_engine
from ctxwin.engines.base import Engine
from ctxwin.errors import UnsupportedModel
from ctxwin.tiny.world import make_stream, render
from ctxwin.window.events import Event
from engines.scripted import ScriptedEngine
from engines.tool_models import HERMES, write_tool_model
from langchain_ctxwin import messages as converter
from langchain_ctxwin.chat import ChatCtxwin
from langchain_ctxwin.middleware import WindowMiddleware


def test_the_answer_is_that_of_the_whole_prompt_whatever_was_asked_before(tiny: Engine, exact: ChatCtxwin) -> None:
    watch = Watch(tiny)
    programs = [[0, 1], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3], [3, 1, 2], [0, 1], [4, 5], [0, 1, 2, 3, 4]]
    for step, placed in enumerate(programs):
        query = watch.question(placed, step)
        answer = exact.invoke(watch.messages(placed, query))
        assert answer.content == watch.oracle(watch.encoded(placed), query), step
        usage = answer.response_metadata["ctxwin"]
        assert usage["exact"]
        assert usage["vision_encodes"] == 0 or placed[-1] == max(i for p in programs[: step + 1] for i in p)


def test_pictures_are_decode_base64_once_and_again_when_they_left_the_store(
    tiny: Engine, exact: ChatCtxwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tiny, seed=8)
    query = watch.question([0, 1])
    opened: list[Any] = []
    monkeypatch.setattr(
        converter,
        "_decode_base64",
        lambda data, kind, of=converter._decode_base64: opened.append(kind) or of(data, kind),
    )
    first = exact.invoke(watch.messages([0, 1], query))
    exact.get_num_tokens_from_messages(watch.messages([0, 1], query))
    assert exact.invoke(watch.messages([0, 1], query)).content == first.content
    assert len(opened) == 2
    for key in [media.key for encoded in watch.encoded([0, 1]) for media in encoded.media]:
        assert tiny.repo.delete(key)
        assert tiny.repo.delete(key.replace("embed/", "grid/"))
    for frame in watch.frames[:2]:
        tiny.repo.delete("source/" + Chunk.image(render(frame)).media[0].content)
    assert exact.invoke(watch.messages([0, 1], query)).content == first.content
    assert len(opened) == 2, "their KV serves without them"
    for key in list(tiny.repo.store.list("span/")):
        tiny.repo.delete(key)
    assert exact.invoke(watch.messages([0, 1], query)).content == first.content
    assert len(opened) == 4


def test_a_picture_may_stand_behind_the_question(tiny: Engine, exact: ChatCtxwin) -> None:
    frame = make_stream(4, 1)[0]
    messages = [SystemMessage(HEADER), HumanMessage(["what is this?", picture(frame)])]
    front = [tiny.encode(Chunk.text("what is this?")), tiny.encode(Chunk.image(render(frame)))]
    first = exact.invoke(messages)
    assert first.content == Watch(tiny).oracle(front, "")
    again = exact.invoke([*messages, first, HumanMessage("color of 12?")])
    exchange = tiny.encode_exchange("", tiny.text_ids(str(first.content)))
    assert again.content == Watch(tiny).oracle([*front, exchange], "color of 12?")
    assert again.usage_metadata is not None
    assert "computed" not in again.usage_metadata["input_token_details"]


def test_a_conversation_computes_what_is_new(tiny: Engine, exact: ChatCtxwin) -> None:
    watch = Watch(tiny, seed=5)
    first, second = watch.question([0, 1], 0), watch.question([0, 1], 1)
    messages = watch.messages([0, 1], first)
    answer = exact.invoke(messages)
    asked = [*messages, answer, HumanMessage(second)]
    again = exact.invoke(asked)
    exchange = tiny.encode_exchange(first, tiny.text_ids(str(answer.content)))
    assert again.content == watch.oracle([*watch.encoded([0, 1]), exchange], second)
    usage = again.usage_metadata
    assert usage is not None
    query = tiny.encode_query(second).tokens
    # The new exchange is finished behind its answer; nothing in front of the question is computed again.
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - query
    assert "computed" not in usage["input_token_details"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert exact.get_num_tokens_from_messages(asked) == usage["input_tokens"]


def test_dropping_a_message_is_an_eviction_where_that_is_allowed(tiny: Engine) -> None:
    watch, told = Watch(tiny, seed=6), list[Event]()
    with ChatCtxwin(engine=tiny, fidelity=Fidelity("patched"), max_tokens=8, observers=(told.append,)) as chat:
        chat.invoke(watch.messages([0, 1, 2], watch.question([0, 1, 2])))
        answer = chat.invoke(watch.messages([1, 2], watch.question([1, 2])))
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"].get("survivor") == sum(
            e.tokens for e in watch.encoded([1, 2])
        )
        assert answer.response_metadata["ctxwin"]["exact"] is False
        back = chat.invoke(watch.messages([0, 1, 2], watch.question([0, 1, 2])))
        assert back.usage_metadata is not None
        assert "computed" not in back.usage_metadata["input_token_details"]
    ops = [e.op for e in told]
    assert [op for op in ops if op in ("evict", "recall", "ask")] == ["ask", "evict", "ask", "evict", "recall", "ask"]
    assert ops.count("close") == 3


def test_copies_share_what_is_open(monkeypatch: pytest.MonkeyPatch, caller: Engine) -> None:
    """LangChain makes a new model for every call of a configurable one."""
    opened: list[ScriptedEngine] = []

    def open_one(name: str) -> ScriptedEngine:
        opened.append(ScriptedEngine(caller, lambda prompt: "yes"))
        return opened[-1]

    monkeypatch.setattr("langchain_ctxwin.chat.open_engine", open_one)
    with ChatCtxwin(model="any", max_tokens=8) as chat:
        warm = chat.configurable_fields(temperature=ConfigurableField(id="t"))
        for _ in range(3):
            assert warm.invoke("q", config={"configurable": {"t": 0.5}}).content == "yes"
        copy = chat.model_copy(update={"temperature": 0.7})
        assert copy.invoke("q").content == chat.invoke("q").content == "yes"
        assert len(opened) == len(chat.opened.pools) == 1
        chat.model_copy(update={"budget": 900}).invoke("q")
        assert len(opened) == 1 and len(chat.opened.pools) == 2
        for budget in range(900, 920):
            chat.model_copy(update={"budget": budget}).invoke("q")
        assert len(opened) == 1 and len(chat.opened.pools) == 8
        copy.close()
        assert not chat.opened.engines
        assert chat.invoke("q").content == "yes" and len(opened) == 2
    assert not chat.opened.engines and not copy.opened.pools


def test_parts_of_a_conversation_are_counted_in_any_order(caller: Engine) -> None:
    def looks(i: int) -> dict[str, Any]:
        return {"name": "look", "args": {"at": i}, "id": f"c{i}", "type": "tool_call"}

    talk: list[BaseMessage] = [
        SystemMessage("You look."),
        HumanMessage("a?"),
        AIMessage("", tool_calls=[looks(1), looks(2)]),
        ToolMessage("one", tool_call_id="c1"),
        ToolMessage("two", tool_call_id="c2"),
        AIMessage("ok"),
        HumanMessage("b?"),
    ]
    with ChatCtxwin(engine=caller) as chat:
        assert trim_messages(talk, max_tokens=5000, token_counter=chat) == talk
        assert trim_messages(talk, max_tokens=5000, token_counter=chat, strategy="first") == talk
        whole = chat.get_num_tokens_from_messages(talk)
        assert trim_messages(
            talk, max_tokens=whole // 2, token_counter=chat, start_on="human", include_system=True
        ) == [talk[0], talk[-1]]
        assert chat.get_num_tokens_from_messages(talk[::-1]) == whole  # as `trim_messages` counts from the end
        shuffled = [talk[i] for i in (3, 6, 0, 2, 5, 4, 1)]
        assert abs(chat.get_num_tokens_from_messages(shuffled) - whole) < whole / 3
        rounds = [[HumanMessage(f"q{i}"), AIMessage("", tool_calls=[looks(i)])] for i in range(6)]
        rounds = [[*r, ToolMessage("r", tool_call_id=f"c{i}"), AIMessage("a")] for i, r in enumerate(rounds)]
        long = [talk[0], *(m for r in rounds for m in r), talk[-1]]
        for most in range(100, chat.get_num_tokens_from_messages(long), 40):
            options: Any = {"strategy": "last", "start_on": "human", "include_system": True}
            kept = trim_messages(long, max_tokens=most, token_counter=chat, **options)
            assert chat.get_num_tokens_from_messages(kept) <= most
        assert chat.get_num_tokens("hello world") == len(caller.text_ids("hello world"))


def test_a_picture_that_did_not_fit_is_no_loss_for_the_next_call(tiny: Engine, exact: ChatCtxwin) -> None:
    watch = Watch(tiny, seed=9)
    with ChatCtxwin(engine=tiny, fidelity=Fidelity("exact"), budget=160, max_tokens=8) as chat:
        with pytest.raises(ContextOverflowError):
            chat.invoke(watch.messages([0, 1, 2], "color of 12?"))
        asked = watch.messages([1], watch.question([1]))
        assert chat.invoke(asked).content == exact.invoke(asked).content


def test_messages_longer_than_the_engine_are_counted_and_let_go(caller: Engine) -> None:
    most = caller.spec.max_tokens
    long, config = "a" * (most * 2), {"configurable": {"thread_id": "t"}}
    with ChatCtxwin(engine=ScriptedEngine(caller, lambda _: "ok")) as chat:
        talk = [SystemMessage(long), HumanMessage(long), AIMessage(long), HumanMessage("hi")]
        assert chat.get_num_tokens_from_messages(talk) > 3 * most
        assert chat.get_num_tokens(long) > most
        trimmed = trim_messages(talk[1:], max_tokens=500, token_counter=chat, strategy="last", start_on="human")
        assert trimmed == talk[-1:]
        middleware = WindowMiddleware(trigger=("fraction", 0.8), keep=("tokens", 1000))
        agent: Any = create_agent(chat, [look], middleware=[middleware], checkpointer=InMemorySaver())
        with pytest.raises(ContextOverflowError):
            agent.invoke({"messages": [HumanMessage(long)]}, config)
        assert agent.invoke({"messages": [HumanMessage("hi")]}, config)["messages"][-1].text == "ok"


def test_stop_sequences(caller: Engine) -> None:
    with ChatCtxwin(engine=ScriptedEngine(caller, lambda _: "red END of it"), stop=["END"]) as chat:
        for answer in (chat.invoke("q"), chat.invoke("q", stream=False)):
            assert answer.content == "red "
            assert answer.response_metadata["finish_reason"] == "stop"
        assert "".join(str(c.content) for c in chat.stream("q")) == "red "
        assert chat.invoke("q", stop=["of"]).content == "red END "
        assert chat.invoke("q", stop=[]).content == "red END of it"
        assert chat.invoke("q", max_tokens=2).response_metadata["finish_reason"] == "length"


def test_thinking_is_not_shown_again(tmp_path: Path) -> None:
    """As with Qwen3's template: an answer without thinking is remembered, one with it is computed as it reads later."""
    shown = "{{ m.content.split('</think>')[-1].lstrip() }}"
    strips = HERMES.replace("{{ '\n' }}{{ m.content }}{% endif %}", "{{ '\n' }}" + shown + "{% endif %}")
    assert strips != HERMES
    script = ["red", "<think>hm</think>blue", "green"]
    with open_engine(f"hf:{write_tool_model(tmp_path, strips)}") as inner:
        engine = ScriptedEngine(inner, script)
        with ChatCtxwin(engine=engine, fidelity=Fidelity("exact")) as chat:
            messages: list[BaseMessage] = []
            computed = []
            for question in ("one?", "two?", "three?"):
                messages.append(HumanMessage(question))
                messages.append(answer := chat.invoke(messages))
                computed.append(answer.usage_metadata["input_token_details"].get("computed", 0))  # type: ignore[index]
        assert [m.text for m in messages[1::2]] == script
        assert "hm" not in engine.prompts[2]
        opening = inner.encode_system_prompt("").tokens
        exchange = inner.encode_exchange("two?", inner.text_ids("blue")).tokens
        assert computed == [opening, 0, exchange]


def test_a_misspelt_attribute_is_refused_and_langchains_own_are_not(tiny: Engine) -> None:
    with pytest.raises(ValueError, match="must be given its own attributes, got temprature, top_k; `bind` takes"):
        ChatCtxwin(engine=tiny, temprature=1, top_k=3)
    assert ChatCtxwin(engine=tiny, timeout=60, max_retries=2, tags=["porch"]).temperature == 0
    with pytest.raises(ValueError, match="must be Unicode, got half of a surrogate pair"):
        ChatCtxwin(engine=tiny).invoke("caf\udce9")


def test_too_much_is_refused(tiny: Engine) -> None:
    watch = Watch(tiny)
    with ChatCtxwin(engine=tiny, budget=160, max_tokens=8) as chat:
        assert chat.profile is not None  # known before the first call
        assert chat.profile["max_input_tokens"] == 160
        chat.invoke(watch.messages([0], "color of 12?"))
        with pytest.raises(ContextOverflowError, match="must fit the budget"):
            chat.invoke(watch.messages([0, 1, 2], "color of 12?"))
        with pytest.raises(ContextOverflowError):
            chat.invoke([SystemMessage("long " * 200), HumanMessage("q")])


def test_the_longest_answer_is_what_the_budget_leaves(caller: Engine) -> None:
    with ChatCtxwin(engine=ScriptedEngine(caller, lambda _: "red " * 100), budget=50) as chat:
        answer = chat.invoke("what?")
        assert answer.usage_metadata is not None
        closing = len(caller.template_ids("<|im_end|>\n<|im_start|>user\n"))
        assert answer.usage_metadata["total_tokens"] == 50 - closing
        assert answer.response_metadata["finish_reason"] == "length"
        asked = chat.invoke([HumanMessage("what?"), AIMessage("red"), HumanMessage("now?")], max_tokens=3)
        assert asked.response_metadata["finish_reason"] == "length"


def test_many_conversations_at_once_stay_apart_and_bounded(caller: Engine) -> None:
    engine = ScriptedEngine(caller, lambda prompt: prompt.rsplit("user\n", 1)[1].split("<|im_end|>")[0].upper())
    with ChatCtxwin(engine=engine, max_windows=3) as chat, ThreadPoolExecutor(4) as threads:

        def talk(name: str) -> list[str]:
            messages: list[BaseMessage] = []
            for turn in range(3):
                messages.append(HumanMessage(f"{name}{turn}"))
                messages.append(chat.invoke(messages))
            return [str(m.content) for m in messages[1::2]]

        names = [f"n{i}x" for i in range(6)]
        assert list(threads.map(talk, names)) == [[f"{n.upper()}{t}" for t in range(3)] for n in names]
        assert [len(pool) for pool in chat.opened.pools.values()] == [3]


def test_leases_are_given_back(caller: Engine) -> None:
    with ChatCtxwin(engine=caller, max_tokens=4) as chat:
        chat.invoke("what?")
        [pool] = chat.opened.pools.values()
        assert pool is not None
        keys = pool._windows[0].snapshot().keys()
        assert keys
        assert all(caller.repo.leased(k) for k in keys)
    assert not any(caller.repo.leased(k) for k in keys)


def test_a_model_by_name_is_opened_late_and_closed() -> None:
    chat = ChatCtxwin(model="tiny:hf", max_tokens=4)
    assert chat.profile is None
    assert not chat.opened.pools
    with chat:
        engine = chat.open()
        assert chat.profile is not None
        assert (chat.profile["image_inputs"], chat.profile["tool_calling"]) == (True, False)
        assert chat.invoke("color of 12?").response_metadata["model_name"] == "tiny:hf"
    assert not chat.opened.pools
    assert engine is not None
    with pytest.raises(ValueError, match="an engine or the model"):
        ChatCtxwin()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model": "other"}, "create another ChatCtxwin"),
        ({"best_of": 3}, "must be among"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"top_p": 0}, "top_p must be > 0, got 0"),
        ({"n": 2}, "n must be 1 where the temperature is 0"),
        ({"top_logprobs": 2}, "logprobs must be true"),
    ],
)
def test_options_that_cannot_be_had_are_refused(caller: Engine, options: dict[str, Any], reason: str) -> None:
    with ChatCtxwin(engine=caller) as chat, pytest.raises(ValueError, match=reason):
        chat.invoke("q", **options)


def test_a_result_with_a_picture(tiny: Engine) -> None:
    """A picture that a tool returned is refused by name where the template has no turn for it."""
    result = ToolMessage([picture(make_stream(1, 1)[0])], tool_call_id="c")
    asked = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "c"}])
    with ChatCtxwin(engine=tiny) as chat, pytest.raises(UnsupportedModel, match="tool calls"):
        chat.invoke([HumanMessage("q"), asked, result, HumanMessage("r")])


def test_none_is_the_models_own_value(tiny: Engine) -> None:
    with ChatCtxwin(engine=tiny, temperature=0, max_tokens=2, seed=1) as chat:
        plain = chat.invoke("color of 12?")
        assert chat.invoke("color of 12?", temperature=None, top_p=None, seed=None).text == plain.text
        with pytest.raises(ValueError, match="the temperature is 0"):
            chat.invoke("color of 12?", temperature=None, n=2)


class Typed(TypedDict):
    """A circle."""

    color: str


@dataclass
class Classed:
    """A circle."""

    color: str


def test_forms_of_a_schema(caller: Engine) -> None:
    wanted = {"color": {"type": "string"}}
    with ChatCtxwin(engine=caller) as chat:
        for schema in (Typed, Classed, {"properties": wanted}):
            bound: Any = chat.with_structured_output(schema, method="json_schema")
            assert bound.first.kwargs["response_format"]["json_schema"]["schema"]["properties"] == wanted
        for wrong in (None, "x"):
            with pytest.raises(ValueError, match="schema must be a dict, pydantic model, TypedDict or dataclass, got"):
                chat.with_structured_output(wrong, method="json_schema")
