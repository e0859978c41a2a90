"""Operations on a window by id: one function each, whose parameters are the fields of its body."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from ctxwin.chunk import Chunk
from ctxwin.engines.outputs import OutputReferences
from ctxwin.engines.sampling import SEED, options_model, schema_text
from ctxwin.fidelity import Fidelity
from ctxwin.library import Library
from ctxwin.validation import validate
from ctxwin.window import serialization
from ctxwin.window.ask import AskOptions, Question
from ctxwin.window.lookups import HITS, MOST
from ctxwin.window.maintenance import Maintenance
from ctxwin.window.window import Window
from ctxwin_chats.bodies import Body
from ctxwin_server.protocol.limits import Allowance
from ctxwin_server.protocol.schemas import COUNT, TOKEN
from ctxwin_server.registry.libraries import Libraries
from ctxwin_server.registry.uploads import Uploads
from ctxwin_server.registry.windows import WindowRegistry

ChunkData = str | dict[str, Any]
"""The id of an uploaded chunk, or a chunk as `ctxwin_server.protocol.schemas` defines it."""
Bytes = Annotated[int, Field(ge=0, lt=2**63)] | Annotated[str, Field(max_length=40)]
Stop = TOKEN | Annotated[str, Field(max_length=1000)]
Orders = Annotated[int, Field(ge=1, le=64)]
Hits = Annotated[int, Field(ge=1, le=64)]
Result = dict[str, Any]


@dataclass(frozen=True)
class OperationContext:
    """Context of one call of an operation, besides its window."""

    windows: WindowRegistry
    uploads: Uploads
    libraries: Libraries
    outputs: OutputReferences
    allowance: Allowance

    def chunk(self, data: ChunkData) -> Chunk:
        """Build the chunk that ``data`` describes, charged to the request."""
        return self.uploads.build(data, allowance=self.allowance)

    def check_room(self, window: Window, more: int) -> None:
        """Raise BudgetExceeded if ``window`` may not have ``more`` chunks."""
        self.allowance.check_chunks(len(window.ids) + len(window.evicted) + more)


Mark = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | Annotated[int, Field(gt=0, le=2**31)]
"""A share of a window's budget, or tokens."""


class OpenWindow(Body):
    """``POST /v1/windows``: a new window, or one from a snapshot."""

    system_prompt: str = ""
    budget: COUNT | None = None
    budget_bytes: Bytes | None = None
    low_water: Mark | Literal["auto"] | None = None
    prefill: Literal["idle"] | None = None
    fidelity: Fidelity | None = None
    snapshot: dict[str, Any] | None = None


class Ask(options_model(AskOptions), Body):  # type: ignore[misc]  # its fields are the options
    """A question to a window, with the options of `Window.ask`: those below are bounded, or differ, on the wire."""

    query: str
    max_tokens: COUNT = 32
    remember: bool = False
    logprobs: COUNT | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=1024)] | None = None
    json_schema: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=128)
    libraries: list[str] | None = Field(default=None, max_length=16)
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    outputs: list[str] = Field(default=[], max_length=16)
    stream: bool = False

    def question(self, find: Callable[[str], Library]) -> Question:
        """Return the question; raise ValueError for values out of range, UnknownLibrary for unknown libraries."""
        schema = None if self.json_schema is None else schema_text(self.json_schema)
        arguments = self.model_dump(include=Ask.model_fields.keys() - {"stream"})
        libraries = [find(name) for name in self.libraries or ()]
        return Question.of(**{**arguments, "json_schema": schema, "libraries": libraries})

    @property
    def most_placed(self) -> int:
        """Most chunks that its exchange may become."""
        return (1 + MOST * (HITS + 2) * bool(self.libraries)) * bool(self.remember)


class AuditedAsk(Ask):
    """``POST /v1/windows/{id}/ask``, which may stream.

    An answer that is due to be audited waits up to ``audit_within`` seconds for the result; otherwise its ``audit`` is null.
    """

    audit_within: float = Field(default=0, ge=0, le=30)


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        run: blocks; the answer holds its result beside the window.
        body: schema of a request.
        edits: whether the window's new state is part of the answer.
        text: what it does, for the reference.
    """

    run: Callable[..., Result]
    body: type[Body]
    edits: bool
    text: str

    def __call__(self, context: OperationContext, window: Window, data: Any) -> Result:
        body = validate(self.body.model_validate, data)
        result = self.run(context, window, **{name: getattr(body, name) for name in self.body.model_fields})
        return {**result, "window": serialization.window_to(window)} if self.edits else result


OPERATIONS: dict[str, Operation] = {}
"""By name. ``ask``, which may stream, is separate."""


def _add(name: str, run: Callable[..., Result], fields: Mapping[str, Any], *, edits: bool) -> None:
    text = inspect.getdoc(getattr(Window, name, getattr(Maintenance, name, run))) or ""
    definitions: Any = {n: field if isinstance(field, tuple) else (field, ...) for n, field in fields.items()}
    OPERATIONS[name] = Operation(run, create_model(name, __base__=Body, **definitions), edits, text.split("\n\n")[0])


def _operation(*, edits: bool = True) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    def add(run: Callable[..., Result]) -> Callable[..., Result]:
        _, _, *parameters = inspect.signature(run, eval_str=True).parameters.values()
        fields = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
        _add(run.__name__.removeprefix("_"), run, fields, edits=edits)
        return run

    return add


def _forward(name: str, result: str = "", *, edits: bool = True, **fields: Any) -> None:
    """Add an operation that is a method of the window or its maintenance; ``result`` names its value in the answer."""

    def run(_: OperationContext, window: Window, **arguments: Any) -> Result:
        target = window.maintenance if hasattr(Maintenance, name) else window
        outcome = getattr(target, name)(**{"placement" if n == "id" else n: value for n, value in arguments.items()})
        return {result: outcome} if result else {}

    _add(name, run, fields, edits=edits)


@_operation()
def _append(context: OperationContext, window: Window, chunk: ChunkData) -> Result:
    context.check_room(window, 1)
    return {"placement": window.append(context.chunk(chunk))}


@_operation()
def _extend(context: OperationContext, window: Window, chunks: list[ChunkData]) -> Result:
    context.check_room(window, len(chunks))
    return {"placements": window.extend([context.chunk(chunk) for chunk in chunks])}


@_operation()
def _insert(context: OperationContext, window: Window, index: COUNT, chunk: ChunkData, lazy: bool = False) -> Result:
    context.check_room(window, 1)
    return {"placement": window.insert(index, context.chunk(chunk), lazy=lazy)}


_forward("evict", id=str, forget=(bool, False), lazy=(bool, False))
_forward("slide", "evicted", count=(COUNT | None, None), reserve_tokens=(COUNT, 0), to=(Mark | None, None))
_At = COUNT | Literal["chronological", "cheapest"] | None
_forward("recall", "index", id=str, at=(_At, None), repair=(bool, False))


@_operation()
def _look_back(context: OperationContext, window: Window, query: ChunkData, reserve_tokens: COUNT = 0) -> Result:
    target = query if isinstance(query, str) else context.chunk(query)
    return {"recalled": window.look_back(target, reserve_tokens=reserve_tokens)}


@_operation()
def _retrieve(
    context: OperationContext, window: Window, query: ChunkData, library: str, k: Hits = 4, reserve_tokens: COUNT = 0
) -> Result:
    context.check_room(window, k)
    target, source = query if isinstance(query, str) else context.chunk(query), context.libraries.find(library)
    context.libraries.due(window.engine, source)
    return {"placements": window.retrieve(target, source, k, reserve_tokens=reserve_tokens)}


_forward("reorder", ids=list[str])
_forward("toggle", id=str, conditioned=bool, lazy=(bool, False))
_forward("pin", id=str, pinned=(bool, True))
_forward("touch", id=str)
_forward("undo")


@_operation()
def _fork(context: OperationContext, window: Window, system_prompt: str | None = None) -> Result:
    with context.windows.forking:
        return {"branch": serialization.window_to(context.windows.add(window.fork(system_prompt), watched=True))}


@_operation()
def _adopt(context: OperationContext, window: Window, id: str, force: bool = False) -> Result:
    with context.windows.using(id) as branch:
        window.adopt(branch, force=force)
    return {}


@_operation(edits=False)
def _disposable(
    _: OperationContext, window: Window, id: str, query: str, max_tokens: COUNT = 32, clean: bool = False
) -> Result:
    return {"disposability": serialization.disposability_to(window.disposable(id, query, max_tokens, clean=clean))}


@_operation()
def _remember(context: OperationContext, window: Window, query: str, answer: str | list[TOKEN]) -> Result:
    context.check_room(window, 1)
    return {"placement": window.remember(query, answer)}


_forward("apply_pending", "placements")
_forward("forget_beyond", most=COUNT)
_forward("prefill", "computed")


@_operation(edits=False)
def _prefill_counts(_: OperationContext, window: Window) -> Result:
    counts = window.maintenance.prefill_counts
    return {"prefill_counts": counts and asdict(counts)}


_ORBIT: Result = {"ids": list[str], "orders": (Orders, 6), "seed": (SEED, 0)}
_forward("plan_orbit", "plan", edits=False, **_ORBIT)
_forward("prepare_orbit", "placements", **_ORBIT, token_limit=(COUNT | None, None))
_forward("refresh", "refreshed", count=(COUNT | None, None), ids=(list[str] | None, None))
_forward("compress", "freed_bytes", if_short=(bool, False))
_forward("merge", "slots", id=str, share=(Annotated[float, Field(gt=0, le=1)] | None, None))


@_operation(edits=False)
def _plan(_: OperationContext, window: Window) -> Result:
    return {"plan": serialization.plan_to(window.plan())}


@_operation(edits=False)
def _snapshot(_: OperationContext, window: Window) -> Result:
    return {"snapshot": window.snapshot().model_dump(mode="json")}


_forward("check", edits=False)


@_operation(edits=False)
def _summary(_: OperationContext, window: Window) -> Result:
    """Return the window's description, without its plan."""
    return {"summary": serialization.window_to(window)}
