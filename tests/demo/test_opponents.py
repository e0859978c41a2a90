"""The prefix cache that the demo compares with: counted as a naive implementation over whole histories counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.demo.opponents import Append, Ask, Media, Opponent, PrefixCache, Prompt, Trim, opponents
from ctxwin.engines.base import Encoded, MediaSpan


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


def _watch(opponent: Opponent, frames: int) -> None:
    opponent.start(_encoded("system_prompt", 16, media=False))
    for i in range(frames):
        opponent.arrive(_encoded(f"f{i}", 16))


QUERY = _encoded("query", 8, media=False)


def test_sliding_naively_computes_the_whole_window_again() -> None:
    naive = Opponent(3)
    _watch(naive, 4)
    assert naive.ask(Ask((0, 1, 2), QUERY)) == (16 + 48 + 8, 3)
    assert naive.ask(Ask((1, 2, 3), QUERY)) == (48 + 8, 1)
    assert naive.ask(Ask((1, 2, 3), QUERY)) == (8, 0)


def test_trimming_drops_the_older_half_when_full() -> None:
    trim = Trim(4)
    _watch(trim, 4)
    assert trim.held == [0, 1, 2, 3]
    trim.ask(Ask((0, 1, 2, 3), QUERY))
    trim.arrive(_encoded("f4", 16))
    assert trim.held == [2, 3, 4]
    assert trim.ask(Ask((1, 2, 3, 4), QUERY)) == (48 + 8, 1)
    trim.arrive(_encoded("f5", 16))
    assert trim.ask(Ask((2, 3, 4, 5), QUERY)) == (16 + 8, 1)


def test_looking_back_by_place_and_at_the_end() -> None:
    for kind, prompt, cost in ((Trim, [1, 3, 4], 48 + 8), (Append, [3, 4, 1], 16 + 8)):
        opponent = kind(4)
        _watch(opponent, 5)
        opponent.drop([2])
        opponent.ask(Ask((3, 4), QUERY))
        back = Ask((1, 3, 4), QUERY, recalled=(1,))
        assert opponent.prompt(back) == prompt
        # Trim finds nothing behind the system prompt; the appended frame extends what is cached.
        assert opponent.ask(back) == (cost, 1)
        assert opponent.ask(Ask((3, 4), QUERY)) == (8, 0)


def test_a_full_window_is_trimmed_before_looking_back() -> None:
    append = Append(4)
    _watch(append, 6)
    assert append.held == [2, 3, 4, 5]
    assert append.prompt(Ask((0, 1, 4, 5), QUERY, recalled=(0, 1))) == [4, 5, 0, 1]
    assert append.held == [4, 5]


def test_branches_and_orders_apply_to_what_is_held() -> None:
    trim = Trim(4)
    _watch(trim, 5)
    assert trim.held == [2, 3, 4]
    assert trim.prompt(Ask((1, 2, 4), QUERY, without=(3,))) == [2, 4]
    assert trim.prompt(Ask((1, 2, 4, 3), QUERY, reordered=True)) == [2, 4, 3]
    assert trim.held == [2, 3, 4]


def test_all_policies_have_caches_of_their_own() -> None:
    made = opponents(6)
    assert [o.name for o in made] == ["naive", "trim", "append"]
    assert len({id(o.cache) for o in made}) == 3
