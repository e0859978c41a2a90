"""What a model can do and what an answer cost, in LangChain's terms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from langchain_core.language_models import ModelProfile
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from ctxwin.adapters.langchain.toolcalls import Reader, learn
from ctxwin.engines.base import Engine
from ctxwin.errors import UnsupportedModel
from ctxwin.window.answer import Answer

_COMPUTED = ("computed", "formed")  # lanes whose tokens went through a forward


def profile_of(engine: Engine, budget: int | None) -> ModelProfile:
    """`BaseChatModel.profile` of an engine's model; ``max_input_tokens`` is the window's budget."""
    vision, tools = engine.spec.vision, _takes_tools(engine)
    return ModelProfile(
        max_input_tokens=min(budget or engine.spec.max_tokens, engine.spec.max_tokens),
        text_inputs=True, text_outputs=True, image_inputs=vision, video_inputs=vision, image_url_inputs=False,
        pdf_inputs=False, audio_inputs=False, image_outputs=False, audio_outputs=False, video_outputs=False,
        tool_calling=tools, tool_call_streaming=tools, tool_choice=False, structured_output=False,
        image_tool_message=vision and tools, reasoning_output=False,
    )  # fmt: skip


def remembers(engine: Engine, answer: str = "") -> bool:
    """Whether ``answer`` reads the same as an earlier turn: no thinking that is stripped, no other opening."""
    template = engine.template
    try:
        if template is not None and not template.plain:
            template.exchange("", answer)
    except UnsupportedModel:
        return False
    return True


def usage_metadata(answer: Answer) -> UsageMetadata:
    """Tokens in and out. ``cache_read`` are those of system prompt and messages that no forward ran for; then tokens by lane."""
    usage = answer.usage
    read = sum(tokens for lane, tokens in usage.reused_tokens.items() if lane not in _COMPUTED)
    details = {"cache_read": read, **usage.reused_tokens}
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.answer_tokens,
        total_tokens=usage.prompt_tokens + usage.answer_tokens,
        input_token_details=cast("InputTokenDetails", details),
    )


def response_metadata(answer: Answer, reader: Reader, room: int, model: str) -> dict[str, Any]:
    """``room`` is how many tokens the answer could have; ``ctxwin`` holds the whole `ctxwin.Usage`."""
    ended = reader.stopped or len(answer.token_ids) < room
    return {
        "model_name": model,
        "model_provider": "ctxwin",
        "finish_reason": "length" if not ended else "tool_calls" if reader.calls else "stop",
        "ctxwin": asdict(answer.usage),
    }


def _takes_tools(engine: Engine) -> bool:
    try:
        learn(engine)
    except UnsupportedModel:
        return False
    return True
