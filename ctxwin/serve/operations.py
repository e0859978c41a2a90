"""What can be done to a window by id: one function an operation, whose parameters are the fields of its body."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, create_model

from ctxwin.chunk import Chunk
from ctxwin.fidelity import Fidelity
from ctxwin.serve import wire
from ctxwin.serve.completions import schema_text
from ctxwin.serve.limits import Allowance
from ctxwin.serve.specs import COUNT, SEED, TOKEN, Body, checked
from ctxwin.serve.uploads import Uploads
from ctxwin.serve.windows import WindowRegistry
from ctxwin.window.ask import Question
from ctxwin.window.window import Window

ChunkData = str | dict[str, Any]
"""The id of an uploaded chunk, or a chunk as `ctxwin.serve.specs` takes it."""
Bytes = Annotated[int, Field(ge=0, lt=2**63)] | Annotated[str, Field(max_length=40)]
Stop = TOKEN | Annotated[str, Field(max_length=1000)]
Orders = Annotated[int, Field(ge=1, le=64)]
Result = dict[str, Any]


@dataclass(frozen=True)
class OperationContext:
    """What one call of an operation has beside its window."""

    windows: WindowRegistry
    uploads: Uploads
    allowance: Allowance

    def chunk(self, data: ChunkData) -> Chunk:
        """The chunk that ``data`` is, charged to the request."""
        return self.uploads.build(data, allowance=self.allowance)

    def check_room(self, window: Window, more: int) -> None:
        """Raises BudgetExceeded where ``window`` may not have ``more`` chunks."""
        self.allowance.check_chunks(len(window.ids) + len(window.evicted) + more)


class OpenWindow(Body):
    """``POST /v1/windows``: a new window, or one from a snapshot."""

    system_prompt: str = ""
    budget: COUNT | None = None
    budget_bytes: Bytes | None = None
    fidelity: Fidelity | None = None
    snapshot: dict[str, Any] | None = None


class Ask(Body):
    """``POST /v1/windows/{id}/ask``, which may stream. Decoding is as `Window.ask` has it."""

    query: str
    max_tokens: COUNT = 32
    remember: bool = False
    logprobs: COUNT | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: COUNT | None = None
    seed: SEED | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=1024)] | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool = False

    def question(self) -> Question:
        """Raises ValueError for values out of range."""
        schema = None if self.json_schema is None else schema_text(self.json_schema)
        return Question.of(**{**self.model_dump(exclude={"stream"}), "json_schema": schema})


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        run: blocks; what it returns stands beside the window in the answer.
        body: what a request must hold.
        edits: whether the window's new state is part of the answer.
    """

    run: Callable[..., Result]
    body: type[Body]
    edits: bool

    def __call__(self, context: OperationContext, window: Window, data: Any) -> Result:
        body = checked(self.body.model_validate, data)
        made = self.run(context, window, **{name: getattr(body, name) for name in self.body.model_fields})
        return {**made, "window": wire.window_to(window)} if self.edits else made


OPERATIONS: dict[str, Operation] = {}
"""By name. Beside these there is ``ask``, which may stream."""


def _operation(*, edits: bool = True) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    def add(run: Callable[..., Result]) -> Callable[..., Result]:
        _, _, *parameters = inspect.signature(run, eval_str=True).parameters.values()
        fields: Any = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
        body = create_model(f"{run.__name__.title().replace('_', '')}Body", __base__=Body, **fields)
        OPERATIONS[run.__name__] = Operation(run, body, edits)
        return run

    return add


@_operation()
def append(context: OperationContext, window: Window, chunk: ChunkData) -> Result:
    context.check_room(window, 1)
    return {"placement": window.append(context.chunk(chunk))}


@_operation()
def extend(context: OperationContext, window: Window, chunks: list[ChunkData]) -> Result:
    context.check_room(window, len(chunks))
    return {"placements": window.extend([context.chunk(chunk) for chunk in chunks])}


@_operation()
def insert(context: OperationContext, window: Window, index: COUNT, chunk: ChunkData) -> Result:
    context.check_room(window, 1)
    return {"placement": window.insert(index, context.chunk(chunk))}


@_operation()
def evict(context: OperationContext, window: Window, id: str, forget: bool = False) -> Result:
    window.evict(id, forget=forget)
    return {}


@_operation()
def slide(context: OperationContext, window: Window, count: COUNT | None = None, reserve_tokens: COUNT = 0) -> Result:
    return {"evicted": window.slide(count, reserve_tokens=reserve_tokens)}


@_operation()
def recall(context: OperationContext, window: Window, id: str, at: COUNT | None = None, repair: bool = False) -> Result:
    return {"index": window.recall(id, at, repair=repair)}


@_operation()
def look_back(context: OperationContext, window: Window, query: ChunkData, reserve_tokens: COUNT = 0) -> Result:
    asked = query if isinstance(query, str) else context.chunk(query)
    return {"recalled": window.look_back(asked, reserve_tokens=reserve_tokens)}


@_operation()
def reorder(context: OperationContext, window: Window, ids: list[str]) -> Result:
    window.reorder(ids)
    return {}


@_operation()
def toggle(context: OperationContext, window: Window, id: str, conditioned: bool) -> Result:
    window.toggle(id, conditioned=conditioned)
    return {}


@_operation()
def pin(context: OperationContext, window: Window, id: str, pinned: bool = True) -> Result:
    window.pin(id, pinned=pinned)
    return {}


@_operation()
def touch(context: OperationContext, window: Window, id: str) -> Result:
    window.touch(id)
    return {}


@_operation()
def fork(context: OperationContext, window: Window, system_prompt: str | None = None) -> Result:
    return {"branch": wire.window_to(context.windows.add(window.fork(system_prompt), watched=True))}


@_operation()
def adopt(context: OperationContext, window: Window, id: str, force: bool = False) -> Result:
    with context.windows.using(id) as branch:
        window.adopt(branch, force=force)
    return {}


@_operation(edits=False)
def disposable(
    context: OperationContext, window: Window, id: str, query: str, max_tokens: COUNT = 32, clean: bool = False
) -> Result:
    return {"disposability": wire.disposability_to(window.disposable(id, query, max_tokens, clean=clean))}


@_operation()
def remember(context: OperationContext, window: Window, query: str, answer: str | list[TOKEN]) -> Result:
    context.check_room(window, 1)
    return {"placement": window.remember(query, answer)}


@_operation()
def prepare_orbit(
    context: OperationContext, window: Window, ids: list[str], orders: Orders = 6, seed: SEED = 0
) -> Result:
    return {"placements": window.prepare_orbit(ids, orders, seed)}


@_operation()
def refresh(context: OperationContext, window: Window, count: COUNT | None = None) -> Result:
    return {"refreshed": window.refresh(count)}


@_operation()
def compress(context: OperationContext, window: Window) -> Result:
    return {"freed_bytes": window.compress()}


@_operation(edits=False)
def plan(context: OperationContext, window: Window) -> Result:
    return {"plan": wire.plan_to(window.plan())}


@_operation(edits=False)
def snapshot(context: OperationContext, window: Window) -> Result:
    return {"snapshot": window.snapshot().model_dump(mode="json")}


@_operation(edits=False)
def check(context: OperationContext, window: Window) -> Result:
    window.check()
    return {}


@_operation(edits=False)
def summary(context: OperationContext, window: Window) -> Result:
    return {"summary": wire.window_to(window)}
