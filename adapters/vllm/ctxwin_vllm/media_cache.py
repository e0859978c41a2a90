"""vLLM's cache of processed media in the server's process, held to what its engine has received.

vLLM's renderer sends the data of a picture once, and its name alone afterwards. It takes the data as sent as soon as a prompt is
rendered. A request that ends before it reaches the engine (its client has left, its arguments are refused, it only counts
tokens, it waits for a window) then leaves a name there whose data the engine never gets, and the next request for that picture
fails. `ReceivedMedia` knows a picture by name once a request with its data has been answered.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache, MultiModalProcessorOnlyCache
from vllm.multimodal.cache.base import MultiModalCache, MultiModalProcessorCacheItemMetadata

from ctxwin.store.lru import LRUCache
from ctxwin_vllm.internals import replace_media_cache

_SHARE = 0.5
"""Of the engine's own cache. Its order of use differs from ours by the requests under way, so that it may drop what we still
know only where the media of those fill the other half."""
_MOST_PENDING = 4096


class ReceivedMedia(BaseMultiModalProcessorCache):  # type: ignore[misc]  # mypy sees vLLM as untyped
    """The sender's side of vLLM's cache, with room of ``gib`` in the engine. vLLM calls it from one thread."""

    def __init__(self, gib: float) -> None:
        self._received = MultiModalCache.get_lru_cache(gib * _SHARE, MultiModalProcessorCacheItemMetadata)
        self._pending: LRUCache[Any] = LRUCache(_MOST_PENDING)
        self._in_use: dict[str, Any] = {}  # by the prompt that is being processed
        self._news: deque[tuple[str, bool]] = deque()  # from the event loop: names, and whether the engine has them

    def note(self, names: Iterable[str], *, received: bool) -> None:
        """Record whether the engine received the media that a request carried. Thread-safe."""
        self._news.extend((name, received) for name in names)

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        """Return, for each medium, True if the engine has it, so that it need not be processed again."""
        while self._news:
            name, received = self._news.popleft()
            metadata = self._pending.get(name)
            self._pending.pop(name)
            if not received:
                self._received.pop(name, None)
            elif metadata is not None:
                self._received.put_if_fits(name, metadata)
        return [self.is_cached_item(name) for name in mm_hashes]

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return True if the engine has one medium; see `is_cached`."""
        metadata = self._received.get(mm_hash)
        if metadata is not None:
            self._in_use[mm_hash] = metadata
        return metadata is not None

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        """Return the data that a request carries of a medium, or None, and its updates of the prompt."""
        if mm_item is None:
            return None, self._in_use[mm_hash].prompt_updates
        self._pending.put(mm_hash, MultiModalProcessorCacheItemMetadata(*mm_item), 1)
        return mm_item

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark a medium that is in use as the last to be evicted."""
        self._received.touch(mm_hash)

    def release_sender_touches(self) -> None:
        """Release the media of the processed prompt."""
        self._in_use.clear()

    def clear_cache(self) -> None:
        """Drop all names, as the engine has by then."""
        self._news.clear()
        self._pending = LRUCache(_MOST_PENDING)
        self._received.clear()

    def make_stats(self, *, delta: bool = False) -> Any:
        """Return hits and look-ups, for vLLM's metrics."""
        return self._received.stat(delta=delta)


def confirm_media(client: Any) -> ReceivedMedia | None:
    """Make the renderer of a running ``AsyncLLM`` send by name alone only pictures that its engine has.

    Returns None where the data of a picture go with every request, or lie in memory that both share.
    """
    cache, config = client.renderer.mm_processor_cache, client.model_config.multimodal_config
    if cache is None or isinstance(cache, MultiModalProcessorOnlyCache) or config.mm_processor_cache_type != "lru":
        return None
    media = ReceivedMedia(config.mm_processor_cache_gb)
    replace_media_cache(client.renderer, media)
    return media


def names_of(engine_input: Any) -> list[str]:
    """Return the names of the media of a rendered prompt."""
    by_kind = engine_input.get("mm_hashes") or {} if isinstance(engine_input, Mapping) else {}
    return [name for names in by_kind.values() for name in names]


def names_sent(engine_input: Any) -> list[str]:
    """Return the names of the media whose data a rendered prompt carries."""
    by_kind = engine_input.get("mm_kwargs") or {} if isinstance(engine_input, Mapping) else {}
    items = [item for items in by_kind.values() for item in items]
    return [name for name, item in zip(names_of(engine_input), items, strict=False) if item is not None]
