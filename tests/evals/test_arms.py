from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxwin_evals.arms import ARM_FORMS, ARMS, BASES, parse_arm, parse_arms
from ctxwin_evals.arms.recall import Recall, Stale, Update
from ctxwin_evals.arms.reuse import Blind, Orbit, Patched, Transfer
from ctxwin_evals.arms.tokens import FirstK
from ctxwin_evals.patching import parse_variant
from ctxwin_evals.run import plan_jobs
from ctxwin_evals.tasks import expand, open_task
from ctxwin_evals.tasks.edits import other_orders


def test_every_form_parses() -> None:
    assert parse_arm("blind") == Blind("blind")
    assert parse_arm(" patched:12 ") == Patched("patched:12", 12)
    assert parse_arm("patched:full").rank is None
    assert parse_arm("first_k:0") == FirstK("first_k:0", 0)
    assert parse_arm("first_k:all") == FirstK("first_k:all", None)
    assert parse_arm("update:8") == Update("", 8)
    assert parse_arm("stale:full") == Stale("", None)
    assert parse_arm("stale:full@.5") == Stale("", None, 0.5) != Stale("", None)
    assert parse_arm("recall:8@0.25") == Recall("", 8, 0.25)
    assert parse_arm("patched:8@deep") == Patched("", 8, "deep") != Patched("", 8)
    assert parse_arm("patched:8@25-100") == Patched("", 8, "25-100")
    assert parse_variant("shared+25-75+output") == ("shared", (0.25, 0.75), "output")
    assert parse_arm("patched:8@shared+deep+output").name == "patched:8@shared+deep+output"
    assert parse_arm("transfer:4") == Transfer("", 4) != Orbit("", 4)
    assert [a.name for a in parse_arms("reprefill,removal:3, survivor,")] == ["reprefill", "removal:3", "survivor"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500))
def test_any_rank(rank: int) -> None:
    assert parse_arm(f"update:{rank}").rank == rank


def test_every_arm_says_what_it_is() -> None:
    for head, kind in ARMS.items():
        assert kind.form.partition(":")[0] == head
        assert kind.form in ARM_FORMS
        assert kind.source and kind.settings and (kind.__doc__ or "").strip()


@pytest.mark.parametrize(
    "text",
    ["patched", "patched:", "patched:-1", "patched:x", "patched:1.5", "blind:3", "blind:", "first_k:full",
     "first_k", "stale:8@1.5", "stale:8@", "recall:8", "recall:8@-0.5", "removal:all", "orbit:8@0.5", "kamera",
     "patched:8 8", "patched:8@", "patched:8@deeper", "patched:8@joint+shared", "patched:8@deep+deep",
     "patched:8@75-25", "patched:8@25-125", "patched:8@deep+0-50", "patched:8@-50"],
)  # fmt: skip
def test_a_bad_arm_is_named_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="an arm must be one of") as caught:
        parse_arm(text)
    assert repr(text) in str(caught.value)
    assert "stale:M" in str(caught.value)


def test_lists_must_hold_each_arm_once() -> None:
    with pytest.raises(ValueError, match="at least one"):
        parse_arms(" , ")
    with pytest.raises(ValueError, match="once each, got patched:4"):
        parse_arms("patched:4,blind,patched:4")
    with pytest.raises(ValueError, match=r"once each, got patched:04, quest:\.50 again"):
        parse_arms("patched:4,patched:04,patched:4@deep,quest:0.5,quest:.50")


def test_arms_run_on_the_tasks_of_their_setting() -> None:
    tasks = [open_task(name) for name in (*expand("tiny"), "tiny/slide_needed", "tiny/recall@0.5", "tiny/recall@1")]
    jobs = plan_jobs(parse_arms("blind,patched:4,survivor,stale:8,update:8"), tasks)
    found = {job.task.name: [a.name for a in job.arms] for job in jobs}
    assert found == {
        **{name: ["blind", "patched:4"] for name in expand("tiny")},
        "tiny/slide_needed": ["blind", "survivor"],
        "tiny/recall@0.5": ["blind", "stale:8", "update:8"],
        "tiny/recall@1": ["blind", "stale:8", "update:8"],
    }
    assert jobs[-1].arms[0] == BASES["recall"]
    with pytest.raises(ValueError, match="stale:8 needs a task of setting recall"):
        plan_jobs(parse_arms("blind,stale:8"), tasks[:1])


def test_unknown_tasks_are_named_with_the_known() -> None:
    for bad in ("tiny/multihop", "tiny/recall", "tiny/order@0.5", "tiny/recall@2", "tiny/recall@x", "other"):
        with pytest.raises(ValueError, match=r"must be|belongs to"):
            open_task(bad)
    with pytest.raises(ValueError, match="at least one"):
        expand(" ,")
    assert expand("tiny/order,tiny")[0] == "tiny/order"
    assert len(set(expand("tiny/order,tiny"))) == 4


def test_orders_leave_out_the_one_that_is_served() -> None:
    assert other_orders((4,), 6, 0) == []
    assert other_orders((4, 2), 6, 0) == [(2, 4)]
    assert len(other_orders((0, 1, 2), 6, 0)) == 5
    for seed in range(20):
        some = other_orders((0, 1, 2, 3), 6, seed)
        assert len(set(some)) == 6
        assert (0, 1, 2, 3) not in some
    assert other_orders((0, 1, 2, 3), 6, 1) == other_orders((0, 1, 2, 3), 6, 1) != other_orders((0, 1, 2, 3), 6, 2)
