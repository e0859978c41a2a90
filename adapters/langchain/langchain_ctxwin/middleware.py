"""`WindowMiddleware`: an agent sees a window over its messages; evicted ones can be recalled, nothing is deleted."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Annotated, Any, NotRequired, Protocol, TypedDict

from langchain.agents.middleware.summarization import ContextSize, TriggerClause
from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ExtendedModelResponse,
    ModelCallResult,
    ModelRequest,
    ModelResponse,
    PrivateStateAttr,
)
from langchain.tools import ToolRuntime
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.tools import BaseTool, tool
from langgraph.types import Command

from langchain_ctxwin.chat import ChatCtxwin
from langchain_ctxwin.messages import message_key

KEY = "ctxwin_omitted"
"""State key of the decisions; private, so it is checkpointed but not in an agent's input or output."""

TokenCounter = Callable[[Sequence[BaseMessage]], int]
Trigger = ContextSize | TriggerClause | list[ContextSize | TriggerClause]
"""The trigger of LangChain's `SummarizationMiddleware`; see `WindowMiddleware`."""


@dataclass(frozen=True)
class Unit:
    """Messages that leave and come back together: one message, or an answer that calls tools with their results.

    Attributes:
        key: its name in the decisions: the id of its first message; without one, its content and a count.
        messages: in order.
        position: of its first message in the conversation; larger is newer.
        read: the conversation's length when it was last read: when it arrived, or was recalled.
        tokens: its tokens in the context; 0 if tokens do not decide.
    """

    key: str
    messages: tuple[AnyMessage, ...]
    position: int
    read: int = 0
    tokens: int = 0

    @property
    def has_media(self) -> bool:
        """True if a message holds a picture or video."""
        return any(is_media(block) for m in self.messages for block in blocks(m))


class MessagePolicy(Protocol):
    """Order in which messages leave, for any chat model; `ctxwin.policies` are the same for the chunks of a window."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """Return ``units`` (in prompt order) in the order in which they leave; one that is omitted never leaves."""


class OldestMessages:
    """The oldest message leaves first."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """Return the units in prompt order."""
        return units


class LeastRecentlyReadMessages:
    """The message written or recalled least recently leaves first."""

    def order(self, units: Sequence[Unit]) -> Iterable[Unit]:
        """Return the units by the time of their last read."""
        return sorted(units, key=lambda unit: unit.read)


class Omitted(TypedDict):
    """A decision about a unit: its number, its state (out or not), and the unit that recalled it (once: `Unit.read` then)."""

    number: int
    out: bool
    read: NotRequired[int]
    by: NotRequired[str]


class WindowState(AgentState[Any]):
    """An agent's state with the decisions of `WindowMiddleware`; the latest about a unit counts, so parallel recalls agree."""

    ctxwin_omitted: NotRequired[Annotated[dict[str, Omitted], PrivateStateAttr, operator.or_]]


class WindowMiddleware(AgentMiddleware[WindowState, Any]):
    """Keeps what the model sees within bounds: messages leave by a policy, and a tool brings them back.

    The user's messages stay in the state unchanged. An answer that calls tools leaves together with their results. The
    question being answered, the last messages and those they recalled never leave; messages recalled earlier for this
    question leave after all others. With `ChatCtxwin` every decision is a cache edit; any other chat model works as well.

    Args:
        trigger: when to evict: ``("fraction"|"tokens"|"messages", n)``, a dict of thresholds that must all be met, or a list
            of which any is enough; None: never.
        keep: amount that stays, in the same terms; tokens count the entire prompt, system prompt and tools included.
        policy: order in which messages leave.
        recall: put a line in place of evicted messages and give the model a tool ``recall(number)``, from the first eviction
            on, which changes all of the prompt; ``"always"``: from the start. A `ChatCtxwin` whose chat template takes no
            tools gets neither; nor does a call whose tools other middleware, listed before this one, chose without it.
        media_only: evict only pictures and videos and keep the text around them, as WebVoyager does with its screenshots;
            ``messages`` then counts messages that contain media.
        token_counter: counts messages; default: the model's own count for `ChatCtxwin`, else LangChain's estimate.

    Raises ValueError for a trigger or keep of another form, and for a fraction if the model's profile has no limit.
    """

    state_schema = WindowState

    def __init__(
        self,
        *,
        trigger: Trigger | None = None,
        keep: ContextSize = ("messages", 20),
        policy: MessagePolicy | None = None,
        recall: bool | str = True,
        media_only: bool = False,
        token_counter: TokenCounter | None = None,
    ) -> None:
        super().__init__()
        if recall not in (True, False, "always"):
            raise ValueError(f'recall must be True, False or "always", got {recall!r}')
        self._clauses = _clauses(trigger)
        self._keep = _validate(keep, "keep")
        self._policy: MessagePolicy = policy or OldestMessages()
        self._recall = recall
        self._media_only = media_only
        self._counter = token_counter
        self.tools: list[BaseTool] = [_recall_tool()] if recall else []

    def wrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        """Show the model the messages that stay, and record the decisions with its answer."""
        request, decided = self._decide(request)
        return _record(handler(request), decided)

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse[Any]]]
    ) -> ModelCallResult[Any]:
        """`wrap_model_call` for async agents."""
        request, decided = await asyncio.to_thread(self._decide, request)
        return _record(await handler(request), decided)

    def _decide(self, request: ModelRequest) -> tuple[ModelRequest, dict[str, Omitted]]:
        history: dict[str, Omitted] = dict(request.state.get(KEY) or {})  # type: ignore[call-overload]
        request = request if self._recalls(request) else self._with_tools(request, {})
        units = units_of(request.messages, history)
        decisions = {unit.key: history[unit.key] for unit in units if unit.key in history}
        new_decisions: dict[str, Omitted] = {}
        if self._clauses:
            counter = self._counting(self._with_tools(request, decisions))  # as the prompt would go out
            view = self._view(units, decisions, request)
            here = [u for u in units if u.key not in decisions or not decisions[u.key]["out"]]

            @cache
            def measured(kind: str) -> float:
                if kind == "messages":
                    return sum(map(self._size, here))
                return measured("tokens") / _limit(request.model) if kind == "fraction" else counter(view)

            if any(all(measured(kind) >= least for kind, least in clause.items()) for clause in self._clauses):
                # Numbers are not reused, even if the user has removed the message since.
                number = max((entry["number"] for entry in history.values()), default=0)
                for unit in self._leaving(units, here, view, request):
                    number += unit.key not in decisions
                    unit_number = decisions[unit.key]["number"] if unit.key in decisions else number
                    new_decisions[unit.key] = Omitted(number=unit_number, out=True)
                decisions |= new_decisions
        omitted = any(entry["out"] for entry in decisions.values())
        view = self._view(units, decisions, request) if omitted else list(request.messages)
        return self._with_tools(request, decisions).override(messages=view), new_decisions

    def _size(self, unit: Unit) -> int:
        """Return the number of ``messages`` that a unit counts as."""
        return int(unit.has_media) if self._media_only else len(unit.messages)

    def _view(self, units: Sequence[Unit], decisions: Mapping[str, Omitted], request: ModelRequest) -> list[Any]:
        out = {key for key, entry in decisions.items() if entry["out"]}
        numbers = {key: decisions[key]["number"] for key in out} if self._recalls(request) else None
        return render(units, out, numbers, media_only=self._media_only)

    def _leaving(
        self, units: Sequence[Unit], here: Sequence[Unit], view: Sequence[BaseMessage], request: ModelRequest
    ) -> list[Unit]:
        """Return the units of ``here`` to evict, in prompt order: down to ``keep`` as far as policy and protection allow."""
        kind, target = self._keep
        candidates = [u for u in here if self._size(u)]
        sizes = {u.key: self._size(u) for u in candidates}
        # Tokens are those of the whole prompt as it will be, with the tool: the trigger would be reached again at once.
        remaining = sum(sizes.values()) if kind == "messages" else self._counting(request)(view)
        if kind != "messages":
            target, counter = target * _limit(request.model) if kind == "fraction" else target, self._counting(request)
            sizes = {u.key: counter(u.messages) - counter(self._remainder(u, request)) for u in candidates}
            candidates = [replace(u, tokens=sizes[u.key]) for u in candidates]
        protected, late = _protected(units)
        leaving: set[str] = set()
        for unit in sorted(self._policy.order(candidates), key=lambda u: u.key in late):
            if remaining <= target:
                break
            if unit.key not in protected | leaving:
                leaving.add(unit.key)
                remaining -= sizes[unit.key]
        if leaving and not self._recalls(request) and not self._media_only:
            # Many models want a conversation to begin with its user: answers leave with their question.
            for unit in (u for u in here if u.key not in leaving):
                if isinstance(unit.messages[0], HumanMessage) or unit.key in protected:
                    break
                leaving.add(unit.key)
        return [u for u in units if u.key in leaving]

    def _remainder(self, unit: Unit, request: ModelRequest) -> list[Any]:
        """Return the messages that stay of an evicted unit; the placeholder of entire messages is shared and not counted."""
        numbers = {unit.key: 1} if self._recalls(request) else None
        return render([unit], {unit.key}, numbers, media_only=True) if self._media_only else []

    def _recalls(self, request: ModelRequest) -> bool:
        """Return whether messages can be recalled: a chat template may take no tools, other middleware drop this one."""
        takes_none = isinstance(request.model, ChatCtxwin) and _profile(request.model).get("tool_calling") is False
        return not takes_none and any(map(self._is_ours, request.tools))

    def _is_ours(self, offered: Any) -> bool:
        return isinstance(offered, BaseTool) and offered.name in [t.name for t in self.tools]

    def _with_tools(self, request: ModelRequest, decisions: Mapping[str, Omitted]) -> ModelRequest:
        """Return the request with the tools of this call: ``recall`` only if there is a message to recall."""
        if self._recalls(request) and (self._recall == "always" or decisions):
            return request
        return request.override(tools=[t for t in request.tools if not self._is_ours(t)])

    def _counting(self, request: ModelRequest) -> TokenCounter:
        system = [request.system_message] if request.system_message else []
        if (counter := self._counter) is not None:
            return lambda messages: counter([*system, *messages])
        model, tools = request.model, request.tools
        if isinstance(model, ChatCtxwin):
            return lambda messages: model.get_num_tokens_from_messages([*system, *messages], tools)
        return lambda messages: count_tokens_approximately([*system, *messages], tools=tools)


def _clauses(trigger: Trigger | None) -> list[dict[str, float]]:
    """Return ``trigger`` as clauses, any of which is enough; an empty list for None. Raises ValueError for another form."""
    items = trigger if isinstance(trigger, list) else [] if trigger is None else [trigger]
    clauses = [item.items() if isinstance(item, Mapping) else [item] for item in items]
    if not all(clauses):
        raise ValueError("a trigger must name fraction, tokens or messages, got an empty dict")
    return [dict(_validate(pair, "trigger") for pair in clause) for clause in clauses]


def _validate(size: object, name: str) -> ContextSize:
    if isinstance(size, tuple) and len(size) == 2:
        kind, value = size
        if kind == "fraction" and type(value) in (int, float) and 0 < value <= 1:
            return size
        if kind in ("tokens", "messages") and type(value) is int and value > 0:
            return size
    raise ValueError(f'{name} must be ("fraction", 0..1], ("tokens", int > 0) or ("messages", int > 0), got {size!r}')


def _protected(units: Sequence[Unit]) -> tuple[set[str], set[str]]:
    """Return the keys of units that never leave (question, last unit, its recalls), and of those recalled for the question."""
    last = units[-1].position if units else 0
    question = max((u.position for u in units if isinstance(u.messages[0], HumanMessage)), default=0)
    back = [u for u in units if u.read > u.position + len(u.messages)]  # recalled after it arrived
    hard = {u.key for u in units if u.position in (question, last)} | {u.key for u in back if u.read > last}
    return hard, {u.key for u in back if u.read > question}


def _profile(model: BaseChatModel) -> Mapping[str, Any]:
    if model.profile is None and isinstance(model, ChatCtxwin):
        model.open()
    return model.profile or {}


def _limit(model: BaseChatModel) -> int:
    limit = _profile(model).get("max_input_tokens")
    if not isinstance(limit, int):
        raise ValueError(
            f"a fraction needs the model's max_input_tokens, got profile {model.profile!r}; "
            'use ("tokens", n), or give the model profile={"max_input_tokens": n}'
        )
    return limit


def _record(response: ModelResponse[Any], decided: dict[str, Omitted]) -> ModelCallResult[Any]:
    return ExtendedModelResponse(response, Command(update={KEY: decided})) if decided else response


def _recall_tool() -> BaseTool:
    @tool
    def recall(number: int, runtime: ToolRuntime[Any, Any]) -> Command[Any]:
        """Shows a message again that was omitted in context, at its old place.

        Args:
            number: the number given where it was omitted; larger numbers are newer.
        """
        present = {unit.key: unit for unit in units_of(runtime.state["messages"], {})}
        decisions: dict[str, Omitted] = {k: e for k, e in (runtime.state.get(KEY) or {}).items() if k in present}
        omitted = {entry["number"]: key for key, entry in decisions.items() if entry["out"]}
        back: dict[str, Omitted] = {}
        text = f"number must be one that is omitted ({spans(list(omitted)) or 'none is'}), got {number}"
        if number in omitted:
            text = f"Message {number} is shown again, at its place."
            back[omitted[number]] = Omitted(number=number, out=False, by=[*present][-1])
        answer = ToolMessage(text, tool_call_id=runtime.tool_call_id or "", status="success" if back else "error")
        return Command(update={KEY: back, "messages": [answer]})

    return recall


def blocks(message: BaseMessage) -> list[Any]:
    """Return a message's content as a list."""
    return [message.content] if isinstance(message.content, str) else list(message.content)


def is_media(block: Any) -> bool:
    """Return True if a content block is a picture or a video."""
    return isinstance(block, dict) and block.get("type") in ("image", "image_url", "video", "video_url")


def units_of(messages: Sequence[AnyMessage], history: Mapping[str, Omitted]) -> list[Unit]:
    """Group ``messages`` into units; ``history`` holds the decisions by key. Recalls by messages since removed do not count."""
    groups: list[list[AnyMessage]] = []
    for message in messages:
        if isinstance(message, ToolMessage) and groups and isinstance(groups[-1][0], AIMessage):
            groups[-1].append(message)
        else:
            groups.append([message])
    out: list[Unit] = []
    same, at = Counter[str](), 0
    for group in groups:
        same[name := group[0].id or message_key(group[0])] += 1
        key = name if same[name] == 1 else f"{name}#{same[name]}"
        at += len(group)
        out.append(Unit(key, tuple(group), at - len(group), at))
    # Positions change where messages are removed: a recall was when the unit that asked for it arrived.
    arrived = {unit.key: unit.read for unit in out}
    reads = {k: arrived.get(e["by"], 0) if "by" in e else e.get("read", 0) for k, e in history.items()}
    return [replace(u, read=reads[u.key]) if u.read < reads.get(u.key, 0) <= at + 1 else u for u in out]


def render(
    units: Sequence[Unit], out: Container[str], numbers: Mapping[str, int] | None, *, media_only: bool
) -> list[AnyMessage]:
    """Return the messages as the model sees them.

    Args:
        out: keys of the evicted units.
        numbers: numbers of those units, which placeholders name for recalls; None for no placeholders.
        media_only: only the pictures and videos of a unit are evicted, and its text stays.
    """
    view: list[AnyMessage] = []
    run: list[int] = []
    for unit in units:
        if unit.key not in out:
            view += _placeholder(run)
            run = []
            view += unit.messages
        elif media_only:
            note = "" if numbers is None else f"(Omitted in context. recall({numbers[unit.key]}) shows it again.)"
            view += [_without_media(m, note) for m in unit.messages]
        elif numbers is not None:
            run.append(numbers[unit.key])
    return view + _placeholder(run)


def spans(numbers: Sequence[int]) -> str:
    """Return ``1-3, 7`` for 1, 2, 3 and 7."""
    steps = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in steps]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _placeholder(run: Sequence[int]) -> list[AnyMessage]:
    """Return one line for all messages evicted between two others, so that the prompt stays bounded."""
    return [HumanMessage(f"(Omitted in context: {spans(run)}. recall(number) shows one again.)")] if run else []


def _without_media(message: AnyMessage, note: str) -> AnyMessage:
    if not any(map(is_media, blocks(message))):
        return message
    placeholder: list[Any] = [{"type": "text", "text": note}] if note else []
    content = [part for block in blocks(message) for part in (placeholder if is_media(block) else [block])]
    return message.model_copy(update={"content": content or note})
