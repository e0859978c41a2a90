"""A snapshot as JSON: it is the state again, takes O(n), and nonsense in it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxwin import Chunk, Fidelity, Window
from ctxwin.window.state import State
from window.fake import FakeEngine


def state_of(chunks: int) -> State:
    """Of a window that was asked after each append, lost chunks from its middle, and was slid, recalled and reordered."""
    with Window(FakeEngine(max_tokens=10_000), "h", fidelity=Fidelity("patched", rank=2)) as window:
        ids = []
        for i in range(chunks):
            ids.append(window.append(Chunk.tokens([i % 40])))
            window.ask("?", 1)
            if i % 5 == 4:
                window.evict(window.ids[1])
        window.slide(2)
        window.recall(ids[0])
        window.reorder([window.ids[-1], *window.ids[:-1]])
        window.ask("?", 1)
        return window.core.state


def test_it_is_the_state_again() -> None:
    state = state_of(7)
    for back in (
        State.model_validate_json(state.model_dump_json()),
        State.model_validate(state.model_dump(mode="json")),
        State.model_validate(state.model_dump()),
        State.model_validate(state),
    ):
        assert back == state and back.model_dump_json() == state.model_dump_json()
    left_out = state.model_dump(mode="json", exclude={"placed"})
    assert State.model_validate(left_out).evicted == state.evicted


def test_it_takes_a_few_hundred_bytes_a_chunk() -> None:
    small, large = (state_of(n).model_dump_json() for n in (15, 60))
    assert len(large) < 5 * len(small) and len(large) / 60 < 1000
    named = sum(len(p.kv.antecedents) for p in State.model_validate_json(large).placed if p.kv)
    assert named > 60 * 15  # as lists of ids they would be quadratic


@pytest.mark.parametrize(
    "run",
    [
        *([0, 1], [None, 1], [99, 0], [{}, []]),
        *([9, 0, 1, 0], [-1, 0, 1, 0], [0, 2, 1, 0], [0, -1, 1, 0], [0, 0, 99, 0], [0, 0, 1, 99], [0, 0, 1, -1]),
        *([0, 0, 1, True], [0, 0, None, 0], [0, 0, 1.0, 0]),
    ],
)
def test_a_run_that_is_none_is_refused(run: list[Any]) -> None:
    data = state_of(3).model_dump(mode="json")
    data["placed"][-1]["kv"]["antecedents"] = run
    with pytest.raises(ValueError, match="antecedents must be"):
        State.model_validate(data)


NO_IDS: list[Any] = [None, "abc", [1, 2, 3], {}]
NO_ORDERS: list[Any] = [None, {}, "ab", [[["a"]]], [["a", []]], [[["a"], [1]]], [[["a"], [-1]]], [[["a"], [True]]]]


@pytest.mark.parametrize("orders", [*NO_ORDERS, *([[ids, []]] for ids in NO_IDS)])
def test_ids_that_are_none_are_refused(orders: Any) -> None:
    data = {**state_of(3).model_dump(mode="json"), "orders": orders}
    with pytest.raises(ValueError, match="ids"):
        State.model_validate(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": "x"}, "the snapshot is malformed: budget must be a valid integer, got 'x'"),
        ({"bugdet": 3}, "the snapshot is malformed: bugdet must be left out: there is no such field"),
        ({"fidelity": {"rank": 0}}, "the snapshot is malformed: fidelity: rank must be >= 1, got 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change: dict[str, Any], said: str) -> None:
    data = {**state_of(3).model_dump(mode="json"), **change}
    for snapshot in (data, json.dumps(data)):
        with pytest.raises(ValueError) as refused:
            Window.restore(FakeEngine(), snapshot)
        assert str(refused.value) == said
    with pytest.raises(ValueError, match=r"^the snapshot is malformed: Invalid JSON: "):
        Window.restore(FakeEngine(), "{")


def test_it_has_a_json_schema() -> None:
    schema = State.model_json_schema()
    data = state_of(7).model_dump(mode="json")
    assert schema["properties"]["placed"]["type"] == "array" and data.keys() <= {*schema["properties"], "orders"}
    assert schema["$defs"]["Conditioning"]["properties"]["antecedents"]["type"] == "array"
