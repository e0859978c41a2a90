"""Options that a chat names for its window and its prompt: in its body's field ``ctxwin``, or in headers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ctxwin.fidelity import Fidelity
from ctxwin.validation import validate
from ctxwin_chats.context_management import Policy
from ctxwin_chats.lazy_drops import Bounds

ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
HEADER = "x-ctxwin-windows"
"""Of a request: ``auto`` or ``off``. Of an answer: ``auto``, or ``off`` and the reason."""
EDIT_FIELDS = ("context_management", "compaction")
"""Fields of a request that have its history edited."""
_SESSION = "x-session-id"
_NAMES = ("prompt_cache_key", "conversation", "user")
_MOST_NAME = 512
_SWITCHES = {"volatile": ("late", "append"), "prefill": ("idle",)}
"""What switches an option on; ``off`` switches it off."""
_WINDOWS_ONLY = {
    "audit": "whose answers are not audited",
    "merge": "which vLLM answers over all tokens of its prompt",
    "recompute": "whose one request has all tokens",
}
"""Fields of a fidelity that a chat is not served by, and why."""


@dataclass(frozen=True)
class PromptOptions:
    """Options of one prompt: how it may differ from its request, and if the next one is computed ahead of its request.

    Attributes:
        lazy_drops: how much of what the client drops may stay in it; None is nothing.
        volatile: where what changes in the system prompt is served: ``late``, ``append`` or, in its place, "".
        prefill: whether the next prompt may be computed while the engine idles.
    """

    lazy_drops: Bounds | None = None
    volatile: str = ""
    prefill: bool = False

    def replace(self, texts: Mapping[str, str]) -> PromptOptions:
        """Return these options with those in ``texts``, by name, instead. Raises ValueError."""
        drops = texts.get("lazy_drops")
        switches = {name: _parse(name, texts[name]) for name in _SWITCHES if name in texts}
        fields = vars(self) | switches | ({} if drops is None else {"lazy_drops": Bounds.parse(drops)})
        return PromptOptions(**fields | {"prefill": bool(fields["prefill"])})

    def __bool__(self) -> bool:
        return self.lazy_drops is not None or bool(self.volatile) or self.prefill


AS_SENT = PromptOptions()
"""Nothing differs, and nothing is computed ahead."""


@dataclass(frozen=True)
class ChatDefaults:
    """How a server's plain chats are served that say nothing themselves.

    Attributes:
        windows: whether they use windows: ``auto``, ``off``, or "" where none ever can.
        policy: edits of chats that have windows and send no ``context_management``.
        prompts: options of their prompts.
        late_system: whether the chat templates take a system message in front of the last turn.
        template_variables: names that the chat templates read.
    """

    windows: str = ""
    policy: Policy | None = None
    prompts: PromptOptions = AS_SENT
    late_system: bool = False
    template_variables: Collection[str] = ()


_PROMPT = tuple(PromptOptions.__dataclass_fields__)
"""Fields of a request's ``ctxwin``, and as ``x-ctxwin-lazy-drops`` its headers."""
_FIELDS = ("windows", "fidelity", *_PROMPT)


def _parse(name: str, text: str) -> str:
    if text not in (*_SWITCHES[name], "off"):
        raise ValueError(f"{name} must be {', '.join(_SWITCHES[name])} or off, got {text[:80]!r}")
    return "" if text == "off" else text


@dataclass
class ChatOptions:
    """Options of one chat.

    Attributes:
        name: the client's name of the conversation; "" for none.
        fidelity: of its window; None is the server's default.
        off: why it is served without a window; "" if it has one.
        prompt: how its prompt may differ from it, and if the next one is computed ahead.
        record_name: the conversation's name in a store (`ctxwin_chats.shared_records`); "" where it is not saved.
    """

    name: str = ""
    fidelity: Fidelity | None = None
    off: str = ""
    prompt: PromptOptions = AS_SENT
    record_name: str = ""


def read_options(
    path: str, headers: Mapping[str, str], data: Any, default: str, prompt: PromptOptions = AS_SENT
) -> ChatOptions | None:
    """Read the options of a request; None if it uses neither a window nor anything else of ours.

    Removes our own field (``ctxwin``) from ``data``. Raises ValueError for an unknown mode or fidelity.

    Args:
        headers: by lower-case name.
        default, prompt: of requests that say nothing.
    """
    if path not in ROUTES or not isinstance(data, dict):
        return None
    mode, extension = _window_mode(headers, data, default), data.pop("ctxwin", None)
    extension = {} if extension is None else extension
    if not isinstance(extension, dict) or extension.keys() - _FIELDS:
        raise ValueError(f"ctxwin must be an object with {', '.join(_FIELDS)}; leave out what else it has")
    fidelity = extension.get("fidelity")
    options = ChatOptions(fidelity=None if fidelity is None else validate(Fidelity.model_validate, fidelity))
    for name, lack in _WINDOWS_ONLY.items():
        if value := getattr(options.fidelity, name, None):
            raise ValueError(
                f"{name} must be {Fidelity.model_fields[name].default} behind a chat, {lack}, got {value}; omit it, or ask a "
                "window (POST /v1/windows)"
            )
    values = {name: extension.get(name) or headers.get(f"x-ctxwin-{name.replace('_', '-')}") for name in _PROMPT}
    options.prompt = prompt.replace({name: str(value) for name, value in values.items() if value is not None})
    has_options = bool(options.prompt) or values["lazy_drops"] is not None
    has_options = has_options or any(data.get(name) is not None for name in EDIT_FIELDS)
    if mode == "off" and not has_options:
        return None
    options.name = conversation_name(headers, data)
    if mode == "off":
        options.off = "windows are off"  # edits of the request are applied without windows, too
    elif _has_named_media(data):
        options.off = "media are named by the client"
    elif data.get("use_beam_search"):
        options.off = "beam search asks the engine anew for every token"
    elif data.get("background"):
        options.off = "the answer outlives its request"
    return options


def _window_mode(headers: Mapping[str, str], data: Any, default: str) -> str:
    """Return ``auto`` if a request may use a window, else ``off``. Raises ValueError for anything else."""
    extension = data.get("ctxwin") if isinstance(data, dict) else None
    mode = (extension.get("windows") if isinstance(extension, dict) else None) or headers.get(HEADER) or default
    if mode not in ("auto", "off"):
        raise ValueError(f"windows must be auto or off, got {str(mode)[:60]!r}")
    return str(mode)


def conversation_name(headers: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """Return the conversation's name, prefixed with its kind, so that a user never equals a session."""
    conversation = data.get("conversation")
    fields = {**data, "conversation": conversation.get("id") if isinstance(conversation, dict) else conversation}
    names = [("session", headers.get(_SESSION)), *((name, fields.get(name)) for name in _NAMES)]
    for kind, name in names:
        if isinstance(name, str) and name:
            return f"{kind}:{name[:_MOST_NAME]}"
    return ""


def _has_named_media(data: Mapping[str, Any]) -> bool:
    """Return whether a request names media by ``uuid``: the content under a name may change."""
    waiting = [data.get("messages"), data.get("input")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if value.get("uuid") is not None:
                return True
            waiting += [value.get("content"), value.get("output")]
    return False
