"""Names of blocks in vLLM's prefix cache: the same for the same prompt up to a block's end, others for any other."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from ctxwin.engines.segments import MediaSpan
from ctxwin_vllm.prefix_record import PrefixRecord

BLOCK = 4
Prompt = tuple[list[int], dict[int, tuple[str, int, bool]], str]
PROMPTS = st.tuples(
    st.lists(st.integers(0, 2), max_size=14),
    st.dictionaries(st.integers(0, 11), st.tuples(st.sampled_from("ab"), st.integers(1, 5), st.booleans()), max_size=2),
    st.sampled_from(["", "salt"]),
)
"""Token ids; by place, a medium's key, its number of tokens, and whether it is marked; a salt."""


def contents(prompt: Prompt) -> list[object]:
    """The oracle: of each full block, everything up to its end, as plain values."""
    ids, media, salt = prompt
    parts: list[object] = []
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        begin = end - BLOCK
        inside = [
            (key, at - begin, marked) for at, (key, size, marked) in media.items() if at < end and begin < at + size
        ]
        parts.append((salt, tuple(ids[:end]), parts[-1] if parts else None, tuple(inside)))
    return parts


def names(prompt: Prompt) -> list[bytes]:
    ids, media, salt = prompt
    spans = [MediaSpan("image", key, at, size, (1, 1, size)) for at, (key, size, _) in media.items()]
    marks = {at: "mark" for at, (_, _, marked) in media.items() if marked}
    return PrefixRecord(BLOCK, 8).names(ids, spans, marks, salt)


@given(PROMPTS, PROMPTS, st.integers(0, 14))
def test_names_are_equal_where_everything_up_to_the_end_of_the_block_is(one: Prompt, rest: Prompt, at: int) -> None:
    media = {i: m for i, m in one[1].items() if i < at} | {i: m for i, m in rest[1].items() if i >= at}
    other = (one[0][:at] + rest[0][at:], media, one[2])
    for there in (other, (*other[:2], rest[2])):
        alike = [a == b for a, b in zip(contents(one), contents(there), strict=False)]
        assert [a == b for a, b in zip(names(one), names(there), strict=False)] == alike
    assert len(names(one)) == len(one[0]) // BLOCK


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6), st.lists(st.integers(0, 1), max_size=8))
def test_a_prompt_continues_where_nothing_else_was_left_behind_what_it_shares(
    earlier: list[list[int]], prompt: list[int]
) -> None:
    """Blocks of one token: the newest request with the last block that is there ended with it."""
    record = PrefixRecord(1, 999)
    for ids in earlier:
        record.add(record.names(ids, [], {}, ""))
    shared = max((sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(ids, prompt))) for ids in earlier), default=0)  # noqa: B905
    newest = next((ids for ids in reversed(earlier) if ids[:shared] == prompt[:shared]), [])
    assert record.continues(record.names(prompt, [], {}, "")) == (shared > 0 and len(newest) == shared)
