"""What can be done to a window by id: one body and one function an operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from ctxwin.chunk import Chunk
from ctxwin.fidelity import Fidelity
from ctxwin.serve import wire
from ctxwin.serve.specs import SEED, Body, checked
from ctxwin.serve.uploads import Uploads
from ctxwin.serve.windows import Registry
from ctxwin.window.window import Window

ChunkData = str | dict[str, Any]
"""The id of an uploaded chunk, or a chunk as `ctxwin.serve.specs` takes it."""


@dataclass(frozen=True)
class Around:
    """What an operation may need beside its window."""

    registry: Registry
    uploads: Uploads


class Open(Body):
    """``POST /v1/windows``: a new window, or one from a snapshot."""

    system_prompt: str = ""
    budget: int | None = None
    budget_bytes: int | str | None = None
    fidelity: Fidelity | None = None
    snapshot: dict[str, Any] | None = None


class Nothing(Body):
    pass


class Append(Body):
    chunk: ChunkData


class Extend(Body):
    chunks: list[ChunkData]


class Insert(Body):
    index: int
    chunk: ChunkData


class Evict(Body):
    id: str
    forget: bool = False


class Slide(Body):
    count: int | None = None
    reserve_tokens: int = 0


class Recall(Body):
    id: str
    at: int | None = None
    repair: bool = False


class LookBack(Body):
    query: ChunkData
    reserve_tokens: int = 0


class Reorder(Body):
    ids: list[str]


class Toggle(Body):
    id: str
    conditioned: bool


class Pin(Body):
    id: str
    pinned: bool = True


class One(Body):
    id: str


class Fork(Body):
    system_prompt: str | None = None


class Adopt(Body):
    id: str
    force: bool = False


class Disposable(Body):
    id: str
    query: str
    max_tokens: int = 32
    clean: bool = False


class Remember(Body):
    query: str
    answer: str | list[int]


class PrepareOrbit(Body):
    ids: list[str]
    orders: int = 6
    seed: int = 0


class Refresh(Body):
    count: int | None = None


class Ask(Body):
    query: str
    max_tokens: int = 32
    remember: bool = False
    logprobs: int = 0
    temperature: float = 0.0
    seed: SEED | None = None
    stop_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=list, max_length=1024)
    stream: bool = False

    def options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"query", "max_tokens", "stream"})


def _append(around: Around, window: Window, body: Append) -> dict[str, Any]:
    return {"placement": window.append(around.uploads.build(body.chunk))}


def _extend(around: Around, window: Window, body: Extend) -> dict[str, Any]:
    pixels = around.uploads.pixels()
    return {"placements": window.extend([around.uploads.build(chunk, pixels=pixels) for chunk in body.chunks])}


def _insert(around: Around, window: Window, body: Insert) -> dict[str, Any]:
    return {"placement": window.insert(body.index, around.uploads.build(body.chunk))}


def _evict(around: Around, window: Window, body: Evict) -> dict[str, Any]:
    window.evict(body.id, forget=body.forget)
    return {}


def _look_back(around: Around, window: Window, body: LookBack) -> dict[str, Any]:
    query: str | Chunk = body.query if isinstance(body.query, str) else around.uploads.build(body.query)
    return {"recalled": window.look_back(query, reserve_tokens=body.reserve_tokens)}


def _reorder(around: Around, window: Window, body: Reorder) -> dict[str, Any]:
    window.reorder(body.ids)
    return {}


def _toggle(around: Around, window: Window, body: Toggle) -> dict[str, Any]:
    window.toggle(body.id, conditioned=body.conditioned)
    return {}


def _pin(around: Around, window: Window, body: Pin) -> dict[str, Any]:
    window.pin(body.id, pinned=body.pinned)
    return {}


def _touch(around: Around, window: Window, body: One) -> dict[str, Any]:
    window.touch(body.id)
    return {}


def _fork(around: Around, window: Window, body: Fork) -> dict[str, Any]:
    branch = around.registry.add(window.fork(body.system_prompt), watched=True)
    return {"branch": wire.window_to(branch)}


def _adopt(around: Around, window: Window, body: Adopt) -> dict[str, Any]:
    with around.registry.using(body.id) as branch:
        window.adopt(branch, force=body.force)
    return {}


def _disposable(around: Around, window: Window, body: Disposable) -> dict[str, Any]:
    found = window.disposable(body.id, body.query, body.max_tokens, clean=body.clean)
    return {"disposability": wire.disposability_to(found)}


def _remember(around: Around, window: Window, body: Remember) -> dict[str, Any]:
    return {"placement": window.remember(body.query, body.answer)}


def _prepare_orbit(around: Around, window: Window, body: PrepareOrbit) -> dict[str, Any]:
    return {"placements": window.prepare_orbit(body.ids, body.orders, body.seed)}


def _check(around: Around, window: Window, body: Nothing) -> dict[str, Any]:
    window.check()
    return {}


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        run: blocks; what it returns stands beside the window in the answer.
        edits: whether the window's new state is part of the answer.
    """

    body: type[Body]
    run: Callable[[Around, Window, Any], dict[str, Any]]
    edits: bool = field(default=True)

    def __call__(self, around: Around, window: Window, data: Any) -> dict[str, Any]:
        made = self.run(around, window, self.parse(data))
        return {**made, "window": wire.window_to(window)} if self.edits else made

    def parse(self, data: Any) -> Any:
        return checked(self.body.model_validate, data)


OPERATIONS: dict[str, Operation] = {
    "append": Operation(Append, _append),
    "extend": Operation(Extend, _extend),
    "insert": Operation(Insert, _insert),
    "evict": Operation(Evict, _evict),
    "slide": Operation(Slide, lambda around, w, b: {"evicted": w.slide(b.count, reserve_tokens=b.reserve_tokens)}),
    "recall": Operation(Recall, lambda around, w, b: {"index": w.recall(b.id, b.at, repair=b.repair)}),
    "look_back": Operation(LookBack, _look_back),
    "reorder": Operation(Reorder, _reorder),
    "toggle": Operation(Toggle, _toggle),
    "pin": Operation(Pin, _pin),
    "touch": Operation(One, _touch),
    "fork": Operation(Fork, _fork),
    "adopt": Operation(Adopt, _adopt),
    "disposable": Operation(Disposable, _disposable, edits=False),
    "remember": Operation(Remember, _remember),
    "prepare_orbit": Operation(PrepareOrbit, _prepare_orbit),
    "refresh": Operation(Refresh, lambda around, w, b: {"refreshed": w.refresh(b.count)}),
    "compress": Operation(Nothing, lambda around, w, b: {"freed_bytes": w.compress()}),
    "plan": Operation(Nothing, lambda around, w, b: {"plan": wire.plan_to(w.plan())}, edits=False),
    "snapshot": Operation(
        Nothing, lambda around, w, b: {"snapshot": w.snapshot().model_dump(mode="json")}, edits=False
    ),
    "check": Operation(Nothing, _check, edits=False),
    "summary": Operation(Nothing, lambda around, w, b: {"summary": wire.window_to(w)}, edits=False),
}
"""Beside these there is ``ask``, which may stream."""
