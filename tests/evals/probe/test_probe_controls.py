"""What the probe's controls are by definition, whatever the model; on random ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from ctxwin.evals.arms import parse_arm
from ctxwin.evals.decoder import Decoder
from ctxwin.evals.generation import continue_, forced_logits
from ctxwin.evals.patching import Patcher
from ctxwin.evals.probe import moving
from ctxwin.evals.probe.arms import Oracle, Stepwise
from ctxwin.evals.probe.asking import Asker, divergence
from ctxwin.evals.probe.contexts import PLACED, Source
from ctxwin.evals.probe.folder import Texts
from ctxwin.evals.probe.generated import World
from ctxwin.evals.probe.listen import Clock, Listener, bare
from ctxwin.evals.probe.patchers import make_patcher, spelling, variants
from ctxwin.evals.probe.reading import read

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


def heard_by(engine: HFEngine, source: Source) -> Listener:
    decoder = Decoder(engine)
    return Listener(decoder, Patcher(decoder.spec, dtype=torch.float32), source.system_prompt, source.max_tokens)


@pytest.fixture(scope="module")
def world(engine: HFEngine) -> Listener:
    return heard_by(engine, World())


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Listener, Source]]:
    """Latent attention, reading text."""
    from ctxwin.engines.hf.engine import HFEngine
    from engines.models import write_mla_model

    folder = tmp_path_factory.mktemp("latent")
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("what color is the shape of a frame now " * 60)
    engine = HFEngine(write_mla_model(folder / "model"), dtype="float32")
    source = Texts(texts, [], 4, engine, block=16)
    yield heard_by(engine, source), source
    engine.close()


def check_oracle(listener: Listener, source: Source) -> None:
    group = listener.group([bare(source.context("reading", i).item) for i in range(2)])
    oracle = Oracle("oracle").serve(group)
    lead = group.system_prompt_span.tokens
    for number, place in enumerate(group.places):
        tokens = group.row([[number]] * 2)
        here = tokens.moved(place.start - group.layout([number])[0].start)
        memory, _ = listener.decoder.append(here, group.behind_system_prompt(2))
        for b in range(2):
            made = oracle[b]
            assert made is not None
            torch.testing.assert_close(
                made.spans[number].v, memory.v[:, b, :, lead:].transpose(1, 2), atol=1e-5, rtol=0
            )
            torch.testing.assert_close(
                made.spans[number].k, memory.k[:, b, :, lead:].transpose(1, 2), atol=1e-4, rtol=0
            )


def test_under_the_oracle_every_chunk_is_computed_behind_the_header_alone_at_its_own_place(world: Listener) -> None:
    check_oracle(world, World())


def test_the_oracle_holds_for_latent_attention_and_text(latent: tuple[Listener, Source]) -> None:
    check_oracle(*latent)


def test_the_first_chunk_loses_nothing_and_later_ones_do(world: Listener) -> None:
    group = world.group([bare(World().context("reading", 0).item)])
    oracle = Oracle("oracle").serve(group)[0]
    assert oracle is not None
    torch.testing.assert_close(oracle.spans[0].v, group.exact[0][0].v, atol=1e-5, rtol=0)
    assert (oracle.spans[2].v - group.exact[0][2].v).abs().max() > 1e-3


def test_stepwise_is_a_reprefill(latent: tuple[Listener, Source]) -> None:
    listener, source = latent
    group = listener.group([bare(source.context("reading", i).item) for i in range(2)])
    for b, made in enumerate(Stepwise("stepwise").serve(group)):
        assert made is not None
        for ours, theirs in zip(made.spans, group.exact[b], strict=True):
            torch.testing.assert_close(ours.k, theirs.k, atol=1e-4, rtol=0)
            torch.testing.assert_close(ours.v, theirs.v, atol=1e-5, rtol=0)


def test_every_way_to_compress_serves_latent_attention_and_a_full_one_is_exact(latent: tuple[Listener, Source]) -> None:
    listener, source = latent
    listener.patcher = make_patcher(listener, lambda: source.contexts("fitting", 2))
    ways = variants(listener.decoder.spec, True)
    assert "output" not in ways and "shared" in ways, "an output weight needs values by head"
    arms = [parse_arm(spelling(rank, way)) for way in ways for rank in (1, 64)]
    heard = [h for h in listener.hear(source.contexts("choosing", 2), arms, kinds=("cross",))]
    assert len(heard) == 2 * len(arms)
    full = [h.kl for h in heard if h.arm in ("patched:64", "patched:64@per_layer", "patched:64@balanced")]
    assert max(full) < 1e-4 < max(h.kl for h in heard if h.arm == "patched:1")
    assert all(0 < h.stored < h.over for h in heard if h.arm.startswith("patched:1@"))


def test_batched_answers_are_those_of_one_item_at_a_time(world: Listener) -> None:
    decoder = world.decoder
    asker = Asker(decoder, 5)
    group = world.group([bare(World().context("reading", i).item) for i in range(3)])
    memory = group.memory(group.exact)
    texts = ["color of 17?", "what is the number of the red square?", "shape of 23?"]
    answers = asker.greedy(memory, texts, group.begin)
    said = asker.forced(memory, texts, group.begin, [answers[0], answers[1][:2], answers[2]])
    for b, text in enumerate(texts):
        alone = group.memory([group.exact[b]])
        one = continue_(decoder, alone, decoder.query(text), group.begin, max_tokens=5)
        ends = decoder.engine._checkpoint.eos
        assert [t for t in answers[b] if t not in ends] == one.token_ids
        forced = answers[b][:2] if b == 1 else answers[b]
        want = forced_logits(decoder, alone, decoder.query(text), group.begin, forced).double().log_softmax(-1)
        assert said[b].shape == want.shape
        torch.testing.assert_close(said[b], want, atol=1e-4, rtol=0)


def test_divergence_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    q = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log()
    assert divergence(p, q).item() == pytest.approx(0.5 * torch.tensor(2.0).log().item())
    assert divergence(p, p).item() == 0


def test_a_full_patch_and_a_reprefill_say_the_same_and_blind_reuse_follows_the_oracle(world: Listener) -> None:
    contexts = World().contexts("choosing", 3)
    arms = [Oracle("oracle"), *(parse_arm(name) for name in ("blind", "patched:full", "reprefill"))]
    heard = list(world.hear(contexts, arms))
    assert len(heard) == 4 * 3 * 2
    assert max(h.kl for h in heard if h.arm in ("patched:full", "reprefill")) < 1e-6
    assert not any(h.flip for h in heard if h.arm in ("patched:full", "reprefill"))
    assert max(h.kl for h in heard if h.arm == "blind") > 1e-5
    assert max(h.control for h in heard if h.arm == "oracle" and h.control is not None) == 0
    assert all(h.control is not None for h in heard)


def test_swapping_nothing_moves_nothing_and_swapping_something_does(world: Listener) -> None:
    readings = read(world, World().contexts("reading", 2), Clock(1e9), float("inf"))
    assert len(readings) == 4
    assert all(len(r.moved) == PLACED and max(r.moved) > 0 for r in readings)
    assert {r.kind for r in readings} == {"one", "cross"}


def test_a_window_that_has_not_lost_anything_needed_is_exact_after_a_recall_of_the_same(world: Listener) -> None:
    found = moving.recall(world, World().contexts("choosing", 2), 66, "all")
    assert max(h.kl for h in found[0] if h.arm.startswith(("stale", "update"))) < 1e-4
    assert max(h.kl for h in found[PLACED - 1] if h.arm.startswith("update")) < 1e-4
    assert max(h.kl for h in found[PLACED - 1] if h.arm.startswith("stale")) > 1e-4


def test_survivors_are_measured_at_every_slide(world: Listener) -> None:
    slid = moving.slide(world, [World().stream(i, 2) for i in range(2)], Clock(1e9), float("inf"))
    assert sorted((s.slides, s.cluster) for s in slid) == [
        (1, "stream-0"), (1, "stream-1"), (2, "stream-0"), (2, "stream-1"),
    ]  # fmt: skip
    assert all(s.window > 0 for s in slid), "a random model's survivors never equal a re-prefill"
    rows = moving.survival(slid)
    assert [row["n"] for row in rows] == [2, 2]
