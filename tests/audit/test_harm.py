"""The value of an answer: spellings of one are equal, others are not, and open text has none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxwin.audit.harm import CAP, Harm, value_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "spellings",
    [
        ("7", "7.", " 7.0\n", "The answer is 7", "answer: 7", "<think>6? no, 8</think>7"),
        ("1,234.50", "1234.5", "$1,234.50"),
        ("-3", "-3 %"),
        ("B", "b.", "(B)", "B) a red car", "Final answer: B"),
        ("red", "Red.", "the red"),
        ("Yes", "yes!"),
        ("an old stove", "Old stove"),
        ('{"a": 1, "b": [2]}', '{"b":[2.0],"a":1}', '```json\n{"a": 1, "b": [2]}\n```'),
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
            '<tool_call>\n{"arguments":{"x":1},"name":"f"}\n</tool_call>',
        ),
    ],
)
def test_spellings_of_one_value_are_equal(spellings: tuple[str, ...]) -> None:
    assert value_of(spellings[0]) is not None
    assert {value_of(text) for text in spellings} == {value_of(spellings[0])}


def test_other_values_are_others() -> None:
    texts = [
        "7",
        "70",
        "-7",
        "0.7",
        "A",
        "B",
        "red",
        "red car",
        '{"a": 1}',
        '{"a": true}',
        '{"a": "1"}',
        "[1]",
        "[[1]]",
        "yes",
    ]
    values = [value_of(text) for text in texts]
    assert None not in values and len(set(values)) == len(texts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "It shows a red car.",
        "the stove, which is old, and two more",
        '{"a": ',
        "...",
        "A. Smith came by train today",
    ],
)
def test_open_text_has_no_value(text: str) -> None:
    assert value_of(text) is None


def test_what_was_cut_off_has_a_value_only_if_it_is_whole() -> None:
    assert value_of("12", complete=False) is value_of("re", complete=False) is None
    assert value_of('{"a": 12}', complete=False) == value_of('{"a":12}')


@given(JSON.filter(lambda value: isinstance(value, dict | list)))
def test_json_is_equal_in_any_spelling(value: object) -> None:
    found = value_of(json.dumps(value, indent=2, ensure_ascii=False))
    assert found is not None and found == value_of(json.dumps(value, sort_keys=True))


@given(st.text(max_size=80) | st.from_regex(r"[-+]?[0-9]{0,400}([.]?[eE][0-9]{0,12})?", fullmatch=True))
def test_no_text_is_too_odd(text: str) -> None:
    found = value_of(text)
    assert found is None or value_of(f"  {text} ") == found


def test_harm_as_a_number() -> None:
    assert [Harm("text", amount).share for amount in (-0.1, 0.0, CAP / 2, 3 * CAP)] == [0.0, 0.0, 0.5, 1.0]
    assert [Harm("scored", amount).share for amount in (0.0, 1.0)] == [0.0, 1.0]
    assert str(Harm("text", 0.012)) == "+0.012 nats a token beyond the floor"
    assert str(Harm("scored", 0.0, undecided=True)) == "exact answers disagree about its value"
