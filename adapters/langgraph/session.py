"""`open_window`: a window inside a LangGraph node, which may run again at any time.

LangGraph runs a node again from its top after an interrupt, a failure or a step back in time, without saying so. A session
therefore starts from the immutable version in the state, gives the node's edits the same placement ids as before, and takes
the answers that were already computed from the engine's store.
"""

from __future__ import annotations

import contextvars
import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ctxwin.adapters.langgraph.reference import (
    Restored,
    forget,
    manifest_of,
    read_manifest,
    restore,
    save,
    write_manifest,
)
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.hashing import digest
from ctxwin.policies.base import Eviction, Retrieval
from ctxwin.serve import wire
from ctxwin.window.answer import Answer
from ctxwin.window.ask import OnToken, Question, never
from ctxwin.window.core import WindowCore, restored
from ctxwin.window.events import Event, Observer
from ctxwin.window.state import State
from ctxwin.window.window import Window

if TYPE_CHECKING:
    from langgraph.runtime import Runtime

_LONGEST = 400  # characters of a query, an answer or a note


class Watcher(Protocol):
    """Whatever wants to see every window, like `ctxwin.baselines.ledger.Ledger` and `ctxwin.view.trace.Trace`."""

    def watch(self, window: Window) -> None:
        """Called once with each window that a node opens."""


@dataclass
class WindowContext:
    """``context_schema`` of a graph with windows; or give your own context these attributes, the engine at least.

    Attributes:
        engine: from `ctxwin.open_engine`; shared by all windows of all runs. Never in the state.
        ledger: counts every window that a node opens, e.g. `ctxwin.baselines.ledger.Ledger`.
        observer: sees them as well: a callable as for `Window.observe`, or a `Watcher` like `ctxwin.view.trace.Trace`.
    """

    engine: Engine
    ledger: Watcher | None = None
    observer: Observer | Watcher | None = None


def engine_of(context: Any) -> Engine:
    """The engine in a run's context; TypeError with the remedy where there is none."""
    engine = getattr(context, "engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"the run's context must have an engine, got {type(context).__name__}; build the graph with "
            "StateGraph(State, context_schema=WindowContext) and run it with context=WindowContext(engine)"
        )
    return engine


Execution = tuple[str, str, str]
"""Ids of the checkpoint and the task, the same whenever the node runs again behind it (resume, retry, replay), and a name that
tells the sessions of one node apart."""


class Session(Window):
    """A `Window` for one execution of a node; make one with `open_window`, and use it as a context manager.

    When the node runs again behind the same checkpoint, the same edits give the same placement ids, and answers come from
    the engine's store. Everything else (`disposable`, `refresh`, `compress`, `prepare_orbit`) is computed again.

    Attributes:
        lost: evicted chunks that the store no longer knows; they cannot be recalled.
        rebuilt: placed chunks whose KV bookkeeping was lost; they are computed again from their sources.
        dropped: references that nodes parallel to the last writer had written, whose edits are not in this window; see
            `gather`.
        notes: small plain JSON that a node wants to keep with the window; it travels in the reference.
    """

    def __init__(
        self,
        core: WindowCore,
        runtime: Runtime[Any],
        execution: Execution | None,
        base: tuple[int, int],
        notes: Mapping[str, Any],
        eviction: Eviction | None,
        retrieval: Retrieval | None,
    ) -> None:
        self._bind(core, eviction, retrieval)
        self.lost = self.rebuilt = self._events = 0
        self.dropped: tuple[Mapping[str, Any], ...] = ()
        self._began = ""  # the manifest that it opened
        self.notes: dict[str, Any] = copy.deepcopy(dict(notes))
        self._noted = copy.deepcopy(self.notes)  # `ref` counts a change of them
        self._runtime, self._execution = runtime, execution
        self._base = base  # operations and adoptions before this session
        self._last_ask: Event | None = None
        self._run_context = contextvars.copy_context()  # the stream writer looks for the run's config there
        core.heartbeat = runtime.heartbeat

    def ref(self, *, adopt: bool = False) -> dict[str, Any]:
        """The reference of this version, for the graph's state: plain JSON.

        Args:
            adopt: `merge_windows` prefers it to what parallel branches write, and to newer versions.

        Cost: a few KB of writes to the engine's store.
        """
        operations, adopted = self._base
        operations += self.core.operations + (self.notes != self._noted)  # the reducer must see that something was done
        ranks: Any = {"operations": operations, "adopted": adopted + adopt}
        written = (*self._execution[:2], self._began) if self._execution else ()
        return save(self, **ranks, parent=self.core.parent, notes=self.notes, written=written)

    def answer(
        self, question: Question, *, on_token: OnToken | None = None, stopped: Callable[[], bool] = never
    ) -> Answer:
        """`Window.answer`; what this execution has answered before is not computed again (``on_token`` gets it whole)."""
        if self._execution is None or callable(question.remember):
            return super().answer(question, on_token=on_token, stopped=stopped)
        state = self.snapshot().replace(fidelity=self.fidelity)  # ``auto`` may be resolved otherwise next time
        sampling = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(question.sampling).items()}
        asks = [question.query, bool(question.remember), list(question.stop), sampling]
        if question.tools or question.libraries or question.n > 1:
            versions = [(library.name, library.view().version) for library in question.libraries]
            asks += [json.dumps(question.tools), versions, question.n]
        version = manifest_of(self.engine.repo, state)[0]
        key = "journal/" + digest("ask", _seed(self._execution), self.core.operations, version, asks)
        found = self._kept(key)
        if found is not None:
            return self._again(*found, question, on_token)
        answer = super().answer(question, on_token=on_token, stopped=stopped)
        asked, self._last_ask = self._last_ask, None
        settled = state.version + (answer.remembered is not None)
        if asked and asked.answer is answer and asked.version == settled:  # others may have edited since
            manifest = write_manifest(self.engine.repo, asked.state)
            self.engine.repo.put_json(key, {"answer": wire.answer_to(answer), "manifest": manifest})
        return answer

    def _kept(self, key: str) -> tuple[Answer, State] | None:
        """An answer of an earlier execution and the state it left; None where either cannot be had in full."""
        record = self.engine.repo.get_json(key)
        found = read_manifest(self.engine.repo, record["manifest"]) if record is not None else None
        if found is None or found[1] or found[2]:
            return None
        with suppress(KeyError, TypeError, ValueError):  # of a version that wrote other fields: a miss
            return wire.answer_from(record["answer"]), found[0]
        return None

    def _again(self, answer: Answer, state: State, question: Question, on_token: OnToken | None) -> Answer:
        """An answer from the journal, with its effects on the window."""
        with self.core.writing(edit=bool(question.remember)):
            self.core.commit(state)
        if on_token is not None and answer.token_ids:
            on_token(answer.token_ids[-1], answer.text)
        ids = (answer.remembered,) if answer.remembered else ()
        # Only the run's stream is told, as the engine was not asked.
        self.tell(self.core.event("ask", ids, query=question.query, answer=answer, note="again"))
        return answer

    def fork(self, system_prompt: str | None = None) -> Session:
        """`Window.fork` as a session: its ids are the same when the node runs again; `ref` gives its own reference."""
        core = self.core.fork(system_prompt)
        execution = self._execution and (*self._execution[:2], core.id)
        base = (self._base[0] + self.core.operations, self._base[1])
        branch = Session(core, self._runtime, execution, base, self.notes, self.eviction, self.retrieval)
        core.observers = (*(o for o in core.observers if o != self.tell), branch.tell)
        return branch

    def adopt(self, branch: Window | Mapping[str, Any], *, force: bool = False) -> None:
        """`Window.adopt`, also of a branch's reference, as another node left it: its state becomes this window's.

        A reference must come from a fork of this window (else ValueError, unless ``force``). This window may have moved since:
        the node that joins branches decides.
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
        self.report_losses(found)
        with Window.restore(self.engine, found.state) as theirs:
            super().adopt(theirs, force=True)
        self.notes = copy.deepcopy(branch.get("notes", {}))

    def gather(self, branches: Iterable[Window | Mapping[str, Any]]) -> list[str]:
        """Places the chunks that branches of this window (or their references) have placed and it never had, behind everything,
        branch by branch; returns their ids here. Raises like `Window.extend`. Cost: as for new chunks, but no encode."""
        state = self.snapshot()
        known, new = {p.id for p in (*state.placed, *state.evicted)}, []
        for branch in branches:
            theirs = branch.snapshot() if isinstance(branch, Window) else restore(self.engine.repo, branch).state
            new += [p.chunk for p in theirs.placed if p.id not in known]
            known |= {p.id for p in theirs.placed}
        return self.extend(new)

    def tell(self, event: Event) -> None:
        """Writes an operation to the run's custom stream."""
        if event.op == "forget":
            for placement in event.ids:
                forget(self.engine.repo, placement)
        if event.op == "ask" and event.window == self.id:
            self._last_ask = event
        if event.op != "close":  # every node closes its sessions
            self._events += 1  # one operation may send several
            key = ":".join(filter(None, [*self._execution, str(self._events)])) if self._execution else None
            self._write(describe_event(event, key))

    def report_losses(self, found: Restored) -> None:
        """Counts what the store has lost of a restored window, and writes it to the run's custom stream."""
        self.lost += found.lost
        self.rebuilt += found.rebuilt
        if found.lost or found.rebuilt:
            about = {"type": "window", "op": "lost", "window": found.state.window, "version": found.state.version}
            self._write({**about, "lost": found.lost, "rebuilt": found.rebuilt})

    def report_dropped(self, dropped: Sequence[Mapping[str, Any]]) -> None:
        """Keeps what parallel writers had written, and writes that to the run's custom stream."""
        self.dropped = tuple(dropped)
        if dropped:
            versions = [other["version"] for other in dropped]
            about = {"type": "window", "op": "dropped", "window": self.id, "version": self.version}
            self._write({**about, "versions": versions})

    def _write(self, payload: dict[str, Any]) -> None:
        # A context can be entered once at a time, and answers come from other threads.
        self._run_context.copy().run(self._runtime.stream_writer, payload)


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
        reference: what a node returned as ``session.ref()``, from the state; None (or the empty dict that LangGraph starts a
            key with) opens a new window.
        runtime: LangGraph's, as injected into the node; its context holds the engine (`WindowContext`).
        system_prompt: of a new window. One that exists keeps its own (ValueError for another).
        budget, fidelity: as for `Window`; a window that exists keeps its own where they are left out.
        eviction, retrieval: policies, which are not part of a reference.
        name: tells the sessions apart where a node opens the same version twice.

    Every operation is written to the run's custom stream (``stream_mode="custom"``) and sends a heartbeat, as does every
    token of an answer; an ``idle_timeout`` must be longer than the longest prefill. In an async node use `Session.aask` and
    `Session.astream`: the others block the event loop.

    Raises TypeError where the context has no engine, ValueError for what is not a reference.
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
    execution = (info.checkpoint_id, info.task_id, name) if info is not None else None
    if reference:
        found = restore(engine.repo, reference)
        state = _opened_as(engine, found.state, system_prompt, budget, fidelity)
        base = (reference["operations"] + (state != found.state), reference["adopted"])
        found = replace(found, state=state)
    else:
        with Window(engine, system_prompt or "", budget, fidelity) as fresh:
            state = fresh.snapshot()
        if execution is not None:
            state = state.replace(window=digest("window", _seed(execution), state.system_prompt)[:12])
        found, base = Restored(state), (0, 0)
    # Of two windows that one node edits, neither has the other's placement ids.
    seed = digest("edits", _seed(execution), found.state.window) if execution is not None else None
    core = restored(engine, found.state, seed)
    beside: Mapping[str, Any] = reference or {}
    core.vision_encodes, core.parent = beside.get("encodes", 0), beside.get("parent")
    session = Session(core, runtime, execution, base, beside.get("notes", {}), eviction, retrieval)
    for watcher in (getattr(runtime.context, "ledger", None), getattr(runtime.context, "observer", None)):
        if watcher is not None and hasattr(watcher, "watch"):
            watcher.watch(session)
        elif watcher is not None:
            session.observe(watcher)
    session.observe(session.tell)
    session._began = beside.get("manifest", "")
    session.report_dropped(beside.get("dropped", ()))
    session.report_losses(found)
    return session


def _seed(execution: Execution) -> str:
    """Seed of everything random in a session: placement ids, ids of new windows and forks."""
    return digest("session", *execution)


def _opened_as(
    engine: Engine, state: State, system_prompt: str | None, budget: int | None, fidelity: Fidelity | None
) -> State:
    """``state`` with the budget and the fidelity that a node asks for."""
    if system_prompt is not None and system_prompt != state.system_prompt:
        raise ValueError(
            f"system_prompt must be that of window {state.window}, {state.system_prompt[:80]!r}, "
            f"got {system_prompt[:80]!r}; leave it out, or fork(system_prompt=...) the window"
        )
    if budget is None and fidelity is None:
        return state
    if budget is None:  # one that comes from a larger engine gets what this one takes
        budget = min(state.budget, engine.spec.max_tokens)
    with Window(engine, state.system_prompt, budget, fidelity or state.fidelity) as like:  # checks both
        return state.replace(budget=like.budget, fidelity=like.snapshot().fidelity)


def describe_event(event: Event, key: str | None) -> dict[str, Any]:
    """``event`` as JSON for a run's custom stream, about 300 bytes.

    ``type`` is ``"window"``. ``key`` names the event: a node that runs again gives the same event the same key.
    An ask adds ``query``, ``answer``, ``lanes`` (tokens by lane) and its cost; where its ``note`` is ``"again"``, the answer
    was kept from an earlier execution and nothing was computed now.
    """
    state = event.state
    told: dict[str, Any] = {"type": "window", "op": event.op, "window": event.window, "version": event.version}
    told |= {"ids": list(event.ids), "tokens": state.tokens, "budget": state.budget}
    told |= {"placed": len(state.placed), "evicted": len(state.evicted)}
    if key is not None:
        told["key"] = key
    for name in ("parent", "other", "note"):
        if value := getattr(event, name):
            told[name] = value[:_LONGEST]
    if event.query is not None:
        told["query"] = event.query[:_LONGEST]
    if event.answer is not None:
        usage, now = event.answer.usage, event.note != "again"
        told |= {
            "answer": event.answer.text[:_LONGEST],
            "lanes": dict(usage.reused_tokens),
            "prompt_tokens": usage.prompt_tokens,
            "computed_tokens": usage.computed_tokens if now else 0,
            "vision_encodes": usage.vision_encodes if now else 0,
            "exact": usage.exact,
            "seconds": round(event.seconds, 6),
        }
    return told
