"""How rendered prompts are cut into segments: by what stands near a cut, whatever else the conversation holds."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxwin.engines.cost import CostModel, attended
from ctxwin.engines.encoding.segmentation import HEADER, LONG, SEEN, split
from ctxwin.engines.results import Generation
from ctxwin.engines.segments import Encoded, Segment
from ctxwin_vllm.rendered import NotAWindow, Pictures, SubmittedRequest
from ctxwin_vllm.transport import Transfer

OPEN, CLOSE, LINE, START, PAD, END = 90, 91, 10, 92, 93, 94
SPECIAL = frozenset((OPEN, CLOSE, START, PAD, END))


@dataclass
class Place:
    offset: int
    length: int


class Element:
    def __init__(self, grid: list[int]) -> None:
        self.data = self
        self._grid = grid

    def reshape(self, _: int) -> Element:
        return self

    def tolist(self) -> list[int]:
        return self._grid


def turn(role: int, *parts: list[int]) -> list[int]:
    return [OPEN, role, LINE, *(token for part in parts for token in part), CLOSE, LINE]


def picture(tokens: int) -> list[int]:
    return [START, *[PAD] * tokens, END]


def prompt_of(ids: list[int], **fields: Any) -> dict[str, Any]:
    """As vLLM's renderer gives it: each run of placeholders is a picture."""
    places = []
    for i, token in enumerate(ids):
        if token == PAD and ids[i - 1] != PAD:
            places.append(Place(i, next(n for n in range(len(ids)) if ids[i + n] != PAD)))
    names = [f"picture-{place.offset}" for place in places]
    items = [{"image_grid_thw": Element([1, 2, 2 * place.length])} for place in places]
    return {
        "type": "multimodal", "prompt_token_ids": ids, "mm_placeholders": {"image": places}, "mm_hashes": {"image": names},
        "mm_kwargs": {"image": items}, **fields,
    }  # fmt: skip


def cut(ids: list[int], known: Sequence[int] = (0,)) -> list[int]:
    prompt, wraps = Pictures().read(prompt_of(ids)), frozenset((START, END))
    return split(prompt.ids, prompt.spans, SPECIAL, wraps, lambda token: token == LINE, known)


def segments(ids: list[int]) -> list[list[int]]:
    cuts = cut(ids)
    assert cuts[0] == 0 and cuts[-1] == len(ids) and cuts == sorted(set(cuts))
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]


def test_a_turns_end_and_the_next_header_belong_to_the_text_in_front() -> None:
    ids = turn(1, [5, 6]) + turn(2, [7], picture(3), [8]) + turn(3, [9]) + [OPEN, 3, LINE]
    assert segments(ids) == [
        [OPEN, 1, LINE],
        [5, 6, CLOSE, LINE, OPEN, 2, LINE],
        [7],
        picture(3),
        [8, CLOSE, LINE, OPEN, 3, LINE],
        [9, CLOSE, LINE, OPEN, 3, LINE],
    ]


def test_pictures_without_text_between_them_are_segments_of_their_own() -> None:
    ids = [*turn(2, picture(2), picture(4)), OPEN, 3, LINE]
    assert segments(ids) == [[OPEN, 2, LINE], picture(2), picture(4), [CLOSE, LINE, OPEN, 3, LINE]]


def test_a_mark_without_a_line_behind_it_ends_its_own_header() -> None:
    assert segments([OPEN, *[5] * (HEADER + 1), CLOSE, OPEN, 6]) == [[OPEN], [*[5] * (HEADER + 1), CLOSE, OPEN], [6]]


def test_a_long_text_is_cut_behind_lines() -> None:
    text = ([7] * 9 + [LINE]) * (LONG // 5)
    found = segments([OPEN, 1, LINE, *text])
    assert len(found) == 3 and all(part[-1] == LINE for part in found) and LONG <= len(found[1]) < LONG + 10


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), min_size=2, max_size=8), st.data())
def test_what_stays_is_cut_as_before(turns: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    """Whichever turns leave, the segments of the others are among those of the whole, but for the header that follows."""

    def rendered(kept: list[int]) -> list[int]:
        ids = turn(1, [50])
        for i in kept:
            words, pictures, caption = turns[i]
            ids += turn(2, [20 + i] * words, *(picture(2 + i) for _ in range(pictures)), [40 + i] if caption else [])
        return [*ids, OPEN, 3, LINE]

    everything = [*range(len(turns))]
    kept = [i for i in everything if data.draw(st.booleans())]
    whole = [tuple(part) for part in segments(rendered(everything))]
    for part in segments(rendered(kept))[:-1]:
        assert tuple(part) in whole


@given(
    shared=st.lists(st.sampled_from((OPEN, CLOSE, LINE, START, PAD, END, 1, 2)), max_size=120),
    rests=st.tuples(*[st.lists(st.sampled_from((OPEN, CLOSE, LINE, START, PAD, END, 1)), max_size=60)] * 2),
    block=st.integers(1, 8),
)
def test_a_prompt_is_cut_alike_from_where_an_earlier_one_was(
    shared: list[int], rests: tuple[list[int], list[int]], block: int
) -> None:
    """However near its end, or in which picture, the earlier one stops."""

    shared = [token for token in shared for _ in range(40 if token == 2 else 1)]  # texts that are cut behind lines
    earlier, ids = ([*shared, *rest, 1] for rest in rests)
    known = cut(earlier)
    same = min(i != PAD for i in (*earlier[len(shared) :][:1], *ids[len(shared) :][:1]))
    end = len(shared) // block * block if same else 0  # else a picture goes on
    count = bisect_right(known, end - SEEN) - 1
    assert cut(ids, known[: max(0, count) + 1]) == cut(ids)


def test_what_no_window_can_hold_says_why() -> None:
    pictures = Pictures()
    with pytest.raises(NotAWindow, match="not made of tokens"):
        pictures.read({"type": "embeds"})
    ids = turn(2, picture(2))
    with pytest.raises(NotAWindow, match="got video"):
        pictures.read(prompt_of(ids, mm_placeholders={"video": []}))
    later = prompt_of(ids, mm_kwargs={"image": [None]})  # vLLM sends the data of a picture once
    with pytest.raises(NotAWindow, match="sent before"):
        pictures.read(later)
    assert pictures.read(prompt_of(ids)).media[0].picture.grid == (1, 2, 4)
    assert pictures.read(later).media[0].picture.grid == (1, 2, 4)


def test_a_prefix_ends_in_a_picture_only_where_it_may() -> None:
    prompt = Pictures().read(prompt_of(turn(2, [20] * 4, picture(40), [30] * 4)))
    (medium,) = prompt.media
    for end in range(1, len(prompt.ids) + 1):
        inside = medium.offset <= end <= medium.offset + medium.tokens
        assert prompt.boundary(end, whole_media=False) == end
        assert prompt.boundary(end, whole_media=True) == (medium.offset + medium.tokens + 1 if inside else end)


def test_a_chats_time_to_its_first_token_teaches_prices_where_it_ran_alone() -> None:
    clock = itertools.count()
    costs = CostModel(clock=lambda: float(next(clock)))
    segment = Segment(Encoded("a", tuple(range(30)), np.zeros((3, 30), dtype=np.int64), 30), 0)

    def submitted(**reused: int) -> SubmittedRequest:
        return SubmittedRequest({}, "", Transfer(**reused), [segment, segment], [], Generation(), costs)

    async def outputs() -> AsyncGenerator[int, None]:
        for i in range(3):
            yield i

    async def run(requests: list[SubmittedRequest]) -> None:
        async def follow(request: SubmittedRequest) -> None:
            with request.costs.timed() as watch:
                async for _ in outputs():
                    watch.lap()
                    await asyncio.sleep(0)
            request.watch = watch

        await asyncio.gather(*map(follow, requests))
        for request in requests:
            request.learn()

    asyncio.run(run([submitted(local_tokens=32, planned_tokens=8)]))
    asyncio.run(run([submitted()]))
    asyncio.run(run([submitted(), submitted()]))  # they waited for each other
    submitted().learn()  # its client has left
    assert [(amounts, ms) for _, amounts, ms in costs.noted] == [
        ((1, 20, attended(20, 40), 8, 1, 0), 1e3),
        ((1, 60, attended(60, 0), 0, 0, 0), 1e3),
    ]
