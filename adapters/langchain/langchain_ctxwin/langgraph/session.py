"""`open_window`: a window inside a LangGraph node, which may run again at any time.

LangGraph runs a node again from its start after an interrupt, a failure or a return to an earlier checkpoint, without notice.
A session therefore starts from the immutable version in the state, gives the node's edits the same placement ids as before,
and takes the answers that were already computed from the engine's store.
"""

from __future__ import annotations

import contextvars
import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeAlias

from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.window import serialization
from ctxwin.window.answer import Answer
from ctxwin.window.ask import OnToken, Question, not_stopped
from ctxwin.window.async_window import AsyncWindow, Attribute, to_async
from ctxwin.window.events import Event, Observer
from ctxwin.window.state import State
from ctxwin.window.window import Window
from langchain_ctxwin.langgraph.reference import (
    Restored,
    forget,
    manifest_of,
    read_manifest,
    restore,
    save,
    write_manifest,
)

if TYPE_CHECKING:
    from langgraph.prebuilt import ToolRuntime
    from langgraph.runtime import Runtime

    AnyRuntime: TypeAlias = Runtime[Any] | ToolRuntime[Any, Any]

P = ParamSpec("P")
_MAX_TEXT = 400  # characters of a query, an answer or a note


class Watcher(Protocol):
    """Protocol of objects that observe every window, like `ctxwin.baselines.ledger.Ledger` and `ctxwin.view.trace.Trace`."""

    def watch(self, window: Window) -> object:
        """Observe ``window``; called once with each window that a node opens."""


@dataclass
class WindowContext:
    """``context_schema`` of a graph with windows. A context of your own needs these attributes, at least the engine.

    Attributes:
        engine: from `ctxwin.open_engine`; shared by all windows of all runs. Never in the state.
        ledger: counts every window that a node opens, e.g. `ctxwin.baselines.ledger.Ledger`.
        observer: observes them as well: a callable as for `Window.observe`, or a `Watcher` like `ctxwin.view.trace.Trace`.
    """

    engine: Engine
    ledger: Watcher | None = None
    observer: Observer | Watcher | None = None


def engine_of(context: Any) -> Engine:
    """Return the engine in a run's context. Raises TypeError, with the remedy, if there is none."""
    engine = getattr(context, "engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"the run's context must have an engine, got {type(context).__name__}; build the graph with "
            "StateGraph(State, context_schema=WindowContext) and run it with context=WindowContext(engine)"
        )
    return engine


Execution = tuple[str, str, str]
"""Ids of the checkpoint and the task, the same whenever the node runs again after it (resume, retry), and a name that
distinguishes the sessions of one node."""


class Session(Window):
    """A `Window` for one execution of a node; create it with `open_window`, and use it as a context manager.

    When the node runs again after the same checkpoint, the same edits give the same placement ids, and answers come from
    the engine's store. Everything else (`disposable`, and what `maintenance` does) is computed again.

    Attributes:
        lost: evicted chunks that the store no longer knows; they cannot be recalled.
        rebuilt: placed chunks whose KV bookkeeping was lost; they are computed again from their sources.
        dropped: references written by nodes parallel to the last writer, whose edits are not in this window; see
            `gather`.
        notes: small plain JSON that a node keeps with the window; it travels in the reference.
    """

    def _start(
        self,
        runtime: AnyRuntime,
        execution: Execution | None,
        base: tuple[int, int],
        notes: Mapping[str, Any],
        manifest: str = "",
    ) -> None:
        """Set up a new session, with the operations and adoptions so far and the manifest of its version."""
        self.lost = self.rebuilt = self._events = 0
        self.dropped: tuple[Mapping[str, Any], ...] = ()
        self._began = manifest
        self.notes: dict[str, Any] = copy.deepcopy(dict(notes))
        self._initial_notes = copy.deepcopy(self.notes)  # `ref` counts a change of them
        self._runtime, self._execution, self._base = runtime, execution, base
        self._last_ask: Event | None = None
        self._run_context = contextvars.copy_context()  # the stream writer looks for the run's config there
        if heartbeat := getattr(runtime, "heartbeat", None):  # a tool's has none
            self.core.heartbeat = heartbeat

    def ref(self, *, adopt: bool = False) -> dict[str, Any]:
        """Return the reference of this version, for the graph's state: plain JSON.

        Args:
            adopt: `merge_windows` prefers it to the references of parallel branches, and to newer versions.

        Cost: a few KB of writes to the engine's store.
        """
        operations, adopted = self._base
        operations += self.core.operations + (self.notes != self._initial_notes)  # the reducer must see a change
        ranks: Any = {"operations": operations, "adopted": adopted + adopt}
        written = (*self._execution[:2], self._began) if self._execution else ()
        return save(self, **ranks, parent=self.core.parent, notes=self.notes, written=written)

    def answer(
        self, question: Question, *, on_token: OnToken | None = None, stopped: Callable[[], bool] = not_stopped
    ) -> Answer:
        """`Window.answer`; an answer that this execution has computed before is reused (``on_token`` gets all of it at once).

        One with stage outputs, which no store keeps, is computed again.
        """
        wants_outputs = self.engine.spec.outputs and question.outputs != ()
        if self._execution is None or callable(question.remember) or wants_outputs:
            return super().answer(question, on_token=on_token, stopped=stopped)
        state = self.snapshot().replace(fidelity=self.fidelity)  # ``auto`` may be resolved differently next time
        sampling = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(question.sampling).items()}
        asks = [question.query, bool(question.remember), list(question.stop), sampling]
        if question.tools or question.libraries or question.n > 1:
            versions = [(library.name, library.view().version) for library in question.libraries]
            asks += [json.dumps(question.tools), versions, question.n]
        version = manifest_of(self.engine.repo, state)[0]
        key = "journal/" + digest("ask", _seed(self._execution), self.core.operations, version, asks)
        if (recorded := self._recorded_answer(key)) is not None:
            return self._replay(*recorded, question, on_token)
        answer = super().answer(question, on_token=on_token, stopped=stopped)
        event, self._last_ask = self._last_ask, None
        expected_version = state.version + (answer.remembered is not None)
        if event and event.answer is answer and event.version == expected_version:  # others may have edited since
            manifest = write_manifest(self.engine.repo, event.state)
            self.engine.repo.put_json(key, {"answer": serialization.answer_to(answer), "manifest": manifest})
        return answer

    def _recorded_answer(self, key: str) -> tuple[Answer, State] | None:
        """Return the answer of an earlier execution and the state after it; None if either is missing or incomplete."""
        record = self.engine.repo.get_json(key)
        stored = read_manifest(self.engine.repo, record["manifest"]) if record is not None else None
        if stored is None or stored[1] or stored[2]:
            return None
        with suppress(KeyError, TypeError, ValueError):  # of a version that wrote other fields: a miss
            return serialization.answer_from(record["answer"]), stored[0]
        return None

    def _replay(self, answer: Answer, state: State, question: Question, on_token: OnToken | None) -> Answer:
        """Return an answer from the journal, and apply its effects to the window."""
        with self.core.writing(edit=bool(question.remember)):
            self.core.commit(state)
        if on_token is not None and answer.token_ids:
            on_token(answer.token_ids[-1], answer.text)
        ids = (answer.remembered,) if answer.remembered else ()
        # Only the run's stream is notified, as the engine computed nothing.
        self._observe(self.core.event("ask", ids, query=question.query, answer=answer, note="again"))
        return answer

    def fork(self, system_prompt: str | None = None) -> Session:
        """`Window.fork` as a session: its ids are the same when the node runs again; `ref` returns its own reference."""
        branch = super().fork(system_prompt)
        execution = self._execution and (*self._execution[:2], branch.id)
        base = (self._base[0] + self.core.operations, self._base[1])
        branch._start(self._runtime, execution, base, self.notes)
        branch.core.observers = (*(o for o in branch.core.observers if o != self._observe), branch._observe)
        return branch

    def adopt(self, branch: Window | Mapping[str, Any], *, force: bool = False) -> None:
        """`Window.adopt`, also of a branch's reference from another node: its state becomes this window's.

        A reference must come from a fork of this window (else ValueError, unless ``force``). This window may have changed since:
        the node that joins branches decides.
        """
        if isinstance(branch, Window):
            super().adopt(branch, force=force)
            if isinstance(branch, Session):
                self.notes = copy.deepcopy(branch.notes)
            return
        restored_branch = restore(self.engine.repo, branch)
        if not force and branch.get("parent") != self.id and branch["window"] != self.id:
            raise ValueError(
                f"branch must be a fork of window {self.id}, got window {branch['window']} forked from "
                f"{branch.get('parent')}; pass force=True to adopt it anyway"
            )
        self.report_losses(restored_branch)
        with Window.restore(self.engine, restored_branch.state) as window:
            super().adopt(window, force=True)
        self.notes = copy.deepcopy(branch.get("notes", {}))

    def gather(self, branches: Iterable[Window | Mapping[str, Any]]) -> list[str]:
        """Append the chunks that branches of this window (or their references) have placed and it never had, branch by branch.

        Returns their ids in this window. Raises like `Window.extend`. Cost: as for new chunks, but no encode.
        """
        state = self.snapshot()
        known_ids, new = {p.id for p in (*state.placed, *state.evicted)}, []
        for branch in branches:
            branch_state = branch.snapshot() if isinstance(branch, Window) else restore(self.engine.repo, branch).state
            new += [p.chunk for p in branch_state.placed if p.id not in known_ids]
            known_ids |= {p.id for p in branch_state.placed}
        return self.extend(new)

    def _observe(self, event: Event) -> None:
        """Delete what a forgotten chunk has left, keep the last ask, and write an operation to the run's custom stream."""
        if event.op == "forget":
            for placement in event.ids:
                forget(self.engine.repo, placement)
        if event.op == "ask" and event.window == self.id:
            self._last_ask = event
        if event.op != "close":  # every node closes its sessions
            self._events += 1  # one operation may send several
            key = ":".join(filter(None, [*self._execution, str(self._events)])) if self._execution else None
            self._write(describe_event(event, key))

    def report_losses(self, window: Restored) -> None:
        """Count the chunks that the store has lost of a restored window, and write them to the run's custom stream."""
        self.lost += window.lost
        self.rebuilt += window.rebuilt
        if window.lost or window.rebuilt:
            header = {"type": "window", "op": "lost", "window": window.state.window, "version": window.state.version}
            self._write({**header, "lost": window.lost, "rebuilt": window.rebuilt})

    def report_dropped(self, dropped: Sequence[Mapping[str, Any]]) -> None:
        """Keep the references of parallel writers in `dropped`, and write them to the run's custom stream."""
        self.dropped = tuple(dropped)
        if dropped:
            versions = [other["version"] for other in dropped]
            header = {"type": "window", "op": "dropped", "window": self.id, "version": self.version}
            self._write({**header, "versions": versions})

    def _write(self, payload: dict[str, Any]) -> None:
        # A context can be entered once at a time, and answers come from other threads.
        self._run_context.copy().run(self._runtime.stream_writer, payload)


def open_window(
    reference: Mapping[str, Any] | None,
    runtime: AnyRuntime,
    *,
    system_prompt: str | None = None,
    budget: int | None = None,
    fidelity: Fidelity | None = None,
    low_water: float | Literal["auto"] | None = None,
    eviction: Eviction | None = None,
    retrieval: Retrieval | None = None,
    name: str = "",
) -> Session:
    """Open the window of ``reference``, or a new one, for a node that may run again.

    Args:
        reference: result of ``session.ref()`` in an earlier node, from the state; None (or the empty dict that LangGraph starts a
            key with) opens a new window.
        runtime: LangGraph's, as injected into the node or the tool; its context holds the engine (`WindowContext`).
        system_prompt: of a new window. An existing one keeps its own (ValueError for another).
        budget, fidelity: as for `Window`; an existing window keeps its own where they are omitted.
        low_water: of a new window, as for `Window`; an existing one keeps its own.
        eviction, retrieval: policies, which are not part of a reference.
        name: distinguishes the sessions of a node that opens the same version twice.

    Every operation is written to the run's custom stream (``stream_mode="custom"``) and sends a heartbeat, as does every
    token of an answer; an ``idle_timeout`` must be longer than the longest prefill. This blocks an event loop: async nodes use
    `aopen_window`.

    Raises TypeError if the context has no engine, ValueError if ``reference`` is not one.
    Cost: reading the manifest and the entries that are new to this process; nothing is computed.

    Example::

        def look(state: State, runtime: Runtime[WindowContext]) -> dict:
            with open_window(state.get("window"), runtime, system_prompt="You watch a camera.") as window:
                window.append(Chunk.image(state["frame"]))
                window.slide(reserve_tokens=64)
                return {"answer": window.ask("What moved?").text, "window": window.ref()}
    """
    engine = engine_of(runtime.context)
    info = runtime.execution_info
    call = getattr(runtime, "tool_call_id", None) or ""  # one task may call tools beside one another
    execution = (info.checkpoint_id, info.task_id + call, name) if info is not None else None
    if reference:
        opened = restore(engine.repo, reference)
        state = _with_options(engine, opened.state, system_prompt, budget, fidelity)
        base = (reference["operations"] + (state != opened.state), reference["adopted"])
        opened = replace(opened, state=state)
    else:
        with Window(engine, system_prompt or "", budget, fidelity, low_water=low_water) as fresh:
            state = fresh.snapshot()
        if execution is not None:
            state = state.replace(window=digest("window", _seed(execution), state.system_prompt)[:12])
        opened, base = Restored(state), (0, 0)
    # Two windows that one node edits have different placement ids.
    seed = digest("edits", _seed(execution), opened.state.window) if execution is not None else None
    session = Session.restore(engine, opened.state, eviction=eviction, retrieval=retrieval, seed=seed)
    extras: Mapping[str, Any] = reference or {}
    session.core.vision_encodes, session.core.parent = extras.get("encodes", 0), extras.get("parent")
    session._start(runtime, execution, base, extras.get("notes", {}), extras.get("manifest", ""))
    for watcher in (getattr(runtime.context, "ledger", None), getattr(runtime.context, "observer", None)):
        if watcher is not None and hasattr(watcher, "watch"):
            watcher.watch(session)
        elif watcher is not None:
            session.observe(watcher)
    session.observe(session._observe)
    session.report_dropped(extras.get("dropped", ()))
    session.report_losses(opened)
    return session


class AsyncSession(AsyncWindow):
    """A `Session` for async nodes, whose methods are awaited; create it with `aopen_window`. Attributes are the session's."""

    lost = Attribute[int]()
    rebuilt = Attribute[int]()
    dropped = Attribute[tuple[Mapping[str, Any], ...]]()
    notes = Attribute[dict[str, Any]]()
    ref = to_async(Session.ref)

    async def adopt(self, branch: AsyncWindow | Mapping[str, Any], *, force: bool = False) -> None:
        """`Session.adopt`."""
        await self._call("adopt", branch, force=force)

    async def gather(self, branches: Iterable[AsyncWindow | Mapping[str, Any]]) -> list[str]:
        """`Session.gather`."""
        windows = [branch.window if isinstance(branch, AsyncWindow) else branch for branch in branches]
        ids: list[str] = await self._call("gather", windows)
        return ids


def _async_opener(make: Callable[P, Session]) -> Callable[P, AsyncSession]:
    @wraps(make)
    def open(*args: P.args, **options: P.kwargs) -> AsyncSession:
        return AsyncSession.opening(make, *args, **options)

    return open


aopen_window = _async_opener(open_window)
"""`open_window` for async nodes: opens when it is awaited or entered. A run that is cancelled stops the answer.

Example::

    async def look(state: State, runtime: Runtime[WindowContext]) -> dict:
        async with aopen_window(state.get("window"), runtime, system_prompt="You watch a camera.") as window:
            await window.append(await window.run(Chunk.image, state["frame"]))
            answer = await window.ask("What moved?")
            return {"answer": answer.text, "window": await window.ref()}
"""


def _seed(execution: Execution) -> str:
    """Return the seed of all generated ids in a session: of placements, new windows and forks."""
    return digest("session", *execution)


def _with_options(
    engine: Engine, state: State, system_prompt: str | None, budget: int | None, fidelity: Fidelity | None
) -> State:
    """Return ``state`` with the budget and the fidelity that a node requests."""
    if system_prompt is not None and system_prompt != state.system_prompt:
        raise ValueError(
            f"system_prompt must be that of window {state.window}, {state.system_prompt[:80]!r}, "
            f"got {system_prompt[:80]!r}; omit it, or fork(system_prompt=...) the window"
        )
    if budget is None and fidelity is None:
        return state
    if budget is None:  # the window may come from an engine with a larger limit
        budget = min(state.budget, engine.spec.max_tokens)
    with Window(engine, state.system_prompt, budget, fidelity or state.fidelity) as validated:  # checks both
        return state.replace(budget=validated.budget, fidelity=validated.snapshot().fidelity)


def describe_event(event: Event, key: str | None) -> dict[str, Any]:
    """Convert ``event`` to JSON for a run's custom stream, about 300 bytes.

    ``type`` is ``"window"``. ``key`` names the event: a node that runs again gives the same event the same key.
    An ask adds ``query``, ``answer``, ``lanes`` (tokens by lane) and its cost; if its ``note`` is ``"again"``, the answer
    comes from an earlier execution and nothing was computed.
    """
    state = event.state
    message: dict[str, Any] = {"type": "window", "op": event.op, "window": event.window, "version": event.version}
    message |= {"ids": list(event.ids), "tokens": state.tokens, "budget": state.budget}
    message |= {"placed": len(state.placed), "evicted": len(state.evicted)}
    if key is not None:
        message["key"] = key
    for name in ("parent", "other", "note"):
        if value := getattr(event, name):
            message[name] = value[:_MAX_TEXT]
    if event.query is not None:
        message["query"] = event.query[:_MAX_TEXT]
    if event.answer is not None:
        usage, computed = event.answer.usage, event.note != "again"
        message |= {
            "answer": event.answer.text[:_MAX_TEXT],
            "lanes": dict(usage.reused_tokens),
            "prompt_tokens": usage.prompt_tokens,
            "computed_tokens": usage.computed_tokens if computed else 0,
            "vision_encodes": usage.vision_encodes if computed else 0,
            "exact": usage.exact,
            "seconds": round(event.seconds, 6),
        }
    return message
