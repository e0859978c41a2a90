"""`RemoteWindow`: the methods of `ctxwin.Window`, executed by a server."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, Unpack

from openai import AsyncOpenAI, OpenAI

from ctxwin.chunk import Chunk
from ctxwin.errors import EngineFailed, ReadOnlyWindow
from ctxwin.fidelity import Fidelity
from ctxwin.window import serialization
from ctxwin.window.answer import Answer, Disposability, Plan, PlanEntry
from ctxwin.window.ask import AskOptions
from ctxwin.window.state import State
from ctxwin_client import transport
from ctxwin_client.errors import UnknownUpload, UnknownWindow
from ctxwin_client.library import RemoteLibrary


class RemoteWindow:
    """A window on a server started with ``ctxwin serve``; see `ctxwin.Window` for the meaning of the methods.

    Args:
        client: an official client, e.g. ``openai.OpenAI(base_url="http://localhost:8000/v1", api_key=KEY)``.
        system_prompt, budget, fidelity, budget_bytes, low_water, prefill: as for `ctxwin.Window`; fidelity: the server's by
            default.
        async_client: client of `aask` and `astream`; default: a new one for each call, with the settings of ``client``.

    Attributes:
        id: the server's id of this window; edits and restarts of the server do not change it.
        system_prompt: fixed for the life of the window.
        budget: maximum tokens of system prompt, chunks, query and answer together.
        low_water: tokens to which it falls when it is over its budget; None: to the budget, chunk by chunk.
        fidelity: the fidelity in force.

    Raises:
        BudgetExceeded: the system prompt alone does not fit. openai.APIError: no such server, or a key that it does not accept.

    Every method is one request (`append` of a new chunk two or three) and raises the errors of `ctxwin.Window`. The window
    stays on the server until `close`. The server suspends a window that has been idle for its ``--window-ttl`` and restores
    it at the next call. `attach` opens an existing window by its id.
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
        options: dict[str, Any] = {"system_prompt": system_prompt, "budget": budget, "budget_bytes": budget_bytes}
        options["low_water"], options["prefill"] = low_water, prefill
        options["fidelity"] = None if fidelity is None else fidelity.model_dump(mode="json")
        body = {name: value for name, value in options.items() if value is not None}
        self._set_up(client, async_client, transport.post(client, "/windows", body))

    def _set_up(self, client: OpenAI, async_client: AsyncOpenAI | None, window: dict[str, Any]) -> Self:
        self._client, self._async_client = client, async_client
        self.id, self.system_prompt, self.budget = window["id"], window["system_prompt"], window["budget"]
        self.low_water, self.fidelity = window["low_water"], Fidelity.model_validate(window["fidelity"])
        self._closed = False
        return self

    @classmethod
    def attach(cls, client: OpenAI, window_id: str, *, async_client: AsyncOpenAI | None = None) -> Self:
        """Open a window that is already on the server, by its id; raises UnknownWindow."""
        return cls.__new__(cls)._set_up(client, async_client, transport.get(client, f"/windows/{window_id}"))

    @classmethod
    def restore(
        cls, client: OpenAI, state: State | dict[str, Any] | str, *, async_client: AsyncOpenAI | None = None
    ) -> Self:
        """Create a window from a snapshot, on any server. The server reads no paths in it; see `Window.restore`."""
        if isinstance(state, str):
            state = State.model_validate_json(state)
        data = state.model_dump(mode="json") if isinstance(state, State) else state
        window = transport.post(client, "/windows", {"snapshot": data})
        return cls.__new__(cls)._set_up(client, async_client, window)

    @property
    def tokens(self) -> int:
        """Current tokens of system prompt and placed chunks. Cost: a request."""
        return int(self._get("summary")["tokens"])

    @property
    def bytes(self) -> int:
        """KV bytes of the placed chunks. Cost: a request."""
        return int(self._get("summary")["bytes"])

    @property
    def version(self) -> int:
        """Version of the window, which changes with every edit. Cost: a request."""
        return int(self._get("summary")["version"])

    @property
    def ids(self) -> tuple[str, ...]:
        """Placement ids in order. Cost: a request."""
        return tuple(self._get("summary")["ids"])

    @property
    def pending(self) -> tuple[str, ...]:
        """Placement ids with lazy edits that wait for the next break of the prefix, in order. Cost: a request."""
        return tuple(p.id for p in self.snapshot().placed if p.pending)

    @property
    def evicted(self) -> tuple[str, ...]:
        """Placement ids that can be recalled, the oldest first. Cost: a request."""
        return tuple(self._get("summary")["evicted"])

    @property
    def chunks(self) -> tuple[PlanEntry, ...]:
        """Placed chunks, each with how the next ask would serve it. Cost: as `plan`."""
        return self.plan().entries

    def chunk(self, placement: str) -> Chunk:
        """Return the chunk of a placed or evicted id, without its pixels; raises UnknownChunk."""
        return self.snapshot().find(placement).chunk

    def dependents(self, placement: str) -> tuple[str, ...]:
        """Return the placements whose KV has absorbed ``placement``. Cost: a request."""
        return tuple(p.id for p in self.snapshot().placed if p.kv and placement in p.kv.antecedents)

    def plan(self) -> Plan:
        """Return the actions and costs of the next ask, as `ctxwin.Window.plan`. Cost: a request; no forward."""
        return serialization.plan_from(self._get("plan"))

    def snapshot(self) -> State:
        """Return the window as data, as `ctxwin.Window.snapshot`; `restore` takes it on any server of the same model."""
        return State.model_validate(self._get("snapshot"))

    def check(self) -> None:
        """Assert every invariant of the window on the server."""
        self._post("check")

    def append(self, chunk: Chunk) -> str:
        """Place a chunk after all others; upload it if the server does not have it. Returns the placement id."""
        return str(self._place("append", "chunk", chunk)["placement"])

    def extend(self, chunks: Sequence[Chunk]) -> list[str]:
        """Place chunks in order, in one request. Returns their placement ids."""
        return list(self._place("extend", "chunks", list(chunks))["placements"])

    def insert(self, index: int, chunk: Chunk, *, lazy: bool = False) -> str:
        """Place a chunk at ``index``, ``lazy`` once the prefix breaks. Returns the placement id."""
        return str(self._place("insert", "chunk", chunk, index=index, lazy=lazy)["placement"])

    def evict(self, placement: str, *, forget: bool = False, lazy: bool = False) -> None:
        """Evict a chunk; with ``forget`` also remove what others absorbed from it; ``lazy`` once the prefix breaks."""
        self._post("evict", id=placement, forget=forget, lazy=lazy)

    def slide(self, count: int | None = None, *, reserve_tokens: int = 0, to: float | None = None) -> list[str]:
        """Evict unpinned chunks, the oldest first and recalled ones last: ``count``, or until ``reserve_tokens`` are free.

        Returns their ids.
        """
        return list(self._post("slide", count=count, reserve_tokens=reserve_tokens, to=to)["evicted"])

    def recall(
        self, placement: str, at: int | Literal["chronological", "cheapest"] | None = None, *, repair: bool = False
    ) -> int:
        """Place an evicted chunk again at an index, its ``"chronological"`` place, or where the next ask computes least
        (``"cheapest"``); return the index. Default: as for `ctxwin.Window.recall`.
        """
        return int(self._post("recall", id=placement, at=at, repair=repair)["index"])

    def look_back(self, query: str | Chunk, *, reserve_tokens: int = 0) -> list[str]:
        """Recall the chunks that match ``query`` (an id, words or a picture), evicting others if needed. Returns the ids."""
        return list(self._search("look_back", query, reserve_tokens=reserve_tokens)["recalled"])

    def retrieve(
        self, query: str | Chunk, library: RemoteLibrary | str, k: int = 4, *, reserve_tokens: int = 0
    ) -> list[str]:
        """Place the ``k`` passages that a library of the server finds for ``query``, best first. Returns the ids."""
        name = library if isinstance(library, str) else library.name
        body = {"library": name, "k": k, "reserve_tokens": reserve_tokens}
        return list(self._search("retrieve", query, **body)["placements"])

    def reorder(self, ids: Sequence[str]) -> None:
        """Reorder the placed chunks; ``ids`` must be a permutation of them."""
        self._post("reorder", ids=list(ids))

    def toggle(self, placement: str, *, conditioned: bool, lazy: bool = False) -> None:
        """Serve a chunk free of its context, or conditioned again; ``lazy`` once the prefix breaks."""
        self._post("toggle", id=placement, conditioned=conditioned, lazy=lazy)

    def pin(self, placement: str, *, pinned: bool = True) -> None:
        """Protect a chunk from `slide`, or release it."""
        self._post("pin", id=placement, pinned=pinned)

    def touch(self, placement: str) -> None:
        """Mark a chunk as just read: others leave before it."""
        self._post("touch", id=placement)

    def undo(self) -> None:
        """Undo the last edit that is not undone yet; raises UnknownVersion if the previous version is not kept."""
        self._post("undo")

    def fork(self, system_prompt: str | None = None) -> Self:
        """Return a branch on the server that shares every chunk, optionally after another ``system_prompt``."""
        branch = self._post("fork", system_prompt=system_prompt)["branch"]
        return copy.copy(self)._set_up(self._client, self._async_client, branch)

    def adopt(self, branch: RemoteWindow, *, force: bool = False) -> None:
        """Take over a branch's state; raises a conflict if this window has changed since the fork, unless ``force``."""
        self._post("adopt", id=branch.id, force=force)
        self.fidelity = Fidelity.model_validate(self._get("summary")["fidelity"])

    def ask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """Answer ``query`` over the placed chunks; takes the options of `ctxwin.Window.ask`. Cost: as given by `plan`."""
        return serialization.answer_from(self._post("ask", **transport.question(query, max_tokens, options)))

    def stream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> RemoteStream:
        """Like `ask`, yielding text as it is generated; the iterator's ``answer`` holds the Answer at the end.

        Closing the iterator early stops the server and leaves the window unchanged.
        """
        body = transport.question(query, max_tokens, options, stream=True)
        return RemoteStream(transport.stream(self._client, self._path("ask"), body))

    async def aask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """`ask` without blocking the event loop; cancelling it leaves the window unchanged."""
        async with contextlib.aclosing(self._events(query, max_tokens, options)) as events:
            async for event in events:
                if "answer" in event:
                    return serialization.answer_from(event["answer"])
        raise EngineFailed("the server ended the answer before its end")

    async def astream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> AsyncIterator[str]:
        """`stream` for async code."""
        async with contextlib.aclosing(self._events(query, max_tokens, options)) as events:
            async for event in events:
                if "text" in event:
                    yield event["text"]

    def remember(self, query: str, answer: str | Sequence[int]) -> str:
        """Append an exchange as a chunk. Returns its placement id."""
        content = answer if isinstance(answer, str) else list(answer)
        return str(self._post("remember", query=query, answer=content)["placement"])

    def disposable(self, placement: str, query: str, max_tokens: int = 32, *, clean: bool = False) -> Disposability:
        """Compare the answers to ``query`` with and without a chunk. Cost: two asks."""
        response = self._post("disposable", id=placement, query=query, max_tokens=max_tokens, clean=clean)
        return serialization.disposability_from(response["disposability"])

    def prefill(self) -> list[str]:
        """Compute the placed chunks that the next ask would have to compute. Returns their placement ids."""
        return list(self._post("prefill")["computed"])

    def prepare_orbit(self, ids: Sequence[str], orders: int = 6, seed: int = 0) -> list[str]:
        """Form patches that serve any order of ``ids``. Returns the ids that have one. Cost: a forward per chunk and order."""
        return list(self._post("prepare_orbit", ids=list(ids), orders=orders, seed=seed)["placements"])

    def refresh(self, count: int | None = None, *, ids: Sequence[str] | None = None) -> list[str]:
        """Form the first ``count`` approximations (default: all) of ``ids`` (default: all) again. Returns their ids."""
        return list(self._post("refresh", count=count, ids=None if ids is None else list(ids))["refreshed"])

    def compress(self, *, if_short: bool = False) -> int:
        """Replace conditioned spans by canonical and patch if that is smaller (``if_short``: and if bytes are needed).

        Returns the KV bytes freed.
        """
        return int(self._post("compress", if_short=if_short)["freed_bytes"])

    def merge(self, placement: str, share: float | None = None) -> int:
        """Keep a chunk in fewer slots, or in all of them again (``share=1``). Returns the number of slots."""
        return int(self._post("merge", id=placement, share=share)["slots"])

    def close(self) -> None:
        """Close the window on the server permanently. Idempotent; a window that no longer exists counts as closed."""
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

    def _path(self, route: str) -> str:
        if self._closed:
            raise ReadOnlyWindow("this window is closed; restore its snapshot to continue")
        return f"/windows/{self.id}/{route}"

    def _get(self, route: str) -> dict[str, Any]:
        return dict(transport.get(self._client, self._path(route)))

    def _post(self, operation: str, **body: Any) -> dict[str, Any]:
        return dict(transport.post(self._client, self._path(operation), body))

    def _search(self, operation: str, query: str | Chunk, **body: Any) -> dict[str, Any]:
        if isinstance(query, str):
            return self._post(operation, query=query, **body)
        return self._place(operation, "query", query, **body)

    def _place(self, operation: str, name: str, content: Chunk | list[Chunk], **body: Any) -> dict[str, Any]:
        """Post with ``content`` as ``name``; upload chunks that the server lacks or has dropped."""
        path, chunks = self._path(operation), content if isinstance(content, list) else [content]
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise TypeError(f"chunk must be a ctxwin.Chunk, got {type(chunk).__name__}; create one with Chunk.text")
            if chunk.id not in transport.uploaded_by(self._client):
                transport.upload(self._client, chunk)
        references = [transport.reference(chunk) for chunk in chunks]
        body[name] = references if isinstance(content, list) else references[0]
        try:
            return dict(transport.post(self._client, path, body))
        except UnknownUpload:
            for chunk in chunks:
                transport.upload(self._client, chunk)
            return dict(transport.post(self._client, path, body))

    async def _events(self, query: str, max_tokens: int, options: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        body = transport.question(query, max_tokens, options, stream=True)
        async with transport.async_client_of(self._client, self._async_client) as client:
            stream = await transport.astream(client, self._path("ask"), body)
            try:
                with transport.our_errors():
                    async for event in stream:
                        yield event
            finally:
                await stream.close()  # the server stops when the connection closes


class RemoteStream(Iterator[str]):
    """Text of an answer as it is generated. ``answer`` is None until the stream is exhausted."""

    def __init__(self, events: Any) -> None:
        self.answer: Answer | None = None
        self._events = events

    def __next__(self) -> str:
        with transport.our_errors():
            for event in self._events:
                if "answer" in event:
                    self.answer = serialization.answer_from(event["answer"])
                elif event.get("text"):
                    return str(event["text"])
        raise StopIteration

    def close(self) -> None:
        """Stop the server if it is still answering; the window is then unchanged."""
        self._events.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
