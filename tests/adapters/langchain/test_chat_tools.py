"""Tools of `ChatCtxwin`: bound, called in a stream and by an agent, broken and cut off."""

import re
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from adapters.langchain.watching import CALL, look
from ctxwin import Fidelity
from ctxwin.engines.base import Engine
from ctxwin.errors import UnsupportedModel
from engines.scripted import ScriptedEngine
from langchain_ctxwin.chat import ChatCtxwin


def test_an_agent_calls_a_tool(caller: Engine) -> None:
    engine = ScriptedEngine(caller, [f"I look.\n{CALL}", "a circle"])
    tokenizer = caller.encoder.checkpoint.tokenizer  # type: ignore[attr-defined]
    with ChatCtxwin(engine=engine, fidelity=Fidelity("exact")) as chat:
        agent: Any = create_agent(chat, [look], system_prompt="Use tools.")
        said = agent.invoke({"messages": [HumanMessage("what is it?")]})["messages"]
    assert [m.type for m in said] == ["human", "ai", "tool", "ai"]
    assert (said[1].content, said[2].content, said[3].content) == ("I look.", "at 3 s: a red circle", "a circle")
    assert [(c["name"], c["args"]) for c in said[1].tool_calls] == [("look", {"at": 3})]
    assert said[1].response_metadata["finish_reason"] == "tool_calls"
    schema = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a second of the video.",
            "parameters": {"properties": {"at": {"type": "integer"}}, "required": ["at"], "type": "object"},
        },
    }
    asked = [
        {"role": "system", "content": "Use tools."}, {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 3}}}]},
        {"role": "tool", "content": "at 3 s: a red circle"},
    ]  # fmt: skip
    shown = [
        tokenizer.apply_chat_template(m, tools=[schema], tokenize=False, add_generation_prompt=True)
        for m in (asked[:2], asked)
    ]
    assert engine.prompts == shown
    # The call was remembered as it was made: the second prompt computes the tool's result and nothing else.
    usage = said[3].usage_metadata
    result = "<tool_response>\nat 3 s: a red circle\n</tool_response>"
    assert usage["input_tokens"] - usage["input_token_details"]["cache_read"] == caller.encode_query(result).tokens


def test_tool_calls_in_a_stream(caller: Engine) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"at": \n</tool_call>'
    engine = ScriptedEngine(caller, lambda _: f"I look.\n{CALL}\n{CALL}\n{broken}")
    with ChatCtxwin(engine=engine) as chat:
        bound = chat.bind_tools([look])
        whole = bound.invoke("q", stream=False)
        chunks = list(bound.stream("q"))
        merged: Any = chunks[0]
        for chunk in chunks[1:]:
            merged += chunk
    for message in (whole, merged):
        assert message.content == "I look."
        assert [(c["name"], c["args"]) for c in message.tool_calls] == [("look", {"at": 3})] * 2
        assert [c["args"] for c in message.invalid_tool_calls] == [broken]
        assert len({c["id"] for c in (*message.tool_calls, *message.invalid_tool_calls)}) == 3
    assert [len(c.tool_call_chunks) for c in chunks if isinstance(c, AIMessageChunk)].count(1) == 3


def test_a_call_that_was_cut_off_says_so(caller: Engine) -> None:
    with ChatCtxwin(engine=ScriptedEngine(caller, lambda _: CALL)) as chat:
        cut = chat.bind_tools([look]).invoke("q", max_tokens=len(caller.text_ids(CALL)) - 16)
        whole = chat.bind_tools([look]).invoke("q")
    assert (len(cut.invalid_tool_calls), cut.response_metadata["finish_reason"]) == (1, "length")
    assert (len(whole.tool_calls), whole.response_metadata["finish_reason"]) == (1, "tool_calls")


def test_an_agent_goes_on_behind_broken_calls(caller: Engine) -> None:
    """LangChain's agents answer malformed calls themselves, in front of the results of the others, at every later turn."""
    broken, config = "<tool_call>\n{bad\n</tool_call>", {"configurable": {"thread_id": "t"}}
    engine = ScriptedEngine(caller, [broken, f"I look.\n{CALL}\n{broken}", "a circle"])
    with ChatCtxwin(engine=engine, fidelity=Fidelity("exact")) as chat:
        agent: Any = create_agent(chat, [look], checkpointer=InMemorySaver())
        for question in ("a?", "b?"):
            said = agent.invoke({"messages": [HumanMessage(question)]}, config)["messages"]
        assert chat.get_num_tokens_from_messages(said) > 0
    assert said[-1].text == "a circle"
    error = r"<tool_response>\nTool call unknown .* malformed or truncated\.\n</tool_response>"
    turns = re.escape(broken) + rf"<\|im_end\|>\n<\|im_start\|>user\n{error}"
    turns += r"<\|im_end\|>\n<\|im_start\|>user\nb\?<\|im_end\|>\n<\|im_start\|>assistant\n"
    result = re.escape("<tool_response>\nat 3 s: a red circle\n</tool_response>")
    turns += re.escape(f"I look.\n{broken}\n{CALL}") + rf"<\|im_end\|>\n<\|im_start\|>user\n{error}\n{result}"
    assert re.search(turns, engine.prompts[-1]), engine.prompts[-1]


def test_tools_are_for_models_that_take_them(tiny: Engine, caller: Engine) -> None:
    with ChatCtxwin(engine=tiny) as chat, pytest.raises(UnsupportedModel, match="drops tool calls"):
        chat.bind_tools([look])
    engine = ScriptedEngine(caller, lambda _: CALL)

    @tool
    def wait() -> str:
        """Waits."""
        return ""

    with ChatCtxwin(engine=engine) as chat:
        chat.bind_tools([look, wait], tool_choice="look").invoke("q")
        assert "Looks at" in engine.prompts[-1]
        assert "Waits" not in engine.prompts[-1]
        assert chat.bind_tools([look, wait], tool_choice="none").invoke("q").content == CALL
        assert "Looks at" not in engine.prompts[-1]
        named: list[Any] = [{"type": "function", "function": {"name": "look"}}, {"type": "tool", "name": "look"}]
        for choice in named:
            chat.bind_tools([look, wait], tool_choice=choice).invoke("q")
            assert "Looks at" in engine.prompts[-1] and "Waits" not in engine.prompts[-1]
        for kind in ("any", "auto"):
            chat.bind_tools([look, wait], tool_choice={"type": kind}).invoke("q")
            assert "Looks at" in engine.prompts[-1] and "Waits" in engine.prompts[-1]
        for bad in ("jump", {}, {"type": "tool", "name": "jump"}, {"type": "allowed_tools"}, {"function": None}):
            with pytest.raises(ValueError, match="tool_choice must be"):
                chat.bind_tools([look], tool_choice=bad)


def test_binding_tools_opens_no_engine() -> None:
    """Agents bind in their event loop, which opening a model would block."""
    with ChatCtxwin(model="tiny:hf", max_tokens=4) as chat:
        bound = chat.bind_tools([look])
        assert not chat.opened.pools
        with pytest.raises(UnsupportedModel, match="drops tool calls"):
            bound.invoke("q")
