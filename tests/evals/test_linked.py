"""The study of linking in one step, on the bundled model."""

from itertools import islice

import pytest

from ctxwin.engines.segments import Segment
from ctxwin.opening import open_engine
from ctxwin_evals.tasks.tiny import TinyOptions, TinyTask
from evals.studies.command import SYSTEM_PROMPT
from evals.studies.linked import counted, measure, questions_of, ranges_of


def test_tokens_become_ranges() -> None:
    assert ranges_of([5, 1, 2, 9]) == ((1, 3), (5, 6), (9, 10))
    assert ranges_of([5, 1, 2, 9], join=2) == ((1, 6), (9, 10))


@pytest.mark.vllm
def test_gaps_are_requests_of_one_step_and_the_question_is_the_next() -> None:
    pytest.importorskip("vllm")
    with open_engine("tiny", engine="vllm", dtype="float32", processes="single") as engine, counted() as counts:
        header = engine.encode_system_prompt(SYSTEM_PROMPT)
        front = Segment(header, 0, span=engine.prefill([], header, 0), span_key="header")
        prompts = questions_of(engine, front, TinyTask("tiny/multi_hop", TinyOptions(21, (3,))), 3)
        rows = {row["arm"]: row for row in measure(engine, front, islice(prompts, 3), counts)}
    assert all(row["n"] == 2 for row in rows.values()), "the first is not counted"
    assert {name: (row["requests"], row["steps"]) for name, row in rows.items() if not name.startswith("apart")} == {
        "prefix cache": (1, 1), "full reuse": (1, 1), "MPIC-8": (4, 2), "MPIC-16": (4, 2), "MPIC-32": (4, 2), "in a row": (4, 2),
    }  # fmt: skip
    apart = rows["apart, joined over 0"]
    assert apart["requests"] > 12 and apart["steps"] == 2 and apart["computed"] == rows["in a row"]["computed"]
    assert rows["prefix cache"]["right"] == 1 > rows["full reuse"]["right"]
