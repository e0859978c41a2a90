"""`RemoteWindow`: the methods of `ctxwin.Window`, carried out by a server."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

from openai import AsyncOpenAI, OpenAI

from ctxwin.adapters.openai import transport
from ctxwin.adapters.openai.library import RemoteLibrary
from ctxwin.chunk import Chunk
from ctxwin.errors import EngineFailed, ReadOnlyWindow
from ctxwin.fidelity import Fidelity
from ctxwin.serve import wire
from ctxwin.serve.errors import UnknownUpload, UnknownWindow
from ctxwin.window.answer import Answer, Disposability, Plan, PlanEntry
from ctxwin.window.ask import AskOptions
from ctxwin.window.state import State


class RemoteWindow:
    """A window that lives on a server started with ``ctxwin serve``; see `ctxwin.Window` for what the methods mean.

    Args:
        client: an official client, e.g. ``openai.OpenAI(base_url="http://localhost:8000/v1", api_key=KEY)``.
        system_prompt, budget, fidelity, budget_bytes: as for `ctxwin.Window`; fidelity: the server's by default.
        async_client: what `aask` and `astream` use; by default one is made for each call, set up as ``client`` is.

    Attributes:
        id: the server's name of this window; stays the same over edits and restarts of the server.
        system_prompt: fixed for the life of the window.
        budget: most tokens of system prompt, chunks, query and answer together.
        fidelity: the one in force.

    Raises:
        BudgetExceeded: the system prompt alone does not fit. openai.APIError: no such server, a key it does not know.

    Every method is one request (`append` of a new chunk two or three), and raises what `ctxwin.Window` raises. The window
    stays on the server until `close`. One that has been idle for the server's ``--window-ttl`` is put aside, and brought back
    at the next call. `attach` reaches a window by its id.
    """

    id: str
    system_prompt: str
    budget: int
    fidelity: Fidelity

    def __init__(
        self,
        client: OpenAI,
        system_prompt: str = "",
        budget: int | None = None,
        fidelity: Fidelity | None = None,
        *,
        budget_bytes: int | str | None = None,
        async_client: AsyncOpenAI | None = None,
    ) -> None:
        wanted: dict[str, Any] = {"system_prompt": system_prompt, "budget": budget, "budget_bytes": budget_bytes}
        wanted["fidelity"] = None if fidelity is None else fidelity.model_dump(mode="json")
        body = {name: value for name, value in wanted.items() if value is not None}
        self._set_up(client, async_client, transport.post(client, "/windows", body))

    def _set_up(self, client: OpenAI, async_client: AsyncOpenAI | None, window: dict[str, Any]) -> Self:
        self._client, self._async_client = client, async_client
        self.id, self.system_prompt, self.budget = window["id"], window["system_prompt"], window["budget"]
        self.fidelity = Fidelity(**window["fidelity"])
        self._closed = False
        return self

    @classmethod
    def attach(cls, client: OpenAI, window_id: str, *, async_client: AsyncOpenAI | None = None) -> Self:
        """A window that is on the server already, by its id; raises UnknownWindow."""
        return cls.__new__(cls)._set_up(client, async_client, transport.get(client, f"/windows/{window_id}"))

    @classmethod
    def restore(
        cls, client: OpenAI, state: State | dict[str, Any] | str, *, async_client: AsyncOpenAI | None = None
    ) -> Self:
        """A window from a snapshot, on any server. Paths in it are not read there; see `Window.restore`."""
        if isinstance(state, str):
            state = State.model_validate_json(state)
        data = state.model_dump(mode="json") if isinstance(state, State) else state
        made = transport.post(client, "/windows", {"snapshot": data})
        return cls.__new__(cls)._set_up(client, async_client, made)

    @property
    def tokens(self) -> int:
        """Tokens of system prompt and placed chunks, as the server has them now."""
        return int(self._get("summary")["tokens"])

    @property
    def bytes(self) -> int:
        """KV bytes of what is placed. Cost: a request."""
        return int(self._get("summary")["bytes"])

    @property
    def version(self) -> int:
        """Changes with every edit. Cost: a request."""
        return int(self._get("summary")["version"])

    @property
    def ids(self) -> tuple[str, ...]:
        """Placement ids in order. Cost: a request."""
        return tuple(self._get("summary")["ids"])

    @property
    def evicted(self) -> tuple[str, ...]:
        """Placement ids that can be recalled, the oldest first. Cost: a request."""
        return tuple(self._get("summary")["evicted"])

    @property
    def chunks(self) -> tuple[PlanEntry, ...]:
        """How each placed chunk would be served by the next ask. Cost: as `plan`."""
        return self.plan().entries

    def chunk(self, placement: str) -> Chunk:
        """The chunk behind a placed or evicted id, without its pixels; raises UnknownChunk."""
        return self.snapshot().find(placement).chunk

    def dependents(self, placement: str) -> tuple[str, ...]:
        """Placements whose KV has absorbed ``placement``. Cost: a request."""
        return tuple(p.id for p in self.snapshot().placed if p.kv and placement in p.kv.antecedents)

    def plan(self) -> Plan:
        """What the next ask would do and cost, as `ctxwin.Window.plan`. Cost: a request; no forward."""
        return wire.plan_from(self._get("plan"))

    def snapshot(self) -> State:
        """The window as data, as `ctxwin.Window.snapshot`; `restore` takes it on any server of the same model."""
        return State.model_validate(self._get("snapshot"))

    def check(self) -> None:
        """Asserts every invariant of the window on the server."""
        self._post("check")

    def append(self, chunk: Chunk) -> str:
        """Places a chunk behind all others; uploads it if the server does not have it. Returns the placement id."""
        return str(self._place("append", "chunk", chunk)["placement"])

    def extend(self, chunks: Sequence[Chunk]) -> list[str]:
        """Places chunks in order, in one request. Returns their placement ids."""
        return list(self._place("extend", "chunks", list(chunks))["placements"])

    def insert(self, index: int, chunk: Chunk) -> str:
        """Places a chunk at ``index``. Returns the placement id."""
        return str(self._place("insert", "chunk", chunk, index=index)["placement"])

    def evict(self, placement: str, *, forget: bool = False) -> None:
        """Takes a chunk out; with ``forget`` also what others absorbed from it."""
        self._post("evict", id=placement, forget=forget)

    def slide(self, count: int | None = None, *, reserve_tokens: int = 0) -> list[str]:
        """Evicts unpinned chunks, the oldest first and what was recalled last: ``count``, or until ``reserve_tokens`` are free.

        Returns their ids.
        """
        return list(self._post("slide", count=count, reserve_tokens=reserve_tokens)["evicted"])

    def recall(self, placement: str, at: int | None = None, *, repair: bool = False) -> int:
        """Places an evicted chunk again, by default at its chronological place. Returns the index."""
        return int(self._post("recall", id=placement, at=at, repair=repair)["index"])

    def look_back(self, query: str | Chunk, *, reserve_tokens: int = 0) -> list[str]:
        """Recalls what fits ``query`` (an id, words or a picture) and makes room for it. Returns the ids."""
        if isinstance(query, str):
            return list(self._post("look_back", query=query, reserve_tokens=reserve_tokens)["recalled"])
        return list(self._place("look_back", "query", query, reserve_tokens=reserve_tokens)["recalled"])

    def retrieve(
        self, query: str | Chunk, library: RemoteLibrary | str, k: int = 4, *, reserve_tokens: int = 0
    ) -> list[str]:
        """Places the ``k`` passages that a library of the server finds for ``query``, best first. Returns the ids."""
        name = library if isinstance(library, str) else library.name
        body = {"library": name, "k": k, "reserve_tokens": reserve_tokens}
        if isinstance(query, str):
            return list(self._post("retrieve", query=query, **body)["placements"])
        return list(self._place("retrieve", "query", query, **body)["placements"])

    def reorder(self, ids: Sequence[str]) -> None:
        """Puts the placed chunks into another order; ``ids`` must be a permutation of them."""
        self._post("reorder", ids=list(ids))

    def toggle(self, placement: str, *, conditioned: bool) -> None:
        """Serves a chunk clean of its context, or conditioned again."""
        self._post("toggle", id=placement, conditioned=conditioned)

    def pin(self, placement: str, *, pinned: bool = True) -> None:
        """Protects a chunk from `slide`, or gives it free."""
        self._post("pin", id=placement, pinned=pinned)

    def touch(self, placement: str) -> None:
        """Marks a chunk as just read: others leave before it."""
        self._post("touch", id=placement)

    def undo(self) -> None:
        """Takes back the last edit that is not taken back yet; UnknownVersion where the version before is not kept."""
        self._post("undo")

    def fork(self, system_prompt: str | None = None) -> Self:
        """A branch on the server that shares every chunk; with ``system_prompt`` behind another one."""
        branch = self._post("fork", system_prompt=system_prompt)["branch"]
        return copy.copy(self)._set_up(self._client, self._async_client, branch)

    def adopt(self, branch: RemoteWindow, *, force: bool = False) -> None:
        """Takes over a branch's state; a conflict where this window moved since, unless ``force``."""
        self._post("adopt", id=branch.id, force=force)
        self.fidelity = Fidelity(**self._get("summary")["fidelity"])

    def ask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """Answers ``query`` over what is placed; takes the options of `ctxwin.Window.ask`. Cost: what `plan` says."""
        return wire.answer_from(self._post("ask", query=query, max_tokens=max_tokens, **transport.named(options)))

    def stream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> RemoteStream:
        """Like `ask`, yielding text as it is made; the iterator's ``answer`` holds the Answer at the end.

        Closing the iterator early stops the server and leaves the window unchanged.
        """
        body = {"query": query, "max_tokens": max_tokens, "stream": True, **transport.named(options)}
        return RemoteStream(transport.stream(self._client, self._path("ask"), body))

    async def aask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """`ask` without blocking the event loop; cancelling it leaves the window unchanged."""
        async with contextlib.aclosing(self._events(query, max_tokens, options)) as events:
            async for event in events:
                if "answer" in event:
                    return wire.answer_from(event["answer"])
        raise EngineFailed("the server ended the answer before its end")

    async def astream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> AsyncIterator[str]:
        """`stream` for async code."""
        async with contextlib.aclosing(self._events(query, max_tokens, options)) as events:
            async for event in events:
                if "text" in event:
                    yield event["text"]

    def remember(self, query: str, answer: str | Sequence[int]) -> str:
        """Keeps an exchange as a chunk. Returns its placement id."""
        given = answer if isinstance(answer, str) else list(answer)
        return str(self._post("remember", query=query, answer=given)["placement"])

    def disposable(self, placement: str, query: str, max_tokens: int = 32, *, clean: bool = False) -> Disposability:
        """Whether the answer to ``query`` stays the same without a chunk. Cost: two asks."""
        made = self._post("disposable", id=placement, query=query, max_tokens=max_tokens, clean=clean)
        return wire.disposability_from(made["disposability"])

    def prefill(self) -> list[str]:
        """Computes now what the next ask would have to compute of the placed chunks. Returns their placement ids."""
        return list(self._post("prefill")["computed"])

    def prepare_orbit(self, ids: Sequence[str], orders: int = 6, seed: int = 0) -> list[str]:
        """Forms patches that serve any order of ``ids``. Returns the ids that have one. Cost: a forward per chunk and order."""
        return list(self._post("prepare_orbit", ids=list(ids), orders=orders, seed=seed)["placements"])

    def refresh(self, count: int | None = None, *, ids: Sequence[str] | None = None) -> list[str]:
        """Re-forms the ``count`` front-most approximations (all by default) of ``ids`` (of all). Returns their ids."""
        return list(self._post("refresh", count=count, ids=None if ids is None else list(ids))["refreshed"])

    def compress(self, *, if_short: bool = False) -> int:
        """Replaces conditioned spans by canonical and patch where that is smaller (``if_short``: and bytes are needed).

        Returns the KV bytes given back.
        """
        return int(self._post("compress", if_short=if_short)["freed_bytes"])

    def merge(self, placement: str, share: float | None = None) -> int:
        """Keeps a chunk in fewer slots, or in all of them again (``share=1``). Returns the slots."""
        return int(self._post("merge", id=placement, share=share)["slots"])

    def close(self) -> None:
        """Closes the window on the server for good. Idempotent; a window that is gone there already counts as closed."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(UnknownWindow):
                transport.delete(self._client, f"/windows/{self.id}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteWindow {self.id} at {self._client.base_url}>"

    def _path(self, what: str) -> str:
        if self._closed:
            raise ReadOnlyWindow("this window is closed; restore its snapshot to go on")
        return f"/windows/{self.id}/{what}"

    def _get(self, what: str) -> dict[str, Any]:
        return dict(transport.get(self._client, self._path(what)))

    def _post(self, operation: str, **body: Any) -> dict[str, Any]:
        return dict(transport.post(self._client, self._path(operation), body))

    def _place(self, operation: str, name: str, placed: Chunk | list[Chunk], **body: Any) -> dict[str, Any]:
        """Posts with ``placed`` as ``name``; uploads what the server does not have, also where it has dropped it since."""
        path, many = self._path(operation), placed if isinstance(placed, list) else [placed]
        for chunk in many:
            if not isinstance(chunk, Chunk):
                raise TypeError(f"chunk must be a ctxwin.Chunk, got {type(chunk).__name__}; make one with Chunk.text")
            if chunk.id not in transport.known_by(self._client):
                transport.upload(self._client, chunk)
        references = [transport.reference(chunk) for chunk in many]
        body[name] = references if isinstance(placed, list) else references[0]
        try:
            return dict(transport.post(self._client, path, body))
        except UnknownUpload:
            for chunk in many:
                transport.upload(self._client, chunk)
            return dict(transport.post(self._client, path, body))

    async def _events(self, query: str, max_tokens: int, options: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        body = {"query": query, "max_tokens": max_tokens, "stream": True, **transport.named(options)}
        async with transport.asynchronous(self._client, self._async_client) as client:
            stream = await transport.astream(client, self._path("ask"), body)
            try:
                with transport.our_errors():
                    async for event in stream:
                        yield event
            finally:
                await stream.close()  # closing the connection is what stops the server


class RemoteStream(Iterator[str]):
    """Text of an answer as it is made. ``answer`` is None until the stream is exhausted."""

    def __init__(self, events: Any) -> None:
        self.answer: Answer | None = None
        self._events = events

    def __next__(self) -> str:
        with transport.our_errors():
            for event in self._events:
                if "answer" in event:
                    self.answer = wire.answer_from(event["answer"])
                elif event.get("text"):
                    return str(event["text"])
        raise StopIteration

    def close(self) -> None:
        """Stops the server if it is still answering; the window is then unchanged."""
        self._events.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
