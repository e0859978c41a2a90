from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin.evals.arms import (
    Blind,
    FirstK,
    Orbit,
    Patched,
    Recall,
    Stale,
    Transfer,
    other_orders,
    parse_arm,
    parse_arms,
)
from ctxwin.evals.run import plan_jobs
from ctxwin.evals.tasks import WORLD_TASKS


def test_every_form_parses() -> None:
    assert parse_arm("blind") == Blind("blind")
    assert parse_arm(" patched:12 ") == Patched("patched:12", 12)
    assert parse_arm("patched:full").rank is None
    assert parse_arm("first_k:0") == FirstK("first_k:0", 0)
    assert parse_arm("first_k:all") == FirstK("first_k:all", None)
    assert parse_arm("recall:8@0.25") == Recall("", 8, 0.25)
    assert parse_arm("stale:full@.5") == Stale("", None, 0.5)
    assert parse_arm("transfer:4") == Transfer("", 4) != Orbit("", 4)
    assert [a.name for a in parse_arms("reprefill,removal:3, survivor,")] == ["reprefill", "removal:3", "survivor"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500), st.integers(0, 10_000))
def test_any_rank_and_turnover(rank: int, turn: int) -> None:
    arm = parse_arm(f"recall:{rank}@{turn / 10_000}")
    assert (arm.rank, arm.turnover) == (rank, turn / 10_000)


@pytest.mark.parametrize(
    "text",
    ["patched", "patched:", "patched:-1", "patched:x", "patched:1.5", "blind:3", "first_k:full", "first_k", "recall:8",
     "recall:8@", "recall:8@1.1", "stale:8@-0.5", "removal:all", "orbit:8@0.5", "kamera", "patched:8 8"],
)  # fmt: skip
def test_a_bad_arm_is_named_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="an arm must be one of") as caught:
        parse_arm(text)
    assert repr(text) in str(caught.value)
    assert "stale:M@T" in str(caught.value)


def test_lists_must_hold_each_arm_once() -> None:
    with pytest.raises(ValueError, match="at least one"):
        parse_arms(" , ")
    with pytest.raises(ValueError, match="once each, got patched:4"):
        parse_arms("patched:4,blind,patched:4")


def test_arms_bring_the_tasks_of_their_setting() -> None:
    jobs = plan_jobs(parse_arms("blind,survivor,stale:8@0.5,recall:8@0.5,recall:8@1"), WORLD_TASKS)
    found = {(job.task.name, job.turnover): [a.name for a in job.arms] for job in jobs}
    assert found == {
        **{(task, 0.0): ["blind"] for task in WORLD_TASKS},
        ("slide_distractor", 0.0): ["survivor"],
        ("slide_needed", 0.0): ["survivor"],
        ("recall", 0.5): ["stale:8@0.5", "recall:8@0.5"],
        ("recall", 1.0): ["recall:8@1"],
    }
    only = plan_jobs(parse_arms("blind,survivor"), ["slide_needed"])
    assert [(j.task.name, [a.name for a in j.arms]) for j in only] == [("slide_needed", ["blind", "survivor"])]
    with pytest.raises(ValueError, match="tasks must be among single_hop"):
        plan_jobs(parse_arms("blind"), ["multihop"])


def test_orders_leave_out_the_one_that_is_served() -> None:
    assert other_orders((4,), 6, 0) == []
    assert other_orders((4, 2), 6, 0) == [(2, 4)]
    assert len(other_orders((0, 1, 2), 6, 0)) == 5
    for seed in range(20):
        some = other_orders((0, 1, 2, 3), 6, seed)
        assert len(set(some)) == 6
        assert (0, 1, 2, 3) not in some
    assert other_orders((0, 1, 2, 3), 6, 1) == other_orders((0, 1, 2, 3), 6, 1) != other_orders((0, 1, 2, 3), 6, 2)
