"""`PrefixUser`: what stands in the prompt of a user of a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxwin.baselines.policies import NAMES, POLICIES, PrefixUser


def most(count: int) -> Callable[[Sequence[int]], bool]:
    return lambda held: len(held) <= count


def test_the_older_half_leaves_a_full_prompt() -> None:
    user = PrefixUser[int]("trim")
    for frame in range(5):
        user.arrive(frame, most(4))
    assert user.held == [2, 3, 4]
    user.arrive(5, most(4))
    assert user.held == [2, 3, 4, 5]
    assert user.seen == set(range(6))


def test_room_is_made_until_what_comes_fits() -> None:
    sizes = {0: 1, 1: 1, 2: 1, 3: 9}
    user = PrefixUser("trim", [0, 1, 2])
    user.arrive(3, lambda held: sum(sizes[one] for one in held) <= 10)
    assert user.held == [2, 3]
    user.arrive(4, lambda held: len(held) < 2)
    assert user.held == [4]


def test_what_is_larger_than_the_prompt_stands_alone() -> None:
    user = PrefixUser("trim", [0, 1, 2])
    user.arrive(3, lambda held: False)
    assert user.held == [3]


def test_several_come_in_together_and_as_many_leave_at_least() -> None:
    user = PrefixUser("append", [0, 1, 2, 3, 4])
    user.make_room([7, 8], most(6), drop=3)
    assert user.held == [3, 4]
    user.make_room([7, 8], most(3), drop=1)
    assert user.held == []


def test_a_chunk_that_is_held_does_not_move() -> None:
    user = PrefixUser("append", [0, 1, 2])
    user.arrive(0, most(3))
    assert user.held == [0, 1, 2]


@pytest.mark.parametrize(
    ("later", "held"), [((), [1, 3, 4, 2]), ((3, 4), [1, 2, 3, 4]), ((4,), [1, 3, 2, 4]), ((9,), [1, 3, 4, 2])]
)
def test_a_chunk_stands_in_front_of_what_is_later(later: tuple[int, ...], held: list[int]) -> None:
    user = PrefixUser("trim", [1, 3, 4])
    user.place(2, before=later)
    assert user.held == held


def test_a_branch_changes_nothing_in_its_parent() -> None:
    user = PrefixUser("trim", [0, 1, 2])
    branch = user.copy()
    branch.leave([1])
    branch.arrive(3, most(9))
    assert (user.held, user.seen) == ([0, 1, 2], set())
    assert branch.held == [0, 2, 3]


@given(held=st.lists(st.integers(0, 9), unique=True), order=st.permutations(range(5)))
def test_an_order_puts_what_it_does_not_name_in_front(held: list[int], order: list[int]) -> None:
    user = PrefixUser("trim", list(held))
    user.reorder(order)
    assert user.held == [i for i in held if i >= 5] + [i for i in order if i in held]


def test_every_policy_has_a_name() -> None:
    assert set(NAMES) == set(POLICIES)
