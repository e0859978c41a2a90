"""`Window`: a deque of position-free chunks between an agent loop and an engine.

Every edit makes a new immutable version of the window's `State`; nothing is computed until an answer is asked for.
This module holds edits and questions, `ctxwin.window.reader` the attributes. `ctxwin.window.lanes` decides how each chunk's
KV reaches its place, `ctxwin.window.assembly` fetches and stores it, and `ctxwin.window.ask` runs questions. Neither torch nor
vLLM is imported here.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, Self, Unpack

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import UnsupportedModel
from ctxwin.fidelity import Fidelity
from ctxwin.store import parse_bytes
from ctxwin.validation import as_list, check_flags, check_integer
from ctxwin.window import edits, placements
from ctxwin.window.answer import Answer, Disposability, amend
from ctxwin.window.ask import AskOptions, OnToken, Question, ask, disposable, exchange, not_stopped, split_choices
from ctxwin.window.core import WindowCore, new_id, restore_core
from ctxwin.window.defaults import ById, LeastRecentlyRead, check_searchable
from ctxwin.window.protocols import Eviction, Placement, Retrieval, Searchable
from ctxwin.window.reader import WindowReader
from ctxwin.window.removed import is_removed
from ctxwin.window.sliding import mark_tokens
from ctxwin.window.state import Placed, State
from ctxwin.window.stream import AsyncTokenStream, TokenStream, aask
from ctxwin.window.tools import ToolBranch


class Window(WindowReader):
    """A context window whose edits are cache edits.

    Args:
        engine: from `open_engine`; may be shared by any number of windows.
        system_prompt: system prompt, fixed for the life of the window (`fork` makes one behind another system prompt).
        budget: most tokens of system prompt, chunks, query and answer together; default: what the engine takes.
        fidelity: which approximations are allowed; ``auto`` follows the model's profile and is ``exact`` without one.
        budget_bytes: the same as KV bytes (an int, or ``"512MB"``); the smaller budget counts.
        low_water: what the window falls to at once when it is over its budget: tokens, or a float for a share of the budget.
            In an exact window the prefix then stands still for many appends (`ctxwin.policies.sliding_cost`). ``"auto"``: in an
            exact window the cheapest mark with which asks see three quarters of what fits, by the sizes of its chunks
            (`ctxwin.policies.best_low_water`), none in others. None: to the budget, one by one.
        prefill: ``"idle"``: after each edit the exact KV that the next ask would compute is computed ahead of it, by a thread,
            while the engine is idle, and given up when a request waits. Of an exact window that is about to slide, it is the KV
            of the chunks that are expected to stay. `Usage`, `plan` and `Maintenance.prefill_counts` count what it
            served and missed.
        eviction: what leaves first when `slide` or `look_back` makes room (`ctxwin.policies`); default: the oldest, where
            a chunk that came back counts as new.
        retrieval: what `look_back` brings back.

    Raises:
        BudgetExceeded: the system prompt alone does not fit.

    A window has one writer: a second thread that edits or asks meanwhile gets WindowBusy. Use as a context manager, or
    call `close` to give its leases back.
    """

    def __init__(
        self,
        engine: Engine,
        system_prompt: str = "",
        budget: int | None = None,
        fidelity: Fidelity | None = None,
        *,
        budget_bytes: int | str | None = None,
        low_water: float | Literal["auto"] | None = None,
        prefill: Literal["idle"] | None = None,
        eviction: Eviction | None = None,
        retrieval: Retrieval | None = None,
    ) -> None:
        if not hasattr(engine, "spec"):
            raise TypeError(f"engine must be one that open_engine returns, got {engine!r}"[:200])
        if not isinstance(fidelity, Fidelity | None):
            raise TypeError(f"fidelity must be a Fidelity, such as Fidelity('exact'), got {fidelity!r}"[:200])
        limit = engine.spec.max_tokens
        budget = limit if budget is None else budget
        check_integer("budget", budget, 1, limit, " (what the engine takes)")
        if budget_bytes is not None:
            budget = min(budget, parse_bytes(budget_bytes) // engine.spec.kv.token_bytes)
        state = placements.initial_state(engine, system_prompt, budget, fidelity or Fidelity())
        if low_water is not None:
            state = state.replace(low_water="auto" if low_water == "auto" else mark_tokens(low_water, budget))
        if prefill not in (None, "idle"):
            raise ValueError(f"prefill must be 'idle' or None, got {prefill!r}")
        state = state.replace(prefill=prefill)
        self._bind(WindowCore(engine, state.replace(window=new_id(engine, uuid.uuid4().hex))), eviction, retrieval)

    @classmethod
    def from_core(cls, core: WindowCore, eviction: Eviction | None = None, retrieval: Retrieval | None = None) -> Self:
        """A window, of the class it is called on, over a core that exists: a branch's, an old version's or a restored one's."""
        window = cls.__new__(cls)
        window._bind(core, eviction, retrieval)
        return window

    def _bind(self, core: WindowCore, eviction: Eviction | None, retrieval: Retrieval | None) -> None:
        self.core = core
        self.eviction = eviction or LeastRecentlyRead()
        self.retrieval = retrieval or ById()
        self._tool_branch = ToolBranch()

    def at(self, version: int) -> Window:
        """A read-only window on an old version (the newest 1,024 are kept); it can ask, plan, fork and snapshot.

        Fewer are kept where each has many chunks that the next one changed, but always 16. Every edit makes one version; `adopt`
        may skip some, which are read as the one before. Raises UnknownVersion.
        """
        return Window.from_core(self.core.at(version), self.eviction, self.retrieval)

    def undo(self) -> None:
        """Take back the last edit that is not taken back yet, as a new version; an answer is no edit.

        Raises UnknownVersion where the version before is not kept (of the newest 1,024; `evict(forget=True)` drops them all).
        Cost: none; what was computed since is found in the store.
        """
        self.core.undo()

    def close(self) -> None:
        """Release its leases; the window cannot be edited or asked afterwards. Idempotent."""
        self._tool_branch.close()
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def append(self, chunk: Chunk) -> str:
        """Place ``chunk`` at the end; return its placement id.

        Cost: tokenising, and one run of the vision tower for new media. May go over the budget (`slide` mends that) unless
        the chunk alone does. Raises BudgetExceeded, BadMedia, ChunkUnavailable, UnsupportedModel and changes nothing then.
        """
        with self.core.writing() as state:
            entry = self.core.place(state, chunk)
            self.core.commit(edits.append(state, entry), "append", [entry.id])
        return entry.id

    def extend(self, chunks: Iterable[Chunk]) -> list[str]:
        """Append several chunks, all or none; return their placement ids."""
        chunks = as_list("chunks", chunks, "a Chunk")
        with self.core.writing() as state:
            ids = []
            for chunk in chunks:
                entry = self.core.place(state, chunk)
                state = edits.append(state, entry)
                ids.append(entry.id)
            if ids:
                self.core.commit(state, "append", ids)  # one version, however many
        return ids

    def insert(self, index: int, chunk: Chunk, *, lazy: bool = False) -> str:
        """Place ``chunk`` at ``index``; later chunks keep their KV, as after `recall`. Raises like `append`.

        Args:
            lazy: stands at the end until the prefix breaks at ``index`` or in front of it, then goes before what is there now.
        """
        check_flags(lazy=lazy)
        with self.core.writing() as state:
            index = edits.normalize_index(index, len(state.placed))
            entry = self.core.place(state, chunk)
            if lazy and index < len(state.placed):
                entry = entry.replace(pending={"insert": state.placed[index].id})
                new = edits.append(state, entry)
            else:
                new = edits.insert(state, entry, index).edited(arrivals=state.arrivals + 1)
            self.core.commit(new, "append" if entry.pending else "insert", [entry.id])
        return entry.id

    def evict(self, placement: str, *, forget: bool = False, lazy: bool = False) -> None:
        """Take a chunk out; `recall` brings it back. Chunks behind it survive: their KV is rotated into place.

        Args:
            forget: (of an evicted chunk, too) also everything it left behind goes: chunks that absorbed it, directly or
                through others, are computed again at the next ask, its stored KV, embeddings and source are deleted, and
                it cannot be recalled. Other open windows that hold the same content, placed or evicted, keep its media
                and what they serve now; other processes find them gone.
            lazy: the chunk is still shown until an edit breaks the prefix there or in front of it (`slide`, an edit without
                ``lazy`` that is no `toggle`), and leaves with it: in an exact window all chunks behind a break are computed
                again, so that many edits cost one. Where room is made it leaves first, unless a fall to an exact window's mark
                computes less for each token that it frees. `recall` before that, or `undo`, lets it stay. `Window.pending`
                names such chunks, `Maintenance.apply_pending` applies their edits now.

        Raises UnknownChunk, ValueError for ``forget`` with ``lazy``. Cost: none now; with ``forget`` a read of each stored span
        and patch, and a forward over each chunk concerned at the next ask.
        """
        check_flags(forget=forget, lazy=lazy)
        if forget and lazy:
            raise ValueError("forget must be False with lazy=True, got True: what is forgotten must not be shown again")
        with self.core.writing() as state:
            if lazy:
                self.core.commit(edits.add_pending(state, placement, "evict"))
            elif forget:
                entry = state.find(placement)
                self._tool_branch.close()  # its chunks absorbed this one, too
                self.core.forget(edits.forget(state, entry), entry)
            else:
                self.core.commit(edits.evict(state, [state.placed[state.index(placement)]]), "evict", [placement])

    def slide(self, count: int | None = None, *, reserve_tokens: int = 0, to: float | None = None) -> list[str]:
        """Evict unpinned chunks in the order of `eviction`: ``count``, or until within the budget.

        By default the oldest leave first, and what was recalled last; what `look_back` placed at the end of an exact window goes
        before. ``reserve_tokens`` tokens are left free for a query and its answer. A window with a low-water mark does nothing
        while it is within the budget, and falls to the mark else. Returns the evicted ids. Raises BudgetExceeded where what is
        pinned alone exceeds the budget (or ``to``), ValueError where fewer than ``count`` can leave: nothing changes then.

        Args:
            to: falls to so many tokens (a float: to that share of the budget) now, within the budget or not.
        """
        if count is not None:
            check_integer("count", count, 0)
        if count is not None and to is not None:
            raise ValueError(f"slide must have a count or to, got {count!r} and {to!r}; leave one out")
        with self.core.writing() as state:
            soon, tail = edits.pending_evictions(state), self.core.free_tail(state)
            if to is not None:
                mark = mark_tokens(to, self.budget, "to")
                self._note_room(reserve_tokens, mark)
                smaller = state.replace(budget=mark, low_water=None)
                leaving = edits.leaving_for_budget(smaller, self.eviction.order(self), reserve_tokens, tail=tail)
            elif count is None:
                leaving = self._choose_leaving(state, reserve_tokens)
            else:
                leaving = tail[:count]
                others = edits.free_in_order(state, self.eviction.order(self), [p.id for p in (*leaving, *soon)])
                leaving += islice(others, count - len(leaving))
                if count > len(leaving):
                    raise ValueError(f"count must be at most the {len(leaving)} unpinned chunks, got {count}")
            if leaving:
                self.core.commit(edits.evict(state, leaving), "slide", [p.id for p in leaving])
                if to is None and self.low_water is None and leaving[-1] not in tail:
                    self.core.note_slide(len(leaving))
        return [p.id for p in leaving]

    def recall(
        self, placement: str, at: int | Literal["chronological", "cheapest"] | None = None, *, repair: bool = False
    ) -> int:
        """Bring an evicted chunk back, one of the newest 4,096 (fewer behind `maintenance.forget_beyond`); return its index. It
        may take the window over its budget: `slide` then spares what was just recalled, and `look_back` recalls and makes
        room in one step.

        Args:
            at: index to place it at; ``"chronological"``: before the first chunk that arrived later; ``"cheapest"``: there, at
                the end or at the front, whichever makes the next `ask` compute least. Default: where `eviction` says
                (`ctxwin.policies.Placement`), else the chronological place; in an exact window with a low-water mark
                the end, in front of the question, if less is computed then: all in front keeps its KV.
            repair: re-form the chunks behind it whose KV lacks it: those conditioned without it, and those that absorbed one
                of them (a forward each at the next ask, unless stored KV or a patch fits). What absorbed it before it left keeps
                its KV. Without ``repair`` all keep theirs; `plan` shows and prices both.

        Raises UnknownChunk. Cost at the next ask: its lane's, never a vision encode.
        """
        check_flags(repair=repair)
        with self.core.writing() as state:
            waiting = state.placed.place_of(placement)
            if at is None and waiting is not None and "evict" in state.placed[waiting].pending:
                self.core.commit(edits.drop_pending(state, placement, "evict"))
                return waiting
            back = self.core.evicted_entry(state, placement)
            if at is None:
                at = self._place([back])
                if at is None and self._mark(state) is not None:
                    at = self.core.default_index(state, back, repair=repair)
            elif at == "cheapest":
                at = self.core.cheapest_index(state, back, repair=repair)
            elif isinstance(at, str) and at != "chronological":
                raise ValueError(f"at must be an index, 'chronological' or 'cheapest', got {at!r}")
            new, at = edits.recall(state, back, None if at == "chronological" else at, repair=repair)
            if repair:
                self.core.assembly.memo.clear()
            self.core.commit(new, "recall", [placement])
        return at

    def _place(self, backs: Sequence[Placed]) -> int | None:
        """Return the policy's index for chunks that come back; None: at chronological places."""
        return self.eviction.place(self, backs) if backs and isinstance(self.eviction, Placement) else None

    def _note_room(self, reserve_tokens: int, mark: int | None) -> None:
        """Tell the work ahead of the next ask how this window makes room; what is predicted follows from it."""
        if self.core.idle is not None:
            self.core.idle.predictor.note_room(reserve_tokens, mark)

    def _choose_leaving(
        self, state: State, reserve_tokens: int, stay: Collection[str] = (), last: Collection[str] = ()
    ) -> list[Placed]:
        mark = self._mark(state, reserve_tokens)
        self._note_room(reserve_tokens, mark)
        order, tail, exact = self.eviction.order(self), self.core.free_tail(state), self.fidelity.mode == "exact"
        if last:
            order, tail = sorted(order, key=last.__contains__), [p for p in tail if p.id not in last]
        return edits.leaving_for_budget(state, order, reserve_tokens, stay=stay, mark=mark, tail=tail, exact=exact)

    def look_back(self, query: str | Chunk, *, reserve_tokens: int = 0) -> list[str]:
        """Recall what `retrieval` picks for ``query``, each where a `recall` would put it; return the ids.

        In an exact window they go to the end, in front of the question, unless `eviction` says where: all in front keeps its
        KV. From there they leave first, and alone where that is enough, as long as no answer has read what was placed behind.
        Others leave in the order of `eviction`, and last what ``query`` names in view, where the budget, with ``reserve_tokens``
        tokens free, needs it, also where nothing comes back. All or nothing.
        Raises BudgetExceeded where they do not fit, UnknownChunk, ChunkUnavailable. Cost: the policies', then see `recall`.
        """
        if not isinstance(query, str | Chunk):
            raise TypeError(f"query must be a str or a Chunk, got {type(query).__name__}")
        check_integer("reserve_tokens", reserve_tokens, 0)
        with self.core.writing() as state:
            with self.core.counting_encodes():
                named = dict.fromkeys(self.retrieval.choose(self, query))
                ids = [i for i in named if not is_removed(state.find(i).chunk)]
            backs = [self.core.evicted_entry(state, i) for i in ids]
            at, exact = self._place(backs), self.fidelity.mode == "exact"
            tail = exact and at in (None, len(state.placed))
            new = edits.look_back(state, backs, len(state.placed) if tail else at, tail=tail)
            if ids or reserve_tokens:
                others = set(re.findall(r"\d+-[0-9a-f]{6}", query)) - {*ids} if isinstance(query, str) else None
                here = [p.id for p in state.placed.having(others)] if others else ()
                leaving = self._choose_leaving(new, reserve_tokens, ids, here)
                out = [p.id for p in leaving]
                if ids or out:
                    new = edits.evict(new, leaving) if out else new
                    self.core.commit(new, "look_back" if ids else "slide", ids or out)
        return ids

    def retrieve(
        self, query: str | Chunk | Sequence[str], library: Searchable, k: int = 4, *, reserve_tokens: int = 0
    ) -> list[str]:
        """Place the ``k`` passages that ``library`` finds for ``query`` behind everything, best first; return their ids.

        A list of names of files as ``query`` places all their passages, in the list's order, whatever ``k`` is. What is placed
        already stays where it is, and what had left comes back under its id. Others leave in the order of `eviction` where the
        budget, with ``reserve_tokens`` tokens free, needs it. All or nothing. A window goes on reading the version of a library
        that it read first, whatever is replaced there meanwhile, unless that had no files yet. Raises BudgetExceeded where they
        do not fit, UnknownVersion where that version is kept no more, UnknownFile, ChunkUnavailable. Cost: the search, and no
        vision encode of what was prepared (`Library.prepare`).
        """
        check_searchable("library", library)
        with self.core.writing() as state:
            view = library.view(state.libraries.get(library.name) or None)
            with self.core.counting_encodes():
                if isinstance(query, str | Chunk):
                    matches = view.find(query, k, self.engine)
                elif take := getattr(view, "take", None):
                    matches = take(as_list("query", query, "a file's name"), self.engine)
                else:
                    raise TypeError(f"query must be a str or a Chunk for {type(library).__name__}, got {query!r:.80}")
            new = state
            ids: dict[str, None] = {}
            for chunk in matches:
                here = next((p.id for p in new.placed if p.chunk_id == chunk.id), None)
                if here is None:
                    back = next((p for p in reversed(new.evicted) if p.chunk_id == chunk.id), None)
                    entry = self.core.place(new, chunk)
                    new = edits.recall(new, back, len(new.placed))[0] if back else edits.append(new, entry)
                elif "evict" in new.placed[new.index(here)].pending:
                    new = edits.drop_pending(new, here, "evict")
                ids[here or new.placed[-1].id] = None
            new = new.edited(libraries={**state.libraries, library.name: view.version})
            if ids and (leaving := self._choose_leaving(new, reserve_tokens, ids)):
                new = edits.evict(new, leaving)
            self.core.commit(new, "append", list(ids), note=f"library {library.name}")
        return list(ids)

    def reorder(self, ids: Iterable[str]) -> None:
        """Put the placed chunks into the order ``ids``, a permutation of the placed ids (else ValueError)."""
        with self.core.writing() as state:
            order = as_list("ids", ids, "a placed id")
            if sorted(order, key=str) != sorted(self.ids):
                raise ValueError(f"ids must be a permutation of the placed ids {sorted(self.ids)}, got {order}")
            if tuple(order) != self.ids:
                self.core.commit(edits.reorder(state, order), "reorder", order)

    def toggle(self, placement: str, *, conditioned: bool, lazy: bool = False) -> None:
        """Switch a chunk to its context-clean view (``conditioned=False``) or back to the same lane and bytes.

        Kamera, appendix E. ``lazy``: see `evict`. Raises UnknownChunk, UnsupportedModel on a model with
        recurrent layers. Cost at the next ask: one forward where the canonical is not held.
        """
        check_flags(conditioned=conditioned, lazy=lazy)
        kv = self.engine.spec.kv
        if kv.recurrent and not kv.maps and not conditioned:
            raise UnsupportedModel(
                "a recurrent layer has no view without its context, got conditioned=False; open it with position_free=True"
            )
        with self.core.writing() as state:
            entry = state.placed[state.index(placement)]
            if "toggle" in entry.pending:
                state = edits.drop_pending(state, placement, "toggle")
            if entry.conditioned == conditioned or lazy:
                new = state if entry.conditioned == conditioned else edits.add_pending(state, placement, "toggle")
                if new is not self.core.state:
                    self.core.commit(new)
            else:
                new = edits.update_entry(state, placement, conditioned=conditioned)
                self.core.commit(new, "toggle", [placement], note="conditioned" if conditioned else "clean")

    def pin(self, placement: str, *, pinned: bool = True) -> None:
        """Protect a chunk from `slide`, or lift that protection. Raises UnknownChunk."""
        check_flags(pinned=pinned)
        with self.core.writing() as state:
            note = "pinned" if pinned else "free"
            self.core.commit(edits.update_entry(state, placement, pinned=pinned), "pin", [placement], note=note)

    def fork(self, system_prompt: str | None = None) -> Self:
        """A copy-on-write branch: it shares every chunk and costs no KV bytes until it is edited.

        ``system_prompt`` opens it behind another system prompt; its chunks are then conditioned anew at the next ask, with no
        vision encode, unless the fidelity lets them keep their KV where few tokens differ (`Fidelity.edited_tokens`). `adopt`
        brings a branch's state back.
        """
        return self.from_core(self.core.fork(system_prompt), self.eviction, self.retrieval)

    def adopt(self, branch: Window, *, force: bool = False) -> None:
        """Make a branch's state this window's. The branch stays usable.

        Raises ValueError where ``branch`` is no fork of this window, or this window was edited since the fork (``force``
        overrides both), or it runs on another engine.
        """
        if not isinstance(branch, Window):
            raise TypeError(f"branch must be a window that fork() returned, got {type(branch).__name__}")
        check_flags(force=force)
        self.core.adopt(branch.core, force=force)

    def ask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """Answer ``query`` over the placed chunks.

        Args:
            query: text of the question; its KV is dropped afterwards unless remembered.
            max_tokens: most tokens of the answer.
            **options: see `AskOptions` and, for sampling, `SamplingOptions`. The default is greedy.

        Raises:
            BudgetExceeded: system prompt, chunks, query and ``max_tokens`` do not fit the budget.
            ChunkUnavailable, EngineFailed: the window is then as it was.
            UnsupportedModel: the engine cannot decode as asked, or the chat template cannot show what is to be remembered.

        Cost: what `plan` says, and a forward over the query.
        """
        return self.answer(Question.of(query, max_tokens, **options))

    def stream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> TokenStream:
        """`ask`, yielding text as it is made; ``answer`` is there at the end. Closing it early (``with``) changes nothing."""
        return TokenStream(partial(self.answer, Question.of(query, max_tokens, **options)))

    async def aask(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> Answer:
        """`ask` without blocking the event loop; cancelling it leaves the window unchanged."""
        return await aask(self.core, partial(self.answer, Question.of(query, max_tokens, **options)))

    def astream(self, query: str, max_tokens: int = 32, **options: Unpack[AskOptions]) -> AsyncTokenStream:
        """`stream` for async code."""
        return AsyncTokenStream(partial(self.answer, Question.of(query, max_tokens, **options)))

    def answer(
        self, question: Question, *, on_token: OnToken | None = None, stopped: Callable[[], bool] = not_stopped
    ) -> Answer:
        """Answer a `Question`: the base of `ask` and `stream`, for code that handles each token or decides when to stop.

        Args:
            on_token: called with each token and the text so far; returning False ends the answer there.
            stopped: polled; once it is true, AnswerStopped is raised and the window stays as it was.
        """
        if question.n > 1:
            # The first is asked last, so that the others do not see what it remembers.
            first, *others = split_choices(question)
            other_answers = tuple(self.answer(other, stopped=stopped) for other in others)
            return amend(self.answer(first, on_token=on_token, stopped=stopped), others=other_answers)
        if question.tools or question.libraries:
            return self._tool_branch.ask(self, question, on_token, stopped)
        return ask(self.core, question, on_token=on_token, stopped=stopped)

    def remember(self, query: str, answer: str | Sequence[int]) -> str:
        """Append an exchange that was made elsewhere, as a chunk; return its placement id. Raises like `append`."""
        said = answer if isinstance(answer, str) else as_list("answer", answer, "a token id")
        if not isinstance(query, str) or not query or not said:
            raise ValueError(f"query and answer must be text (or token ids) and not empty, got {query!r}, {answer!r}")
        ids = self.engine.encode(Chunk.text(answer)).token_ids if isinstance(answer, str) else tuple(said)
        return self.append(exchange(self.engine, query, ids)[0])

    def disposable(self, placement: str, query: str, max_tokens: int = 32, *, clean: bool = False) -> Disposability:
        """Test whether the answer to ``query`` is the same without a chunk, by asking before and after its eviction.

        ``clean`` also drops what its dependents absorbed from it (they are re-formed, in a branch). Kamera, appendix E. A window
        over its budget is asked as well, up to what the engine takes. Raises UnknownChunk, BudgetExceeded beyond that.
        Cost: two asks; the window is unchanged.
        """
        return disposable(self.core, placement, query, max_tokens, clean=clean)

    @classmethod
    def restore(
        cls,
        engine: Engine,
        state: State | dict[str, Any] | str,
        *,
        eviction: Eviction | None = None,
        retrieval: Retrieval | None = None,
        seed: str | None = None,
    ) -> Self:
        """A window from a snapshot (model, dict or JSON), on any engine; budget and mark shrink to what that takes.

        KV, patches and embeddings are found in the engine's store or recomputed from the sources. On another model the
        chunks are encoded again. With a ``seed`` the same edits give the same placement ids, so that an operation can be
        run again. Raises ChunkUnavailable where content and source are gone, ValueError for a snapshot of a newer format.
        """
        return cls.from_core(restore_core(engine, state, seed), eviction, retrieval)
