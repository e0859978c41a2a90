"""Predictions of the next request without an engine: agents with a habit are foreseen, others are soon left alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chats.test_lazy_drops import DIALECTS, TURNS, Group, body, chat, in_one
from ctxwin_chats.options import AS_SENT
from ctxwin_chats.prediction import Foresight, Histories, Prediction

KEEPS = st.integers(1, 4)


def memory() -> tuple[Histories, list[Prediction]]:
    missed: list[Prediction] = []
    return Histories(64, 1e9, missed.append), missed


def follow(histories: Histories, sent: dict[str, Any], name: str = "n", room: int | None = None) -> Foresight:
    """What is foreseen behind a body; what the server then does to that must not reach the prediction."""
    data = copy.deepcopy(sent)
    foresight = histories.follow(data, data.get("messages", data.get("input")), name, room)
    for turn in data.get("messages", data.get("input")):
        for part in turn.get("content") or () if isinstance(turn.get("content"), list) else ():
            part["uuid"] = "a tenant's"
    return foresight


def narrowed(groups: list[Group], habit: str, keep: int) -> list[Group]:
    """What an agent with a habit sends of its history: that of a tool's pictures is a text or nothing, as its user's."""
    if habit == "drop":
        return groups[-keep:]
    return [*(replace(group, look=habit) for group in groups[:-keep]), *groups[-keep:]]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DIALECTS),
    st.sampled_from(["drop", "text", "gone"]),
    KEEPS,
    st.sampled_from(["user", "tool"]),
    st.booleans(),
)
def test_an_agent_with_a_habit_is_foreseen_from_its_second_change_on(
    dialect: str, habit: str, keep: int, kind: str, named: bool
) -> None:
    """Agents of users' turns or tools' turns, which change one group at a time."""
    keep += habit != "text"  # behind one picture that leaves, nothing is new
    histories, missed = memory()
    groups: list[Group] = []
    expected: list[Any] | None = None
    for turn in range(keep + 6):
        groups.append(Group(kind, turn))
        sent = body(dialect, narrowed(groups, habit, keep))
        foresight = follow(histories, sent, "n" if named else "")
        turns = sent[TURNS[dialect]]
        if expected is not None:
            assert turns[: len(expected)] == expected and foresight.hit and foresight.current is not None
        else:
            assert foresight.current is None
        changes = turn >= keep
        assert (foresight.next is not None) == changes
        if foresight.next is not None:
            expected = foresight.next.body[TURNS[dialect]]
            assert foresight.next.body == sent | {TURNS[dialect]: expected}
    assert not missed


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(DIALECTS), st.sampled_from(["drop", "text", "gone"]), KEEPS, st.integers(2, 4), st.booleans())
def test_changes_of_several_groups_at_once_are_foreseen_when_they_are_due(
    dialect: str, habit: str, keep: int, batch: int, named: bool
) -> None:
    """Agents that let ``batch`` more groups come before they change as many: from their second batch on."""
    keep += habit != "text"
    histories, missed = memory()
    groups: list[Group] = []
    expected: list[Any] | None = None
    predicted = []
    for turn in range(keep + 4 * batch + 1):
        groups.append(Group("user", turn))
        changed = max(0, turn + 1 - keep) // batch * batch
        sent = body(dialect, narrowed(groups, habit, turn + 1 - changed))
        foresight = follow(histories, sent, "n" if named else "")
        turns = sent[TURNS[dialect]]
        assert foresight.hit == (expected is not None)
        if expected is not None:
            assert turns[: len(expected)] == expected
        expected = None
        if foresight.next is not None:
            predicted.append(turn + 1)
            expected = foresight.next.body[TURNS[dialect]]
    assert predicted == [turn for turn in range(keep + 2 * batch - 1, keep + 4 * batch + 2, batch)] and not missed


@pytest.mark.parametrize("ask", ["question {}", "What next?"])
def test_pictures_in_one_message_are_foreseen_up_to_the_question(ask: str) -> None:
    histories, _ = memory()
    expected: list[Any] = []
    for turn in range(5):
        sent = in_one(turn, turn + 4, ask.format(turn))
        foresight = follow(histories, sent)
        assert foresight.hit == (turn > 1)
        parts = sent["messages"][-1]["content"]
        assert parts[: len(expected)] == expected
        if foresight.next is not None:
            *expected, question = foresight.next.body["messages"][-1]["content"]
            assert question == parts[-1] and expected == parts[2:-1]


def dropped(first: int, last: int) -> dict[str, Any]:
    return body("chat", [Group("user", number) for number in range(first, last)])


def test_what_was_wrong_is_computed_again_once_it_was_right_twice() -> None:
    histories, _ = memory()
    seen = [follow(histories, dropped(first, 12 + turn)) for turn, first in enumerate((0, 1, 3, 5, 7, 9))]
    assert [one.hit for one in seen] == [False, False, False, True, True, True]  # one leaves, then two each time
    assert [one.current is not None for one in seen] == [False, False, True, True, True, True]
    assert [bool(one.next and one.next.body) for one in seen] == [False, True, False, False, True, True]


def test_who_drops_nothing_is_not_predicted_and_the_same_request_again_changes_nothing() -> None:
    histories, missed = memory()
    for last in range(1, 5):
        assert follow(histories, dropped(0, last)) == Foresight()
    first = follow(histories, dropped(1, 5)).next
    assert first is not None
    assert follow(histories, dropped(1, 5)) == Foresight() and not first.cancelled
    foresight = follow(histories, dropped(2, 6))
    assert foresight.hit and foresight.current is first and first.cancelled and not missed


def test_an_edited_history_is_another_one_and_what_was_predicted_is_missed_once_forgotten() -> None:
    histories, missed = memory()
    follow(histories, dropped(0, 3))
    prediction = follow(histories, dropped(1, 4)).next
    assert follow(histories, chat({"role": "user", "content": "something else"})) == Foresight()
    assert not missed
    histories.forget("n")
    assert missed == [prediction] and missed[0].cancelled


def test_many_conversations_without_a_name_are_told_apart() -> None:
    histories, _ = memory()

    def sent(agent: int, first: int) -> dict[str, Any]:
        return body("chat", [Group("user", 100 * agent + number) for number in range(first, first + 3)])

    for first in range(4):
        for agent in range(20):
            foresight = follow(histories, sent(agent, first), "")
            assert foresight.hit == (first > 1)
            if foresight.next is not None:
                wanted = sent(agent, first + 1)["messages"]
                expected = foresight.next.body["messages"]
                assert wanted[: len(expected)] == expected


@pytest.mark.parametrize(("room", "predicted"), [(None, True), (0, True), (1, False)])
def test_lazy_drops_are_predicted_where_the_next_one_exceeds_their_bound(room: int | None, predicted: bool) -> None:
    histories, _ = memory()
    follow(histories, dropped(0, 4), room=room)
    assert (follow(histories, dropped(1, 5), room=room).next is not None) == predicted


def test_a_prompt_that_is_not_in_the_body_is_not_predicted() -> None:
    histories, _ = memory()
    for first in range(3):
        sent = dropped(first, first + 3) | {"truncate_prompt_tokens": 100}
        assert follow(histories, sent) == Foresight()


def test_a_setting_is_idle_or_off() -> None:
    assert AS_SENT.replace({"prefill": "idle"}).prefill and not AS_SENT.replace({"prefill": "off"}).prefill
    with pytest.raises(ValueError, match="prefill must be idle or off, got 'on'"):
        AS_SENT.replace({"prefill": "on"})
