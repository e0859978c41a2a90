"""What arms say they compute when the question comes is what goes through the decoder then."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ctxwin import Fidelity, Window
from ctxwin.kv.patch import apply_patch
from ctxwin.kv.relocate import relocate
from ctxwin.window.layout import Work
from ctxwin_evals.arms import BASES, parse_arm
from ctxwin_evals.decoder import Decoder
from ctxwin_evals.tasks.tiny import TASKS

from .conftest import HEADER

if TYPE_CHECKING:
    from ctxwin_evals.arms import Arm, Served
    from ctxwin_evals.group import Group

    from .conftest import Bench

WINDOW = (
    "reprefill", "blind", "patched:2", "orbit:2", "toggled", "first_k:2", "epic:3", "mpic:2", "full-reuse",
    "cacheblend-oracle:0.3", "layers:0.5", "lowrank-k:2", "elastic:0.5", "h2o:0.5@prompt",
    "merged:0.5",
)  # fmt: skip
SLIDE = ("reprefill", "blind", "survivor", "removal:2", "mpic:2")
RECALL = ("reprefill", "blind", "stale:2", "update:2", "refresh:2", "layers:0.5")
FOUND = ("toggled", "cacheblend-oracle:0.3", "layers:0.5", "lowrank-k:2")
"""Arms for which exact KV lies there when the question comes (as for all of a recall): what they look at, or resident chunks."""
CASES = [
    *(("multi_hop", 0.0, arm) for arm in WINDOW),
    *(("slide_needed", 0.0, arm) for arm in SLIDE),
    *(("history", 4.0, arm) for arm in ("survivor", "removal:2", "blind")),
    *(("recall", 0.4, arm) for arm in RECALL),
]


def single(bench: Bench, task: str, amount: float) -> Group:
    return bench.of([TASKS[task].case(3, 1, (4,), amount)])


def on_task(name: str, task: str) -> Arm:
    setting = TASKS[task].setting
    return BASES[setting] if name == BASES[setting].name else parse_arm(name).on(setting)


@pytest.mark.parametrize(("task", "amount", "name"), CASES)
def test_what_runs_when_asked_again_is_what_is_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, task: str, amount: float, name: str
) -> None:
    group, arm = single(bench, task, amount), on_task(name, task)
    first = arm.serve(group)[0]
    assert first is not None
    # Canonicals, patches and the KV before an edit stay stored; KV of placed chunks does not, unless it lies there.
    found = name in FOUND or (task == "recall" and name != "reprefill")
    for kind in ("blind", "survivors") if found else ("blind", "survivors", "exact"):
        group.__dict__.pop(kind, None)
    ran = 0
    run = Decoder.run

    def counted(self: Decoder, tokens: Any, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal ran
        layers = options.get("layers")
        ran += tokens.count * int(tokens.embeds.shape[0]) * (self.layers if layers is None else len(layers))
        return run(self, tokens, *args, **options)

    monkeypatch.setattr(Decoder, "run", counted)
    second = arm.serve(group)[0]
    assert second is not None
    assert -(-ran // bench.decoder.layers) == second.computed == first.computed
    same(first, second)


def same(first: Served, second: Served) -> None:
    assert len(first.spans) == len(second.spans)
    for a, b in zip(first.spans, second.spans, strict=True):
        torch.testing.assert_close(a.k, b.k, atol=1e-5, rtol=0)
        torch.testing.assert_close(a.v, b.v, atol=1e-5, rtol=0)


def test_survivors_of_a_stream_turn_from_where_they_were_formed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is turned slide after slide is rounded every time; in bfloat16 that would be most of its error."""
    from ctxwin_evals import group as module

    moves = []
    relocate = module.relocate
    monkeypatch.setattr(module, "relocate", lambda span, *rest: moves.append(span) or relocate(span, *rest))
    group = single(bench, "history", 4.0)
    formed = group._streamed[0]
    # The oldest of the four was met at three slides; each time it turned from the same frame.
    starts = [span.start for span in moves if span.v is formed[0].v]
    assert len(starts) == 3 and len(set(starts)) == 1
    assert [span.start for span in group.survivors[0]] == [p.start for p in group.places]


@pytest.mark.parametrize(
    ("task", "name", "chunks"),
    [
        ("multi_hop", "patched:2", 3),
        ("slide_needed", "removal:2", 3),
        ("recall", "stale:2", 0),
        ("recall", "update:2", 1),
        ("recall", "refresh:2", 1),
    ],
)
def test_what_is_formed_once_is_counted_apart(bench: Bench, task: str, name: str, chunks: int) -> None:
    group = single(bench, task, 0.4 if task == "recall" else 0.0)
    one = on_task(name, task).serve(group)[0]
    assert one is not None and one.computed == 0
    assert one.extra["formed"] == chunks * group.places[0].tokens


def test_an_orbit_is_formed_behind_every_order_that_is_averaged(bench: Bench) -> None:
    item = TASKS["multi_hop"].case(3, 1, (4,), 0.0)
    group = bench.of([replace(item, asked=3)])
    one = parse_arm("orbit:2").serve(group)[0]
    assert one is not None
    tokens = group.places[0].tokens
    assert one.extra["formed"] == 2 * tokens + 5 * 4 * tokens  # the two others, and five orders of three and itself


def test_orbits_serve_what_a_window_has_prepared(bench: Bench) -> None:
    """At full rank, in an order that was not computed; as many forwards as antecedents form it, or all other orders of each."""
    item = TASKS["multi_hop"].case(3, 1, (4,), 0.0)
    item = replace(item, asked=3, before=(1, 2, 0, 3))
    group, chunks = bench.of([item]), item.load()
    prepared, mean = (parse_arm(name).serve(group)[0] for name in ("orbits:64", "orbits:64@24"))
    assert prepared is not None and mean is not None
    tokens = group.places[0].tokens
    assert prepared.extra["formed"] == 3 * 4 * tokens
    assert mean.extra["formed"] == (5 * 4 + 2) * tokens  # the one order of a pair begins no other of three
    fidelity = Fidelity("patched", rank=64, orbit=True, advanced={"forbid": ("survivor", "patched"), "layout": "joint"})
    with Window(bench.decoder.engine, HEADER, fidelity=fidelity) as window:
        ids = dict(zip(item.before, window.extend([chunks[frame] for frame in item.before]), strict=True))
        window.maintenance.prepare_orbit([ids[frame] for frame in item.before[:3]])
        window.reorder([ids[frame] for frame in item.placed])
        layout = window.core.assembly.build_layout(window.snapshot(), fidelity, Work())
    for segment, place, span in zip(layout.segments[1:], group.places, prepared.spans, strict=True):
        assert segment.span is not None and (segment.patch is not None or not place.slot)
        moved = relocate(segment.span, group.spec, place.start)
        own = moved if segment.patch is None else apply_patch(moved, segment.patch, group.spec, place.start)
        torch.testing.assert_close(own.v, span.v, atol=0.02, rtol=0.02)
        torch.testing.assert_close(own.k, span.k, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["elastic:0.5", "h2o:0.5", "local:0.5"])
def test_thinned_out_chunks_are_what_is_stored(bench: Bench, name: str) -> None:
    group = single(bench, "multi_hop", 0.0)
    one = parse_arm(name).serve(group)[0]
    assert one is not None
    assert one.stored / one.over == pytest.approx(one.extra["kv_share"])
    behind = parse_arm(f"{name}@prompt").serve(group)[0]
    assert behind is not None and (behind.stored, behind.over, behind.computed) == (0, one.over, group.context_tokens)
