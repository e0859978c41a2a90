"""Pictures that vLLM's renderer may send by name: those that the engine has, whatever became of the requests with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

media_cache = pytest.importorskip("ctxwin_vllm.media_cache", reason="vLLM is not installed", exc_type=ImportError)
ITEM_GIB = 4096 * 4 / (1 << 30)


def process(cache: Any, *names: str) -> list[Any]:
    """What a prompt with these pictures carries of each, as vLLM's processor asks the cache."""
    known = cache.is_cached([*names])
    for name in names:
        cache.touch_sender_cache_item(name)
    sent = []
    for name, cached in zip(names, known, strict=True):
        item = None if cached else ({"pixels": torch.zeros(4096)}, [f"tokens of {name}"])
        data, updates = cache.get_and_update_item(item, name)
        assert updates == [f"tokens of {name}"]
        sent.append(data)
    cache.release_sender_touches()
    return [name for name, data in zip(names, sent, strict=True) if data is not None]


def test_a_picture_goes_by_name_once_a_request_with_its_data_was_answered() -> None:
    cache = media_cache.ReceivedMedia(1.0)
    assert process(cache, "a", "b", "a") == ["a", "b", "a"]
    assert process(cache, "a") == ["a"]  # the first request has ended before it reached the engine, or waits
    cache.note(["a"], received=True)
    assert process(cache, "a", "b") == ["b"]
    cache.note(["never rendered"], received=True)
    cache.note(["a"], received=False)  # a request with it failed: the engine may have lost it
    assert process(cache, "a", "never rendered") == ["a", "never rendered"]
    cache.note(["a"], received=True)
    cache.clear_cache()
    assert process(cache, "a") == ["a"]


def test_what_makes_room_is_sent_again_and_what_is_in_use_is_not_lost() -> None:
    cache = media_cache.ReceivedMedia(4.5 * ITEM_GIB)  # of which it takes half
    for name in "abc":
        process(cache, name)
        cache.note([name], received=True)
    assert process(cache, "b", "c") == []
    assert process(cache, "a", "b", "c") == ["a"]
    cache.note(["a"], received=True)
    assert process(cache, "a") == []
    assert process(cache, "b", "c") == ["b"]


def test_only_a_cache_that_sends_data_once_is_replaced() -> None:
    def client(cache: object, kind: str) -> Any:
        config = SimpleNamespace(mm_processor_cache_type=kind, mm_processor_cache_gb=1.0)
        renderer = SimpleNamespace(mm_processor_cache=cache, _mm_processor_cache=cache)
        return SimpleNamespace(renderer=renderer, model_config=SimpleNamespace(multimodal_config=config))

    for left in (client(None, "lru"), client(object(), "shm")):
        before = left.renderer._mm_processor_cache
        assert media_cache.confirm_media(left) is None and left.renderer._mm_processor_cache is before
    running = client(object(), "lru")
    assert media_cache.confirm_media(running) is running.renderer._mm_processor_cache


def test_names_are_those_of_a_rendered_prompt() -> None:
    prompt = {"mm_hashes": {"image": ["a", "b"], "video": ["v"]}, "mm_kwargs": {"image": [None, 1], "video": [2]}}
    assert media_cache.names_of(prompt) == ["a", "b", "v"] and media_cache.names_sent(prompt) == ["b", "v"]
    for other in ({"prompt_token_ids": [1]}, "text", None):
        assert media_cache.names_of(other) == media_cache.names_sent(other) == []
