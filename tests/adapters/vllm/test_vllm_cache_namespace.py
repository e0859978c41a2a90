"""Names of blocks in vLLM's prefix cache: what is approximate never has the name of what is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.engines.segments import Encoded, MediaSpan, Segment


@st.composite
def layouts(draw: st.DrawFn) -> list[Segment]:
    """Segments of 1 to 70 tokens with up to two media each, some of them apart."""
    segments: list[Segment] = []
    start = 0
    for i in range(draw(st.integers(1, 6))):
        tokens = draw(st.integers(1, 70))
        cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=4, unique=True)))
        media = tuple(
            MediaSpan("image", f"embed/m{draw(st.integers(0, 2))}", at, end - at, (1, 2, 2))
            for at, end in zip(cuts[::2], cuts[1::2], strict=False)
        )
        ids = tuple(draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens)))
        encoded = Encoded(f"c{i}", ids, np.zeros((3, tokens), dtype=np.int64), tokens, media)
        segments.append(Segment(encoded, start, span_key=f"kv-{i}", approximate=draw(st.booleans()) and i > 0))
        start += tokens
    return segments


def block_names(segments: Sequence[Segment], salt: str, block: int) -> list[bytes]:
    """vLLM's own names of the whole blocks of a layout."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from ctxwin_vllm.cache_namespace import namespace_of
    from ctxwin_vllm.inputs import join

    init_none_hash(sha256)
    namespace = namespace_of(segments, salt, block)
    ids, media = join([segment.encoded for segment in segments])
    features = []
    for span in media:
        mark = namespace.marks.get(span.offset)
        name = span.key.rpartition("/")[2] + (f"@{mark}" if mark else "")
        place = PlaceholderRange(offset=span.offset, length=span.tokens)
        features.append(MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place))
    request = Request(
        "r", ids, SamplingParams(max_tokens=1), None, mm_features=features, cache_salt=namespace.salt or None,
        block_hasher=get_request_block_hasher(block, sha256),
    )  # fmt: skip
    return list(request.block_hashes)


@settings(max_examples=120, deadline=None)
@given(segments=layouts(), block=st.sampled_from([16, 32]), data=st.data())
def test_no_approximate_token_is_in_a_block_of_an_exact_name(
    segments: list[Segment], block: int, data: st.DataObject
) -> None:
    from ctxwin_vllm.cache_namespace import namespace_of

    exact = block_names([replace(segment, approximate=False) for segment in segments], "", block)
    apart = [i for i, segment in enumerate(segments) if segment.approximate]
    if not apart:
        return
    namespace = namespace_of(segments, "salt", block)
    mine = block_names(segments, "salt", block)
    begins = [sum(segment.encoded.tokens for segment in segments[:i]) for i in range(len(segments))]
    for j, (ours, theirs) in enumerate(zip(mine, exact, strict=True)):
        assert (ours == theirs) == (not namespace.salt and j * block < namespace.private_from)
        if (j + 1) * block > begins[apart[0]]:
            assert ours != theirs
    # Another approximation of one chunk: nothing from the block on in which that chunk begins.
    changed = data.draw(st.sampled_from(apart))
    other = [replace(segment, span_key="another") if i == changed else segment for i, segment in enumerate(segments)]
    for j, (ours, theirs) in enumerate(zip(mine, block_names(other, f"salt of {changed}", block), strict=True)):
        if (j + 1) * block > begins[changed]:
            assert ours != theirs
    # What is served so far does not depend on what is placed behind it, unless that marks a medium among it.
    cut = data.draw(st.integers(apart[0] + 1, len(segments)))
    if not namespace.salt and not namespace_of(segments[:cut], "salt", block).salt:
        marks = {at: mark for at, mark in namespace.marks.items() if at < sum(p.encoded.tokens for p in segments[:cut])}
        if marks == namespace_of(segments[:cut], "salt", block).marks:
            fewer = block_names(segments[:cut], "salt", block)
            assert mine[: len(fewer)] == fewer


def part(name: str, tokens: int) -> Encoded:
    return Encoded(name, tuple(range(tokens)), np.tile(np.arange(tokens), (3, 1)), tokens)


def test_the_same_text_apart_at_another_place_has_another_name() -> None:
    """Placed twice, one chunk is served from its canonical at one place and computed at the other: other KV, same tokens."""
    from ctxwin_vllm.cache_namespace import namespace_of

    system_prompt, text = part("system_prompt", 32), part("text", 32)
    picture = replace(part("picture", 32), media=(MediaSpan("image", "media/p", 0, 32, (1, 8, 16)),))
    names = []
    for first in (True, False):
        segments = [Segment(system_prompt, 0, span_key="h"), Segment(picture, 32, span_key="p")]
        for i, approximate in enumerate((first, not first)):
            segments.append(
                Segment(
                    text, 64 + 32 * i, span_key="canonical" if approximate else f"exact {i}", approximate=approximate
                )
            )
        names.append(namespace_of(segments, "salt", 32).marks)
    assert names[0].keys() == names[1].keys() == {32}
    assert names[0] != names[1]
