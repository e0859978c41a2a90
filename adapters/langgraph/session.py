"""`open_window`: a window inside a LangGraph node, which may run again at any time.

LangGraph runs a node again from its top after an interrupt, a failure or a step back in time, and tells nobody. So a
session starts from the immutable version in the state, replays the node's edits with the same placement ids, and takes
the answers it has already computed from the engine's store.
"""

from __future__ import annotations

import contextvars
import copy
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ctxwin.adapters.langgraph import manifest
from ctxwin.adapters.langgraph.context import attend, engine_of
from ctxwin.adapters.langgraph.events import describe_event
from ctxwin.adapters.langgraph.journal import Journal, Operation
from ctxwin.adapters.langgraph.reference import Restored, restore, save
from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.window import placement as placing
from ctxwin.window.answer import Answer
from ctxwin.window.ask import in_thread
from ctxwin.window.events import Event
from ctxwin.window.state import Placed, State
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from langgraph.runtime import Runtime


class Session(Window):
    """A `Window` for one execution of a node; make one with `open_window`, and use it as a context manager.

    When the node runs again behind the same checkpoint, the same edits give the same placement ids, and answers come from
    the engine's store. Other work (`disposable`, `refresh`, `compress`, `prepare_orbit`) is done again.

    Attributes:
        lost: evicted chunks that the store no longer knows; they cannot be recalled.
        rebuilt: placed chunks whose KV bookkeeping was lost; they are computed again from their sources.
        notes: small plain JSON that a node wants to find again beside the window; it travels in the reference.
    """

    notes: dict[str, Any]
    lost = 0
    rebuilt = 0

    def ref(self, *, adopt: bool = False) -> dict[str, Any]:
        """The reference of this version, for the graph's state: plain JSON.

        Args:
            adopt: `merge_windows` prefers it to what parallel branches write, and to newer versions.

        Cost: a few KB of writes to the engine's store.
        """
        operations, adopted = self._base
        operations += self._index + (self.notes != self._noted)  # the reducer must see that something was done
        return save(self, operations=operations, adopted=adopted + adopt, parent=self._origin, notes=self.notes)

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask(self, query: str, max_tokens: int = 32, **options: Any) -> Answer:
        """`Window.ask`; an answer this operation has already given is not computed again (``on_token`` gets it whole)."""
        key, version = self._key(query, max_tokens, options), self.version
        again = self._again(key, query, options)
        if again is not None:
            return again
        return self._record(key, version, super().ask(query, max_tokens, **self._beating(options)))

    async def aask(self, query: str, max_tokens: int = 32, **options: Any) -> Answer:
        """`Window.aask`; an answer this operation has already given is not computed again."""
        key, version = self._key(query, max_tokens, options), self.version
        again = await in_thread(self._again, key, query, options)
        if again is not None:
            return again
        answer = await super().aask(query, max_tokens, **self._beating(options))
        return await in_thread(self._record, key, version, answer)

    def stream(self, query: str, max_tokens: int = 32, **options: Any) -> SessionStream:
        """`Window.stream`; an answer this operation has already given comes in one piece."""
        key, version = self._key(query, max_tokens, options), self.version
        again = self._again(key, query, options)
        inner = None if again else super().stream(query, max_tokens, **options)
        return SessionStream(inner, again, lambda answer: self._record(key, version, answer), self._runtime.heartbeat)

    async def astream(self, query: str, max_tokens: int = 32, **options: Any) -> AsyncIterator[str]:
        """`Window.astream`; an answer this operation has already given comes in one piece."""
        stream = await in_thread(self.stream, query, max_tokens, **options)
        try:
            while (text := await in_thread(next, stream, None)) is not None:
                yield text
        finally:
            await in_thread(stream.close)

    # -- branches ---------------------------------------------------------------------------------------------------

    def fork(self, system_prompt: str | None = None) -> Session:
        """`Window.fork` as a session: its ids are the same when the node runs again; `ref` gives its own reference."""
        state = self.snapshot()
        if system_prompt is not None and system_prompt != state.system_prompt:
            state = placing.behind(self.engine, state, system_prompt)
        self._index += 1
        seed = digest("fork", self._seed, self.id, self._index)
        branch = Session.restore(
            self.engine, state.replace(window=seed[:12]), eviction=self.eviction, retrieval=self.retrieval, seed=seed
        )
        assert isinstance(branch, Session)
        operation = self._operation and Operation(self._operation.checkpoint, self._operation.task, seed[:12])
        branch._attend(self._runtime, operation, (self._base[0] + self._index, self._base[1]))
        branch._note(self.notes)
        branch._parent = (weakref.ref(self), state.version)
        inherited = (o for o in self._observers if o != self._tell)
        branch._observers, branch._origin = (*inherited, branch._tell), self.id
        self._emit(self._event("fork", other=branch.id, note=system_prompt or ""))
        return branch

    def adopt(self, branch: Window | Mapping[str, Any], *, force: bool = False) -> None:
        """`Window.adopt`, also of a branch's reference, as another node left it: its state becomes this window's.

        A reference is adopted where it was forked from this window (else ValueError, unless ``force``), whether or not this
        window has moved since: the node that joins branches decides.
        """
        if isinstance(branch, Window):
            super().adopt(branch, force=force)
            if isinstance(branch, Session):
                self.notes = copy.deepcopy(branch.notes)
            return
        found = restore(self.engine.repo, branch)
        if not force and branch.get("parent") != self.id and branch["window"] != self.id:
            raise ValueError(
                f"branch must be a fork of window {self.id}, got window {branch['window']} forked from "
                f"{branch.get('parent')}; pass force=True to adopt it anyway"
            )
        self._warn(found)
        with Window.restore(self.engine, found.state) as theirs:
            super().adopt(theirs, force=True)
        self.notes = copy.deepcopy(branch.get("notes", {}))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _attend(self, runtime: Runtime[Any], operation: Operation | None, base: tuple[int, int]) -> None:
        self._runtime = runtime
        self._base = base  # operations and adoptions so far
        self._note({})
        self._index = 0  # of this session's operations
        self._events = 0  # that were told of them
        self._left: Event | None = None  # the latest answer that is still to be kept
        self._operation = operation
        self._journal = Journal(self.engine.repo, operation) if operation else None
        self._run_context = contextvars.copy_context()  # the stream writer looks for the run's config there

    def _note(self, notes: Mapping[str, Any]) -> None:
        """Starts with these notes; `ref` counts a change of them."""
        self.notes, self._noted = copy.deepcopy(dict(notes)), copy.deepcopy(dict(notes))

    @contextmanager
    def _writing(self, *, edit: bool = True) -> Iterator[State]:
        with super()._writing(edit=edit) as state:
            self._index += 1
            self._runtime.heartbeat()
            yield state
        self._runtime.heartbeat()

    def _new(self, state: State, chunk: Chunk) -> Placed:
        placed = super()._new(state, chunk)
        self._runtime.heartbeat()  # many pictures may arrive in one operation
        return placed

    def _beating(self, options: dict[str, Any]) -> dict[str, Any]:
        """``options`` with a heartbeat at every token."""
        heard: Callable[[int, str], bool] | None = options.get("on_token")

        def on_token(token: int, text: str) -> bool:
            self._runtime.heartbeat()
            return heard is None or heard(token, text)

        return {**options, "on_token": on_token}

    def _key(self, query: str, max_tokens: int, options: dict[str, Any]) -> str | None:
        if self._journal is None:
            return None
        said = {k: v for k, v in options.items() if k not in ("on_token", "stopped")}
        state = self.snapshot().replace(fidelity=self._fidelity)  # ``auto`` may be resolved otherwise next time
        return self._journal.key(self._index, state, query, max_tokens, said)

    def _again(self, key: str | None, query: str, options: dict[str, Any]) -> Answer | None:
        """The answer under ``key``, with its effects on the window; None where it must be computed."""
        found = self._journal.get(key) if self._journal and key else None
        if found is None:
            return None
        answer, state = found
        with self._writing(edit=bool(options.get("remember"))):
            self._commit(state)
        if options.get("on_token") and answer.token_ids:
            options["on_token"](answer.token_ids[-1], answer.text)
        ids = (answer.remembered,) if answer.remembered else ()
        # Only the stream hears of it: nothing was asked of the engine.
        self._tell(self._event("ask", ids, query=query, answer=answer, note="again"))
        return answer

    def _record(self, key: str | None, version: int, answer: Answer) -> Answer:
        """Keeps ``answer``, given over ``version``, under ``key``, with the state it left: others may have edited since."""
        left, self._left = self._left, None
        settled = version + (answer.remembered is not None)
        if self._journal and key and left and left.answer is answer and left.version == settled:
            self._journal.put(key, answer, left.state)
        return answer

    def _tell(self, event: Event) -> None:
        """Writes an operation to the run's custom stream."""
        if event.op == "forget":
            for placement in event.ids:
                manifest.forget(self.engine.repo, placement)
        if event.op == "ask" and event.window == self.id:
            self._left = event
        if event.op != "close":  # of no interest: every node closes its sessions
            self._events += 1  # one operation may be several of them
            self._write(describe_event(event, self._operation.key(self._events) if self._operation else None))

    def _write(self, payload: dict[str, Any]) -> None:
        # A context can be entered once at a time, and answers come from other threads.
        self._run_context.copy().run(self._runtime.stream_writer, payload)

    def _warn(self, found: Restored) -> None:
        self.lost += found.lost
        self.rebuilt += found.rebuilt
        if found.lost or found.rebuilt:
            state = found.state
            self._write(
                {
                    "type": "window", "op": "lost", "window": state.window, "version": state.version,
                    "lost": found.lost, "rebuilt": found.rebuilt,
                }
            )  # fmt: skip


class SessionStream(Iterator[str]):
    """Text of an answer as it is made; ``answer`` is None until it is exhausted."""

    def __init__(
        self, inner: Any, again: Answer | None, record: Callable[[Answer], Answer], heartbeat: Callable[[], None]
    ) -> None:
        self.answer: Answer | None = again
        self._inner = inner
        self._left = [again.text] if again and again.text else []
        self._done = record
        self._heartbeat = heartbeat

    def __next__(self) -> str:
        if self._inner is None:
            if not self._left:
                raise StopIteration
            return self._left.pop()
        self._heartbeat()
        try:
            text: str = next(self._inner)
            return text
        except StopIteration:
            if self.answer is None and self._inner.answer is not None:
                self.answer = self._done(self._inner.answer)
            raise

    def close(self) -> None:
        """Stops the engine if it is still answering, and waits for it; the window is then unchanged."""
        if self._inner is not None:
            self._inner.close()


def open_window(
    reference: Mapping[str, Any] | None,
    runtime: Runtime[Any],
    *,
    system_prompt: str | None = None,
    budget: int | None = None,
    fidelity: Fidelity | None = None,
    eviction: Eviction | None = None,
    retrieval: Retrieval | None = None,
    name: str = "",
) -> Session:
    """The window of ``reference``, or a new one, for a node that may run again.

    Args:
        reference: the state's value: what a node returned as ``session.ref()``; None (or the empty dict that LangGraph
            starts a key with) opens a new window.
        runtime: LangGraph's, as injected into the node; its context holds the engine (`WindowContext`).
        system_prompt: of a new window. One that exists keeps its own (ValueError for another).
        budget, fidelity: as for `Window`; a window that exists keeps its own where they are left out.
        eviction, retrieval: policies, which are not part of a reference.
        name: tells the sessions apart where a node opens the same version twice.

    Every operation is written to the run's custom stream (``stream_mode="custom"``) and sends a heartbeat, as does every
    token of an answer; an ``idle_timeout`` must be longer than the longest prefill. In an async node use `Session.aask` and
    `Session.astream`: the others block the event loop.

    Raises TypeError where the context has no engine, ValueError for what is no reference.
    Cost: reading the manifest and what this process has not met; nothing is computed.

    Example::

        def look(state: State, runtime: Runtime[WindowContext]) -> dict:
            with open_window(state.get("window"), runtime, system_prompt="You watch a camera.") as window:
                window.append(Chunk.image(state["frame"]))
                window.slide(reserve_tokens=64)
                return {"answer": window.ask("What moved?").text, "window": window.ref()}
    """
    engine = engine_of(runtime.context)
    info = runtime.execution_info
    operation = Operation(info.checkpoint_id, info.task_id, name) if info is not None else None
    if reference:
        found = restore(engine.repo, reference)
        state = _opened_as(engine, found.state, system_prompt, budget, fidelity)
        base = (reference["operations"] + (state is not found.state), reference["adopted"])
        found = replace(found, state=state)
    else:
        with Window(engine, system_prompt or "", budget, fidelity) as fresh:
            state = fresh.snapshot()
        if operation is not None:
            state = state.replace(window=digest("window", operation.seed, state.system_prompt)[:12])
        found, base = Restored(state), (0, 0)
    # Of two windows that one node edits, neither has the other's placement ids.
    seed = digest("edits", operation.seed, found.state.window) if operation is not None else None
    session = Session.restore(engine, found.state, eviction=eviction, retrieval=retrieval, seed=seed)
    assert isinstance(session, Session)
    session._attend(runtime, operation, base)
    if reference:
        session._note(reference.get("notes", {}))
        session._encodes = reference.get("encodes", 0)
    session._origin = reference.get("parent") if reference else None
    attend(runtime.context, session)
    session.observe(session._tell)
    session._warn(found)
    return session


def _opened_as(
    engine: Engine, state: State, system_prompt: str | None, budget: int | None, fidelity: Fidelity | None
) -> State:
    """``state`` with the budget and the fidelity that a node asks for."""
    if system_prompt is not None and system_prompt != state.system_prompt:
        raise ValueError(
            f"system_prompt must be that of window {state.window}, {state.system_prompt[:80]!r}, got {system_prompt[:80]!r}; "
            "leave it out, or fork(system_prompt=...) the window"
        )
    if budget is None and fidelity is None:
        return state
    # A window checks both. One that comes from a larger engine gets what this one takes.
    kept = min(state.budget, engine.spec.max_tokens)
    with Window(engine, state.system_prompt, kept if budget is None else budget, fidelity or state.fidelity) as like:
        asked = state.replace(budget=like.budget, fidelity=like.snapshot().fidelity)
    return state if asked == state else asked
