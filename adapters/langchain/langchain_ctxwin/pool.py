"""The windows of a chat model: a few recent ones, of which the most similar is forked for each call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from langchain_core.language_models import ModelProfile

from ctxwin.chunk import Chunk
from ctxwin.engines.base import Engine
from ctxwin.errors import BudgetExceeded, ChunkUnavailable, UnsupportedModel
from ctxwin.fidelity import Fidelity
from ctxwin.store.lru import LRUCache
from ctxwin.window.events import Observer
from ctxwin.window.placements import keep_source
from ctxwin.window.sync import sync
from ctxwin.window.toolcalls import learn
from ctxwin.window.window import Window
from langchain_ctxwin.messages import Conversation

T = TypeVar("T")
_MAX_POOLS, _MAX_CACHED_PICTURES = 8, 4096  # pictures are cached as chunks without their pixels


class Pool:
    """At most ``size`` windows; the least recently used leave. Thread-safe: every call works on a fork of its own."""

    def __init__(
        self, engine: Engine, budget: int | None, fidelity: Fidelity | None, size: int, observers: Sequence[Observer]
    ) -> None:
        self.engine = engine
        self._budget, self._fidelity, self._size, self._observers = budget, fidelity, size, observers
        self._media_cache: LRUCache[Chunk] = LRUCache(_MAX_CACHED_PICTURES)
        self._windows: list[Window] = []  # least recently used first
        self._lock = threading.Lock()

    def run(self, talk: Callable[..., Conversation], use: Callable[[Conversation], T]) -> T:
        """Return ``use(conversation)`` for the conversation that ``talk(engine, seen=...)`` returns (see `converse`).

        Pictures of earlier calls are decoded and encoded again only if the store has lost them.
        """
        try:
            return use(talk(self.engine, seen=self._media_cache))
        except ChunkUnavailable:
            self._media_cache = LRUCache(_MAX_CACHED_PICTURES)
            conversation = talk(self.engine, seen=self._media_cache)
            self.tokens(conversation)
            return use(conversation)

    def tokens(self, talk: Conversation) -> int:
        """Return the number of prompt tokens of a conversation, each as `counted`; encodes its chunks and keeps their sources."""
        engine, closing = self.engine, self.engine.encode_query("x").tokens - len(self.engine.text_ids("x"))
        count = counted(lambda text: engine.encode_system_prompt(text).tokens, talk.system_prompt) + closing
        for chunk in talk.chunks:
            count += counted(lambda chunk: engine.encode(chunk).tokens, chunk)
            keep_source(engine, chunk)
        return count

    @contextmanager
    def window(self, system_prompt: str, chunks: Sequence[Chunk]) -> Iterator[Window]:
        """Open a window that places exactly ``chunks``: a synced fork of the one that shares most with them.

        The window joins the pool when the block ends without an error, and replaces the one it was forked from if they
        are much the same. Raises like `ctxwin.window.sync.sync`.
        """
        base, window = self._fork(system_prompt, chunks)
        try:
            sync(window.core, chunks)
            yield window
        except BaseException:
            window.close()
            raise
        self._keep(window, base)

    def close(self) -> None:
        """Close every window and release its leases; a window in use closes when its call ends."""
        with self._lock:
            windows, self._windows, self._size = self._windows, [], 0
        for window in windows:
            window.close()

    def __len__(self) -> int:
        return len(self._windows)

    def _fork(self, system_prompt: str, chunks: Sequence[Chunk]) -> tuple[Window | None, Window]:
        target = Counter(c.id for c in chunks)
        with self._lock:  # so that no other call closes it meanwhile
            candidates = [w for w in reversed(self._windows) if w.system_prompt == system_prompt]
            base = max(candidates, key=lambda w: _shared(w, target), default=None)
            if base is not None and any(_shared(base, target)):
                return base, base.fork()
        window = Window(self.engine, system_prompt, self._budget, self._fidelity)
        for observer in self._observers:
            window.observe(observer)
        return None, window

    def _keep(self, window: Window, base: Window | None) -> None:
        chunk_counts = Counter(p.chunk_id for p in window.snapshot().placed)
        with self._lock:
            discarded = []
            if base in self._windows and base is not None:
                state = base.snapshot()
                # Half of its chunks are placed: the same conversation continues. System prompts are often shared.
                if 2 * _shared(base, chunk_counts)[0] >= state.tokens - state.system_prompt_tokens:
                    self._windows.remove(base)
                    discarded.append(base)
            self._windows.append(window)
            while len(self._windows) > self._size:
                discarded.append(self._windows.pop(0))
        for old in discarded:
            old.close()


@dataclass(eq=False)
class Opened:
    """Engines by model name, and windows by the latest few settings, of a chat model and its copies; calls open them again."""

    engines: dict[str, Engine] = field(default_factory=dict)
    pools: dict[tuple[Any, ...], Pool] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def keep(self, key: tuple[Any, ...], pool: Pool) -> Pool:
        """Return ``pool`` as the latest; close the one that was used least recently where there are too many."""
        self.pools = {name: other for name, other in self.pools.items() if name != key} | {key: pool}
        if len(self.pools) > _MAX_POOLS:
            self.pools.pop(next(iter(self.pools))).close()
        return pool

    def close(self) -> None:
        """Close the windows and engines. Idempotent."""
        with self.lock:
            pools, engines, self.pools, self.engines = self.pools, self.engines, {}, {}
        for close in [opened.close for opened in pools.values()] + [engine.close for engine in engines.values()]:
            close()


def counted(count: Callable[[T], int], content: T) -> int:
    """Return ``count(content)``; of what alone is longer than the engine, the least number of tokens that it can have."""
    try:
        return count(content)
    except BudgetExceeded as error:
        return error.needed


def profile_of(engine: Engine, budget: int | None) -> ModelProfile:
    """Return `BaseChatModel.profile` of an engine's model; ``max_input_tokens`` is the window's budget."""
    try:
        tools = bool(learn(engine))
    except UnsupportedModel:
        tools = False
    vision, most = engine.spec.vision, engine.spec.max_tokens
    kinds = ("_inputs", "_outputs", "_output", "_choice")
    profile: dict[str, Any] = {name: False for name in ModelProfile.__annotations__ if name.endswith(kinds)}
    profile |= {"text_inputs": True, "text_outputs": True, "image_inputs": vision, "video_inputs": vision}
    profile |= {"tool_calling": tools, "tool_call_streaming": tools, "image_tool_message": vision and tools}
    return cast("ModelProfile", profile | {"max_input_tokens": min(budget or most, most)})


def remembers(engine: Engine, answer: str = "") -> bool:
    """Return True if ``answer`` renders the same as an earlier turn: thinking is not stripped, the turn opens alike."""
    template = engine.template
    try:
        if template is not None and not template.plain:
            return template.exchange(answer)[:2] == (template.closing, answer)
    except UnsupportedModel:
        return False
    return True


def _shared(window: Window, target: Counter[str]) -> tuple[int, int]:
    """Return the tokens of placed chunks among ``target``, and of evicted ones among what ``target`` still lacks."""
    state = window.snapshot()
    tokens = {p.chunk_id: p.tokens for p in (*state.placed, *state.evicted)}
    here = target & Counter(p.chunk_id for p in state.placed)
    back = (target - here) & Counter(p.chunk_id for p in state.evicted)
    return sum(tokens[i] * n for i, n in here.items()), sum(tokens[i] * n for i, n in back.items())
