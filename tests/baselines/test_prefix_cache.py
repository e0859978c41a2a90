"""`PrefixCache` against a naive implementation that keeps whole histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.baselines.prefix_cache import Media, PrefixCache, Prompt
from ctxwin.engines.segments import Encoded, MediaSpan


def _naive_hit(prompt: list[str], history: list[list[str]], block: int) -> int:
    """Tokens of the longest common prefix with any earlier prompt, in whole blocks, without the last token."""
    best = 0
    for old in history:
        common = 0
        while common < min(len(prompt), len(old)) and prompt[common] == old[common]:
            common += 1
        best = max(best, common // block * block)
    return min(best, (len(prompt) - 1) // block * block)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=14), min_size=1, max_size=12),
    block=st.integers(1, 4),
)
def test_hits_are_common_prefixes_in_whole_blocks(prompts: list[list[str]], block: int) -> None:
    cache, history = PrefixCache(block), []
    for prompt in prompts:
        computed, encodes = cache.serve(Prompt(tuple(prompt)))
        assert computed == len(prompt) - _naive_hit(prompt, history, block)
        assert encodes == 0
        history.append(prompt)


def _naive_encodes(served: list[tuple[list[str], int]], capacity: int, size: int) -> list[int]:
    """Encodes a prompt: media behind the cached tokens that are not among the most recently used ones."""
    recent: list[str] = []
    out = []
    for media, cached in served:
        count = 0
        for i, key in enumerate(media):
            if (i + 1) * size <= cached:
                continue
            if key in recent:
                recent.remove(key)
            else:
                count += 1
            recent.append(key)
            recent = recent[-(capacity // size) :]
        out.append(count)
    return out


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=5, unique=True), min_size=1, max_size=12),
    capacity=st.sampled_from([4, 8, 12]),
)
def test_encodes_follow_an_lru_of_embeddings(prompts: list[list[str]], capacity: int) -> None:
    size, block = 4, 4
    cache, history, served, counted = PrefixCache(block, capacity), [], [], []
    for keys in prompts:
        tokens = [f"{k}{i}" for k in keys for i in range(size)] + ["?"]
        media = tuple(Media(k, i * size, (i + 1) * size) for i, k in enumerate(keys))
        computed, encodes = cache.serve(Prompt(tuple(tokens), media))
        assert computed == len(tokens) - _naive_hit(tokens, history, block)
        served.append((keys, len(tokens) - computed))
        history.append(tokens)
        counted.append(encodes)
    assert counted == _naive_encodes(served, capacity, size)


def test_the_last_token_is_always_computed() -> None:
    cache = PrefixCache()
    prompt = Prompt(tuple(str(i) for i in range(32)))
    assert cache.serve(prompt) == (32, 0)
    assert cache.serve(prompt) == (16, 0)


def test_a_medium_larger_than_the_encoder_cache_is_encoded_each_time() -> None:
    cache = PrefixCache(16, encoder_size=4)
    for i in range(3):
        tokens = (f"q{i}", *("x" * 8))
        assert cache.serve(Prompt(tokens, (Media("x", 1, 9),))) == (9, 1)


@pytest.mark.parametrize(("block", "size"), [(0, 1), (1, -1)])
def test_bad_sizes_are_refused(block: int, size: int) -> None:
    with pytest.raises(ValueError, match="block must be"):
        PrefixCache(block, size)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PrefixCache().serve(Prompt(()))


def _encoded(name: str, tokens: int, media: bool = True) -> Encoded:
    spans = (MediaSpan("image", f"embed/{name}", 1, tokens - 2, (1, 2, 2)),) if media else ()
    positions = np.zeros((3, tokens), np.int64)
    return Encoded(name, tuple(hash(name) % 1000 if not media else 7 for _ in range(tokens)), positions, tokens, spans)


def test_frames_with_equal_ids_but_other_pixels_are_other_tokens() -> None:
    a, b = Prompt.of([_encoded("a", 18)]), Prompt.of([_encoded("b", 18)])
    assert a.tokens[0] == b.tokens[0]
    assert a.tokens[1] != b.tokens[1]
    assert a.media == (Media("embed/a", 1, 17),)
