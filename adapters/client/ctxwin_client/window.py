"""`RemoteWindow`: the methods of `ctxwin.Window`, executed by a server."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, cast

from openai import APIError, AsyncOpenAI, OpenAI

from ctxwin.chunk import Chunk
from ctxwin.errors import EngineFailed, ReadOnlyWindow
from ctxwin.fidelity import Fidelity
from ctxwin.validation import as_list
from ctxwin.window import serialization
from ctxwin.window.answer import Answer, Disposability, Plan, PlanEntry
from ctxwin.window.ask import AskOptions
from ctxwin.window.idle import PrefillCounts
from ctxwin.window.maintenance import Maintenance
from ctxwin.window.reader import MovedNames
from ctxwin.window.state import State, read_state
from ctxwin.window.stream import AsyncTextStream
from ctxwin.window.window import Window
from ctxwin_client import transport
from ctxwin_client.errors import UnknownUpload, UnknownWindow
from ctxwin_client.library import RemoteLibrary

P = ParamSpec("P")
T = TypeVar("T")


def _forward(method: Callable[Concatenate[Any, P], T], result: str = "") -> Callable[Concatenate[Any, P], T]:
    """Return ``method`` of a window or its maintenance as one request; ``result`` names its value in the response."""
    parameters = inspect.signature(method)

    @wraps(method)
    def call(self: RemoteWindow | RemoteMaintenance, /, *args: P.args, **options: P.kwargs) -> T:
        bound = parameters.bind(self, *args, **options)
        bound.apply_defaults()
        body = {"id" if n == "placement" else n: value for n, value in [*bound.arguments.items()][1:]}
        response = (self.window if isinstance(self, RemoteMaintenance) else self)._post(method.__name__, **body)
        return cast("T", response[result] if result else None)

    return call


@dataclass(frozen=True)
class RemoteMaintenance:
    """`ctxwin.Window.maintenance` of a window on a server. Everything in it is one request."""

    window: RemoteWindow

    check = _forward(Maintenance.check)
    touch = _forward(Maintenance.touch)
    prefill = _forward(Maintenance.prefill, "computed")
    plan_orbit = _forward(Maintenance.plan_orbit, "plan")
    prepare_orbit = _forward(Maintenance.prepare_orbit, "placements")
    refresh = _forward(Maintenance.refresh, "refreshed")
    compress = _forward(Maintenance.compress, "freed_bytes")
    merge = _forward(Maintenance.merge, "slots")
    forget_beyond = _forward(Maintenance.forget_beyond)

    def dependents(self, placement: str) -> tuple[str, ...]:
        """Return the placements whose KV has absorbed ``placement``."""
        return tuple(p.id for p in self.window.snapshot().placed if p.kv and placement in p.kv.antecedents)

    def apply_pending(self) -> tuple[str, ...]:
        """Apply the edits that wait for a break of the prefix now; return the ids of their chunks."""
        return tuple(self.window._post("apply_pending")["placements"])

    @property
    def prefill_counts(self) -> PrefillCounts | None:
        """Totals of the work ahead of the window's asks; None without ``prefill="idle"``. Cost: a request."""
        counts = self.window._post("prefill_counts")["prefill_counts"]
        return counts and PrefillCounts(**counts)


def _summary(name: str, read: Callable[[Any], T]) -> T:
    """Return a property that is read from the window's summary. Cost: a request."""
    return cast("T", property(lambda window: read(window._get("summary")[name])))


class RemoteWindow(MovedNames):
    """A window on a server started with ``ctxwin serve``; see `ctxwin.Window` for the meaning of the methods.

    Args:
        client: an official client, e.g. ``openai.OpenAI(base_url="http://localhost:8000/v1", api_key=KEY)``.
        system_prompt, budget, fidelity, budget_bytes, low_water, prefill: as for `ctxwin.Window`; the server's fidelity.
        async_client: client of `aask` and `astream`; default: a new one for each call, with the settings of ``client``.

    Attributes:
        id: the server's id of this window; edits and restarts of the server do not change it.
        system_prompt, budget, low_water, fidelity, tokens, bytes, version, ids, evicted: a window's; the last five are requests.

    Raises:
        BudgetExceeded: the system prompt alone does not fit. openai.APIError: no such server, or a key that it does not accept.

    Every method is one request (`append` of a new chunk two or three) and raises the errors of `ctxwin.Window`. The window
    stays on the server until `close`; idle for its ``--window-ttl`` it is suspended until the next call. `attach` opens it by id.
    """

    id: str
    system_prompt: str
    budget: int
    low_water: int | None
    fidelity: Fidelity

    def __init__(
        self,
        client: OpenAI,
        system_prompt: str = "",
        budget: int | None = None,
        fidelity: Fidelity | None = None,
        *,
        budget_bytes: int | str | None = None,
        low_water: float | Literal["auto"] | None = None,
        prefill: Literal["idle"] | None = None,
        async_client: AsyncOpenAI | None = None,
    ) -> None:
        if not isinstance(fidelity, Fidelity | None):
            raise TypeError(f"fidelity must be a Fidelity, such as Fidelity('exact'), got {fidelity!r}"[:200])
        body: dict[str, Any] = {"system_prompt": system_prompt, "budget": budget, "budget_bytes": budget_bytes}
        body |= {"prefill": prefill, "low_water": low_water, "fidelity": fidelity and fidelity.model_dump(mode="json")}
        self._open(client, async_client, "/windows", body)

    def _open(self, client: OpenAI, async_client: AsyncOpenAI | None, path: str, body: Any = None) -> Self:
        if not isinstance(client, OpenAI):
            raise TypeError(f"client must be an openai.OpenAI, got {type(client).__name__}; make one with base_url=")
        window = transport.get(client, path) if body is None else transport.post(client, path, body)
        return self._set_up(client, async_client, window)

    def _set_up(self, client: OpenAI, async_client: AsyncOpenAI | None, window: dict[str, Any]) -> Self:
        self._client, self._async_client, self._closed = client, async_client, False
        self.id, self.system_prompt, self.budget = window["id"], window["system_prompt"], window["budget"]
        self.low_water, self.fidelity = window["low_water"], Fidelity.model_validate(window["fidelity"])
        return self

    @classmethod
    def attach(cls, client: OpenAI, window_id: str, *, async_client: AsyncOpenAI | None = None) -> Self:
        """Open a window that is already on the server, by its id; raises UnknownWindow."""
        return cls.__new__(cls)._open(client, async_client, f"/windows/{window_id}")

    @classmethod
    def restore(
        cls, client: OpenAI, state: State | dict[str, Any] | str, *, async_client: AsyncOpenAI | None = None
    ) -> Self:
        """Create a window from a snapshot, on any server. The server reads no paths in it; see `Window.restore`."""
        state = read_state(state) if isinstance(state, str) else state
        data = state.model_dump(mode="json") if isinstance(state, State) else state
        return cls.__new__(cls)._open(client, async_client, "/windows", {"snapshot": data})

    tokens, bytes, version = (_summary(name, int) for name in ("tokens", "bytes", "version"))
    ids: tuple[str, ...] = _summary("ids", tuple)
    evicted: tuple[str, ...] = _summary("evicted", tuple)

    @property
    def pending(self) -> tuple[str, ...]:
        """Placement ids with lazy edits that wait for a break of the prefix, in order. Cost: a request."""
        return tuple(p.id for p in self.snapshot().placed if p.pending)

    @property
    def chunks(self) -> tuple[PlanEntry, ...]:
        """Placed chunks, each with how the next ask would serve it. Cost: as `plan`."""
        return self.plan().entries

    @property
    def maintenance(self) -> RemoteMaintenance:
        """`ctxwin.Window.maintenance` on the server."""
        return RemoteMaintenance(self)

    def chunk(self, placement: str) -> Chunk:
        """Return the chunk of a placed or evicted id, without its pixels; raises UnknownChunk."""
        return self.snapshot().find(placement).chunk

    def plan(self) -> Plan:
        """Return the actions and costs of the next ask, as `ctxwin.Window.plan`. Cost: a request; no forward."""
        return serialization.plan_from(self._get("plan"))

    def snapshot(self) -> State:
        """Return the window as data, as `ctxwin.Window.snapshot`; `restore` takes it on any server of the same model."""
        return State.model_validate(self._get("snapshot"))

    def append(self, chunk: Chunk) -> str:
        """Place a chunk after all others; upload it if the server does not have it. Returns the placement id."""
        return str(self._place("append", "chunk", chunk)["placement"])

    def extend(self, chunks: Sequence[Chunk]) -> list[str]:
        """Place chunks in order, in one request. Returns their placement ids."""
        return list(self._place("extend", "chunks", as_list("chunks", chunks, "a Chunk"))["placements"])

    def insert(self, index: int, chunk: Chunk, *, lazy: bool = False) -> str:
        """Place a chunk at ``index``, ``lazy`` once the prefix breaks. Returns the placement id."""
        return str(self._place("insert", "chunk", chunk, index=index, lazy=lazy)["placement"])

    def look_back(self, query: str | Chunk, *, reserve_tokens: int = 0) -> list[str]:
        """Recall the chunks that match ``query`` (an id, words or a picture), evicting others if needed. Returns the ids."""
        return list(self._place("look_back", "query", query, reserve_tokens=reserve_tokens)["recalled"])

    def retrieve(
        self, query: str | Chunk, library: RemoteLibrary | str, k: int = 4, *, reserve_tokens: int = 0
    ) -> list[str]:
        """Place the ``k`` passages that a library of the server finds for ``query``, best first. Returns the ids."""
        options = {"library": getattr(library, "name", library), "k": k, "reserve_tokens": reserve_tokens}
        return list(self._place("retrieve", "query", query, **options)["placements"])

    evict = _forward(Window.evict)
    slide = _forward(Window.slide, "evicted")
    recall = _forward(Window.recall, "index")
    reorder = _forward(Window.reorder)
    toggle = _forward(Window.toggle)
    pin = _forward(Window.pin)
    undo = _forward(Window.undo)
    remember = _forward(Window.remember, "placement")
    check = _forward(Window.check)

    def fork(self, system_prompt: str | None = None) -> Self:
        """Return a branch on the server that shares every chunk, optionally after another ``system_prompt``."""
        branch = self._post("fork", system_prompt=system_prompt)["branch"]
        return copy.copy(self)._set_up(self._client, self._async_client, branch)

    def adopt(self, branch: RemoteWindow, *, force: bool = False) -> None:
        """Take over a branch's state; raises a conflict if this window has changed since the fork, unless ``force``."""
        if not isinstance(branch, RemoteWindow):
            raise TypeError(f"branch must be a RemoteWindow that fork() returned, got {type(branch).__name__}")
        self._post("adopt", id=branch.id, force=force)
        self.fidelity = Fidelity.model_validate(self._get("summary")["fidelity"])

    def ask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """Answer ``query`` over the placed chunks; takes the options of `ctxwin.Window.ask`. Cost: as given by `plan`."""
        return serialization.answer_from(self._post("ask", **transport.question(query, max_tokens, options)))

    def stream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> RemoteStream:
        """`ask`, yielding text as it is generated; ``answer`` is there at the end. Closing it early changes nothing."""
        body = transport.question(query, max_tokens, options, stream=True)
        return RemoteStream(transport.stream(self._client, self._path("ask"), body))

    async def aask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """`ask` without blocking the event loop; cancelling it leaves the window unchanged."""
        return await transport.answer_of(self.astream(query, max_tokens, **options))

    def astream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> AsyncTextStream:
        """`stream` for async code."""
        body = transport.question(query, max_tokens, options, stream=True)
        return transport.stream_of(transport.events(self._client, self._async_client, self._path("ask"), body))

    def disposable(self, placement: str, query: str, max_tokens: int = 32, *, clean: bool = False) -> Disposability:
        """Compare the answers to ``query`` with and without a chunk. Cost: two asks."""
        response = self._post("disposable", id=placement, query=query, max_tokens=max_tokens, clean=clean)
        return serialization.disposability_from(response["disposability"])

    def close(self) -> None:
        """Close the window on the server permanently. Idempotent; a window that no longer exists counts as closed."""
        if not self._closed:
            with contextlib.suppress(UnknownWindow):
                transport.delete(self._client, f"/windows/{self.id}")
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteWindow {self.id} at {self._client.base_url}>"

    def _path(self, route: str) -> str:
        if self._closed:
            raise ReadOnlyWindow("this window is closed; restore its snapshot to continue")
        return f"/windows/{self.id}/{route}"

    def _get(self, route: str) -> dict[str, Any]:
        return dict(transport.get(self._client, self._path(route)))

    def _post(self, operation: str, **body: Any) -> dict[str, Any]:
        return dict(transport.post(self._client, self._path(operation), body))

    def _place(self, operation: str, name: str, content: Chunk | list[Chunk] | str, **body: Any) -> dict[str, Any]:
        """Post with ``content`` as ``name``; upload chunks that the server lacks or has dropped."""
        if isinstance(content, str) and name == "query":
            return self._post(operation, query=content, **body)
        path, chunks = self._path(operation), cast("list[Chunk]", content if isinstance(content, list) else [content])
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise TypeError(f"chunk must be a ctxwin.Chunk, got {type(chunk).__name__}; create one with Chunk.text")
            if chunk.id not in transport.uploaded_by(self._client):
                transport.upload(self._client, chunk)
        references = [transport.reference(chunk) for chunk in chunks]
        body[name] = references if isinstance(content, list) else references[0]
        with contextlib.suppress(UnknownUpload):
            return dict(transport.post(self._client, path, body))
        for chunk in chunks:
            transport.upload(self._client, chunk)
        return dict(transport.post(self._client, path, body))


class RemoteStream(Iterator[str]):
    """Text of an answer as it is generated. ``answer`` is None until the stream is exhausted."""

    def __init__(self, events: Any) -> None:
        self.answer: Answer | None = None
        self._events, self._closed = events, False

    def __next__(self) -> str:
        try:
            with transport.our_errors():
                for event in () if self._closed else self._events:
                    if "answer" in event:
                        self.answer = serialization.answer_from(event["answer"])
                    elif event.get("text"):
                        return str(event["text"])
        except APIError:
            if not self._closed:  # else another thread has closed it
                raise
        raise StopIteration if self.answer or self._closed else EngineFailed(transport.ENDED_EARLY)

    def close(self) -> None:
        """Stop the server if it is still answering; the window is then unchanged."""
        self._closed = True
        self._events.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
