"""Questions to a window: answering, streaming, remembering, testing what matters, and work for idle time."""

from __future__ import annotations

import asyncio
import contextvars
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Encoded, Engine, Generation, Sampling, Segment
from ctxwin.errors import BudgetExceeded, ReadOnlyWindow
from ctxwin.hashing import digest
from ctxwin.window import edits
from ctxwin.window.answer import Answer, Disposability, Usage
from ctxwin.window.assembly import Laid, Work
from ctxwin.window.state import Conditioning, State, provenance_of, span_key

if TYPE_CHECKING:
    from ctxwin.kv.layout import SpanKV
    from ctxwin.window.window import Window


T = TypeVar("T")
_AT_ONCE = 512
_threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ctxwin-ask")
"""Where coroutines wait for windows. asyncio's own threads are 6 on a machine of 2 cores: as many windows would be in
flight there, however many an engine can batch."""


def in_thread(work: Callable[..., T], *args: Any, **options: Any) -> Awaitable[T]:
    """`asyncio.to_thread`, on threads of our own."""
    call = partial(contextvars.copy_context().run, work, *args, **options)
    return asyncio.get_running_loop().run_in_executor(_threads, call)


class _StoppedError(Exception):
    """The caller lost interest; nothing is committed."""


def ask(
    window: Window,
    query: str,
    max_tokens: int = 32,
    *,
    remember: bool | Callable[[str], bool] = False,
    logprobs: int = 0,
    temperature: float = 0.0,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    on_token: Callable[[int, str], bool] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    bare: bool = False,
    sampling: Sampling | None = None,
) -> Answer:
    """See `Window.ask`. ``stopped`` is polled: once true, the engine stops and the window stays as it was.

    ``remember`` may decide by the answer's text. ``bare``: the query may be empty (what is placed ends in the request).
    ``sampling``, with the same ``max_tokens``, stands for all that is said of decoding.
    """
    if not isinstance(query, str) or not (query or bare):
        raise ValueError(f"query must be a non-empty str, got {query!r}")
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens must be an int >= 1, got {max_tokens!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be >= 0 and finite, got {temperature}")
    if not isinstance(logprobs, int) or logprobs < -1:
        raise ValueError(f"logprobs must be an int >= -1 (-1: the whole vocabulary), got {logprobs!r}")
    with window._writing(edit=bool(remember)) as state:
        begin = time.perf_counter()
        encoded = window.engine.encode_query(query)
        check_budget(state, encoded.tokens, max_tokens)
        work, encodes = Work(), window.engine.counters.vision_encodes
        laid = window._assembly.lay_out(state, window._fidelity, work)
        laid_s = time.perf_counter() - begin

        def heard(token: int, text: str) -> bool:
            return not stopped() and (on_token is None or on_token(token, text))

        sampling = sampling or Sampling(max_tokens, temperature, seed, logprobs, tuple(stop_ids))
        generation = window._assembly.run(laid, encoded, sampling, capture_query=bool(remember), on_token=heard)
        if stopped():
            raise _StoppedError
        settled = window._assembly.settle(state, laid, generation.captured, window._fidelity)
        remembered = None
        if remember is True or (remember and remember(generation.text)):
            settled, remembered = _remember_pass(window, settled, laid, query, generation, work)
        total = time.perf_counter() - begin
        if stopped():
            raise _StoppedError
        window._commit(settled)
        window._encodes += window.engine.counters.vision_encodes - encodes
        usage = _usage(window, state, laid, encoded, generation, work, laid_s, total)
        window._encodes = 0
        answer = Answer(generation.text, tuple(generation.token_ids), usage, generation.logprobs, remembered=remembered)
        window._told.append(
            window._event(
                "ask", (remembered,) if remembered else (), query=query, answer=answer,
                lanes={c.placed.id: c.lane for c in laid.choices},
            )
        )  # fmt: skip
    return answer


def check_budget(state: State, query: int, max_tokens: int) -> None:
    """Raises BudgetExceeded where system prompt, chunks, query and answer do not fit together."""
    needed = state.tokens + query + max_tokens
    if needed > state.budget:
        raise BudgetExceeded(
            f"system prompt and chunks ({state.tokens} tokens), query ({query}) and answer ({max_tokens}) must fit the budget of "
            f"{state.budget}, got {needed}; slide() the window, shorten the query or lower max_tokens",
            needed=needed,
            budget=state.budget,
        )


def _usage(
    window: Window,
    state: State,
    laid: Laid,
    query: Encoded,
    generation: Generation,
    work: Work,
    laid_s: float,
    total: float,
) -> Usage:
    lanes = {
        "computed" if laid.segments[0].span is None or work.system_prompt else "resident": state.system_prompt_tokens
    }
    for choice in laid.choices:
        lanes[choice.lane] = lanes.get(choice.lane, 0) + choice.placed.tokens
    return Usage(
        engine=window.engine.spec.name,
        prompt_tokens=state.tokens + query.tokens,
        computed_tokens=generation.computed_tokens + work.tokens,
        reused_tokens=lanes,
        forwards=generation.forwards + work.forwards,
        vision_encodes=window._encodes,
        bytes_loaded=generation.bytes_loaded,
        cached_tokens=generation.cached_tokens,
        answer_tokens=len(generation.token_ids),
        misses=work.misses,
        fallbacks=generation.fallbacks,
        ttft_s=laid_s + generation.ttft_s,
        total_s=total,
        exact=all(c.served.exact for c in laid.choices),
    )


# -- remembering ---------------------------------------------------------------------------------------------------


def remember(window: Window, query: str, answer: str | Sequence[int]) -> str:
    """See `Window.remember`."""
    if not query or not len(answer):
        raise ValueError(f"query and answer must not be empty, got {query!r} and {answer!r}")
    engine = window.engine
    ids = engine.encode(Chunk.text(answer)).token_ids if isinstance(answer, str) else tuple(answer)
    chunk, _ = _exchange(engine, query, ids)
    return window.append(chunk)


def _exchange(engine: Engine, query: str, ids: Sequence[int]) -> tuple[Chunk, Encoded]:
    encoded = engine.encode_exchange(query, ids)
    return Chunk.tokens(encoded.token_ids, label=f"{query} {engine.decode(list(ids))}".strip()), encoded


def _remember_pass(
    window: Window, state: State, laid: Laid, query: str, generation: Generation, work: Work
) -> tuple[State, str]:
    """Appends the exchange just made, with the KV of that very pass; only the turn's closing tokens are computed."""
    chunk, encoded = _exchange(window.engine, query, generation.token_ids)
    placed = window._new(state, chunk)
    start = state.system_prompt_advance + sum(p.advance for p in state.placed)
    front = [c.served for c in laid.choices]
    exact = all(f.exact for f in front)
    provenance = provenance_of(state.system_prompt_key, chunk.id, [f.provenance for f in front])
    served = Conditioning(
        provenance=provenance, antecedents=tuple(p.id for p in state.placed), exact=exact,
        depth=0 if exact else 1 + max(f.depth for f in front), lane="computed",
        span=span_key(provenance, None if exact else front),
    )  # fmt: skip
    span = generation.query_span
    if span is not None:
        span = _finish(window, laid, generation, encoded, span, start, work)
        window._assembly.put(served.span, span, encoded, provenance=provenance, exact=exact, depth=served.depth)
        placed = placed.replace(kv=served, seen=True)
    return edits.appended(state, placed), placed.id


def _finish(
    window: Window, laid: Laid, generation: Generation, exchange: Encoded, head: SpanKV, start: int, work: Work
) -> SpanKV:
    """KV of the whole exchange: ``head`` was captured, the tokens behind it are computed."""
    import torch

    n = head.tokens
    if n >= exchange.tokens:
        return head.slice(0, exchange.tokens)
    segments = [
        replace(segment, span=generation.captured[i]) if segment.span is None and i in generation.captured else segment
        for i, segment in enumerate(laid.segments)
    ]
    shift = int(exchange.positions[:, n].min())
    first = replace(exchange, token_ids=exchange.token_ids[:n], positions=exchange.positions[:, :n], advance=shift)
    rest = replace(
        exchange, chunk_id=digest("tail", exchange.chunk_id), token_ids=exchange.token_ids[n:],
        positions=exchange.positions[:, n:] - shift, advance=exchange.advance - shift,
    )  # fmt: skip
    tail = window.engine.prefill([*segments, Segment(first, start, span=head)], rest, start + shift, salt=laid.salt)
    work.forwards += 1
    work.tokens += rest.tokens
    positions = torch.from_numpy(exchange.positions.copy())
    return replace(head, k=torch.cat([head.k, tail.k], 1), v=torch.cat([head.v, tail.v], 1), positions=positions)


# -- streaming -----------------------------------------------------------------------------------------------------


_Item = str | Answer | BaseException | None


def _answer(
    items: queue.SimpleQueue[_Item], stop: threading.Event, window: Window, query: str, max_tokens: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    sent = 0

    def on_token(_: int, text: str) -> bool:
        nonlocal sent
        ready = text.rstrip("\ufffd")  # half a character: its text changes with the next token
        items.put(ready[sent:])
        sent = max(sent, len(ready))
        return True

    try:
        answer = ask(window, query, max_tokens, on_token=on_token, stopped=stop.is_set, **options)
        items.put(answer.text[sent:])
        items.put(answer)
    except _StoppedError:
        items.put(None)
    except BaseException as error:  # handed to the caller's thread, which raises it
        items.put(error)


class Stream(Iterator[str]):
    """Text of an answer as it is made. ``answer`` is None until the stream is exhausted."""

    def __init__(self, window: Window, query: str, max_tokens: int, **options: Any) -> None:
        self.answer: Answer | None = None
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._stop = threading.Event()
        # The thread holds no reference to the stream: one that is dropped (a ``break``) must stop, see `__del__`.
        self._thread = threading.Thread(
            target=_answer, args=(self._items, self._stop, window, query, max_tokens, options), daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        while True:
            if self._stop.is_set():
                raise StopIteration
            item = self._items.get()
            if item is None or isinstance(item, Answer):
                self.answer = item
                self.close()
                raise StopIteration
            if isinstance(item, BaseException):
                self.close()
                raise item
            if item:
                return item

    def close(self) -> None:
        """Stops the engine if it is still answering, and waits for it; the window is then unchanged."""
        self._stop.set()
        self._thread.join()

    def __del__(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()  # so that the window is free for whoever dropped the stream


async def aask(window: Window, query: str, max_tokens: int, **options: Any) -> Answer:
    """See `Window.aask`."""
    stop = threading.Event()
    task = asyncio.ensure_future(in_thread(ask, window, query, max_tokens, stopped=stop.is_set, **options))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        # The engine is given the time to stop, so that the window is free again when the caller goes on.
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None and (late := task.result().remembered):
            with window._writing() as state:  # it was committed just before the cancellation arrived
                old = window._history.get(state.version - 1)
                if old and (*(p.id for p in old.placed), late) == window.ids:
                    window._commit(window._history.pop(old.version), "forget", [late], remember=False)
        raise


async def astream(window: Window, query: str, max_tokens: int, **options: Any) -> AsyncIterator[str]:
    """See `Window.astream`."""
    stream = Stream(window, query, max_tokens, **options)
    try:
        while True:
            text: str | None = await in_thread(next, stream, None)
            if text is None:
                return
            yield text
    finally:
        await in_thread(stream.close)


# -- what matters --------------------------------------------------------------------------------------------------


def disposable(window: Window, placement: str, query: str, max_tokens: int, *, clean: bool) -> Disposability:
    """See `Window.disposable`."""
    with _roomy_fork(window) as kept:
        gone = kept._state.placed[kept._state.index(placement)]
        with_it = ask(kept, query, max_tokens, logprobs=-1)
    with _roomy_fork(window) as branch:
        if clean:
            branch._commit(edits.forgotten(branch._state, gone)[0])
        else:
            branch.evict(placement)
        without = ask(branch, query, max_tokens, logprobs=-1)
    same = with_it.token_ids == without.token_ids
    window._emit(window._event("disposable", (placement,), query=query, note="disposable" if same else "needed"))
    return Disposability(
        disposable=same,
        kl=kl(with_it.first_token_logprobs, without.first_token_logprobs),
        answer_with=with_it.text,
        answer_without=without.text,
    )


def _roomy_fork(window: Window) -> Window:
    """A branch with all the tokens the engine takes: who may leave is asked of a window that is over its budget."""
    branch = window.fork()
    branch._state = branch._state.replace(budget=window.engine.spec.max_tokens)
    return branch


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) in nats of two next-token distributions over the same vocabulary, by token id."""
    if p.keys() != q.keys():
        raise ValueError(f"both distributions must cover the whole vocabulary, got {len(p)} and {len(q)} tokens")
    return max(0.0, math.fsum(math.exp(lp) * (lp - q[token]) for token, lp in p.items() if lp > -math.inf))


# -- idle time -----------------------------------------------------------------------------------------------------


def refresh(window: Window, count: int | None) -> list[str]:
    """See `Window.refresh`."""
    if window._read_only:
        raise ReadOnlyWindow("an old version must not be refreshed; fork() it first")
    work, done = Work(background=True), []
    with window._writing() as state:
        plan = window._assembly.plan(state, window._fidelity)
        # Front to back: behind an approximation nothing can become exact.
        stale = [e.id for e in plan.entries if not e.exact and e.conditioned and not e.compute]
        chosen = set(stale if count is None else stale[:count])
        for i, p in enumerate(state.placed):
            if p.id in chosen:
                # Re-forming one changes the provenance of what stands behind it: lay out anew each time.
                laid = window._assembly.lay_out(state, window._fidelity, work)
                if laid.choices[i].served.exact and not laid.choices[i].compute:
                    continue
                state = window._assembly.reform(state, i, laid, window._fidelity, work)
                done.append(p.id)
        if done:
            window._commit(state.edited(), "refresh", done)
    return done


def compress(window: Window) -> int:
    """See `Window.compress`."""
    assembly, repo, freed = window._assembly, window.engine.repo, 0
    if not window._fidelity.allows("patched") or window._fidelity.mode == "blind":
        return 0  # patches would not be served, and the exact KV would be gone
    with window._writing() as state:
        placed = list(state.placed)
        dropped: dict[str, int] = {}
        for i, p in enumerate(placed):
            if p.kv is None or p.kv.patch is not None or not p.kv.antecedents:
                continue
            encoded = assembly.encode(p)
            found = repo.get_span(p.kv.span, token_ids=encoded.token_ids)
            if found is None:
                continue
            base, _ = assembly.canonical(state, p, None, Work(background=True))
            key = assembly.form(found[0], base, p.kv.provenance, encoded, window._fidelity)
            patch = repo.get_patch(key) if key else None
            if key is None or patch is None or patch.nbytes >= found[0].nbytes:
                continue
            dropped[p.kv.span] = found[0].nbytes - patch.nbytes
            kv = p.kv.model_copy(
                update={"lane": "patched", "exact": False, "depth": p.kv.depth + 1, "span": base, "patch": key}
            )
            placed[i] = p.replace(kv=kv)
        if dropped:
            window._commit(state.edited(placed=tuple(placed)), "compress")
            for key, nbytes in dropped.items():
                if not repo.leased(key):  # another window still serves it
                    repo.delete(key)
                    freed += nbytes
    return freed
