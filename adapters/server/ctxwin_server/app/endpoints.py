"""Endpoints: our own, and those of the OpenAI server that tenants may use.

To tenants only the endpoints, fields and headers listed here are served: those that a newer vLLM adds need a review first.
"""

import os
from dataclasses import dataclass
from typing import Any

from ctxwin.engines.sampling import SamplingOptions
from ctxwin.window.serialization import REFERENCE
from ctxwin_client.errors import NotAllowed

CHUNKS, WINDOWS, LIBRARIES = "/v1/chunks", "/v1/windows", "/v1/libraries"
ABOUT, READY = "/v1/ctxwin/about", "/ready"
CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"
_READABLE = (READY, "/health", "/ping", "/version", "/metrics", "/v1/models")


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of the OpenAI server that takes a JSON body.

    Attributes:
        fields: of the body that tenants may send.
        generates: whether it computes KV: its body then has a ``cache_salt``, and it takes a slot among running requests.
    """

    fields: frozenset[str]
    generates: bool


def _fields(*names: str) -> frozenset[str]:
    return frozenset(name for line in names for name in line.split())


_HEADERS = _fields(
    "accept accept-encoding accept-language anthropic-beta anthropic-version authorization cache-control connection",
    "content-length content-type expect host idempotency-key origin referer te traceparent tracestate",
    "transfer-encoding user-agent x-forwarded-for x-forwarded-proto",
)
_OPTIONS = " ".join(SamplingOptions.__annotations__)
_SAMPLING = """model n max_tokens
    stop stop_token_ids include_stop_str_in_output ignore_eos min_tokens logit_bias logprobs prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words skip_special_tokens spaces_between_special_tokens length_penalty
    truncate_prompt_tokens truncation_side add_special_tokens response_format structured_outputs stream stream_options
    return_tokens_as_token_ids return_token_ids echo user cache_salt priority request_id"""
_IGNORED = "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity modalities"
_TEMPLATE = "tools tool_choice add_generation_prompt continue_final_message chat_template_kwargs documents"
ROUTERS = ("no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states")
"""Fields that routers add to every chat since other servers have them; vLLM has not."""
_TOKENIZED = "model prompt messages add_special_tokens return_token_strs"
_ANTHROPIC = "model messages system tools tool_choice thinking service_tier"
PLAIN = {
    CHAT: Endpoint(
        _fields(
            _OPTIONS, _SAMPLING, _IGNORED, _TEMPLATE, "messages top_logprobs max_completion_tokens reasoning_effort",
            "thinking_token_budget include_reasoning parallel_tool_calls",
        ),
        generates=True,
    ),
    "/v1/completions": Endpoint(_fields(_OPTIONS, _SAMPLING, "prompt suffix"), generates=True),
    "/v1/responses": Endpoint(
        _fields(
            _OPTIONS, "model input instructions max_output_tokens max_tool_calls",
            "stop ignore_eos logit_bias top_logprobs include include_reasoning",
            "parallel_tool_calls reasoning text tool_choice tools truncation user stream skip_special_tokens",
            "include_stop_str_in_output structured_outputs cache_salt priority request_id", _IGNORED,
        ),
        generates=True,
    ),
    "/v1/messages": Endpoint(
        _fields(_ANTHROPIC, "cache_salt max_tokens metadata output_config stop_sequences stream temperature top_k top_p"),
        generates=True,
    ),
    "/tokenize": Endpoint(_fields(_TOKENIZED, _TEMPLATE), generates=False),
    "/detokenize": Endpoint(_fields("model tokens"), generates=False),
    COUNT: Endpoint(_fields(_ANTHROPIC), generates=False),
}  # fmt: skip


def is_ours(path: str) -> bool:
    """Return whether a path is one of our routes."""
    return any(path == root or path.startswith(root + "/") for root in (CHUNKS, WINDOWS, LIBRARIES, ABOUT))


def check_endpoint(method: str, path: str) -> None:
    """Raise NotAllowed for an endpoint that is not served to tenants."""
    if path in PLAIN if method == "POST" else method in ("GET", "HEAD") and _is_readable(path):
        return
    raise NotAllowed(
        f"{method} {path[:200]} is not served to tenants: nobody has made sure that it keeps them apart; see the security "
        "page for what is"
    )


def check_fields(path: str, data: dict[str, Any]) -> None:
    """Raise NotAllowed for a field that tenants may not send; null counts as absent."""
    unknown = sorted(name for name, value in data.items() if value is not None and name not in PLAIN[path].fields)
    if unknown:
        raise NotAllowed(f"{', '.join(unknown)[:200]} is not served to tenants at {path}; leave it out")


def check_stored(path: str, data: dict[str, Any], tenant: str | None) -> None:
    """Refuse ``previous_response_id`` where responses are not stored: NotAllowed for tenants, otherwise ValueError."""
    if path != "/v1/responses" or data.get("previous_response_id") is None or (stores_responses() and not tenant):
        return
    otherwise = "" if tenant else ", or start it with VLLM_ENABLE_RESPONSES_API_STORE=1"
    raise (NotAllowed if tenant else ValueError)(
        "previous_response_id must be left out: this server stores no responses. Send the whole history as input (what stood "
        f"there before is not computed again){otherwise}"
    )


def stores_responses() -> bool:
    """Return whether vLLM stores responses, readable by anyone who knows their ids; by default it does not."""
    return os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") not in ("", "0")


def allowed_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a tenant's request that reach the server: none that set a priority, a rank or an id."""

    def allowed(name: str) -> bool:
        return name in _HEADERS or name.startswith(("x-stainless-", "sec-"))

    return [(name, value) for name, value in headers if allowed(name.decode("latin-1").lower())]


def names_chunks(data: Any) -> bool:
    """Return whether a content part of a chat request is a chunk of ours."""
    messages = data.get("messages") if isinstance(data, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == REFERENCE:
                return True
    return False


def _is_readable(path: str) -> bool:
    return any(path == readable or path.startswith(readable + "/") for readable in _READABLE)
