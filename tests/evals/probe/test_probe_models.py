"""Three models, three verdicts: the bundled one binds at prefill, another chains at query time, a random one says nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from ctxwin.fidelity import Fidelity
from ctxwin.kv.patch import select_layers
from ctxwin.tiny import checkpoint_dir
from ctxwin_evals.patching import parse_depth
from ctxwin_evals.probe import probe, structure
from ctxwin_evals.probe.depth import ENDS, name_range, shortest_ranges
from ctxwin_evals.probe.generated import Scenes, World
from ctxwin_evals.probe.probe import Probe, Sizes, as_profile
from ctxwin_evals.probe.report import html
from ctxwin_evals.probe.verdict import Limits

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine

CHAINING = Path(__file__).parents[2] / "models" / "chaining"
SMALL = Sizes(
    reading=24, looks=(16, 48), choosing=6, proving=24, fitting=2, survivors=8, streams=2, slides=2, moving=2, layouts=False,
    chunks=(32,),
)  # fmt: skip
LENIENT = Limits(flips=0.2)
"""So few answers leave wide intervals: with 48, at most 4 may change under 20 %, and none of 11 under 5 %."""


def probed(engine: HFEngine, sizes: Sizes = SMALL) -> dict[str, Any]:
    stages: dict[str, int] = {}
    made = Probe(
        engine,
        [World(), Scenes()],
        LENIENT,
        sizes,
        seconds=3600,
        progress=lambda stage, done, _: stages.setdefault(stage, done),
    )
    result = made.run()
    assert {"does it read its context", "what blind reuse changes"} <= set(stages)
    assert not any(stages.values()), "each is named when it begins"
    text = html(result)
    assert result["verdict"]["sentence"].split(":")[0] in text
    assert "http://" not in text and "https://" not in text, "one file, nothing from elsewhere"
    assert text.count("<script>") == 1 and "weights reuse" not in text, (
        "the page sorts its tables; the model has a name"
    )
    return result


def opened(folder: Path) -> HFEngine:
    from ctxwin.engines.hf.engine import HFEngine

    return HFEngine(folder, dtype="float32")


@pytest.mark.slow
def test_the_bundled_model_binds_and_a_patch_of_its_deep_layers_is_safe() -> None:
    with opened(checkpoint_dir()) as engine:
        result = probed(engine)
    verdict, blind = result["verdict"], result["arms"]["cross"]["blind"]
    assert verdict["finding"] == "binds" and "quantized patches" in verdict["sentence"]
    assert blind["flips"] > 0.6 and result["arms"]["one"]["blind"]["flips"] == 0
    oracle = result["arms"]["cross"]["oracle"]
    assert oracle["kl"] == pytest.approx(blind["kl"], rel=0.2), "what is lost is conditioning"
    assert blind["to_oracle"] < 0.05 * blind["kl"], "and not position"
    assert result["arms"]["cross"]["stepwise"]["kl"] < 1e-6
    once = result["survivors"][0]
    told = f"answer {once['other_than_window']:.1%} of 8 questions otherwise than a re-prefill of what is placed"
    assert any(told in reason for reason in verdict["reasons"]), "keeping survivors is no re-prefill, and said so"
    fidelity = Fidelity(**result["fidelity"])
    assert (fidelity.mode, fidelity.advanced.layout) == ("patched", "quantized")
    assert fidelity.bytes_share is not None and 0.01 <= fidelity.bytes_share <= 0.12
    assert [s["share"] for s in result["proving"]] == sorted(s["share"] for s in result["proving"])
    norm = result["deficit"]["relative_norm"]
    assert norm[0] < 1e-4 and norm[-1] > norm[1], "nothing in the first layer, most in the deep ones"
    assert result["deficit"]["relocation_error"] < 1e-5
    assert [s["n"] for s in result["survivors"]] == [8, 2] and result["cost"][0]["prefill_ms"] > 0
    assert [s["removal"]["n"] for s in result["survivors"]] == [8, 2]
    assert once["removal"]["kl"] < once["kl_window"], "a removal patch takes away what a survivor knows of what left"
    profile = as_profile(result, str(checkpoint_dir()))
    assert profile.fidelity == fidelity and profile.n == blind["n"]


def between_idle_layers(folder: Path, front: int, behind: int) -> Path:
    """The bundled model with layers in front and behind whose KV is like the others', and which add nothing."""
    shutil.copytree(checkpoint_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    text, tensors = config["text_config"], load_file(folder / "model.safetensors")
    order = [0] * front + list(range(text["num_hidden_layers"])) + [2] * behind
    result = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for number, source in enumerate(order):
        start, idle = f"model.layers.{source}.", not front <= number < front + text["num_hidden_layers"]
        for name, tensor in tensors.items():
            if name.startswith(start):
                nothing = idle and name.endswith(("o_proj.weight", "down_proj.weight"))
                result[f"model.layers.{number}.{name.removeprefix(start)}"] = tensor * (0 if nothing else 1)
    text |= {"num_hidden_layers": len(order), "layer_types": ["full_attention"] * len(order)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(result, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_model_that_conditions_in_middle_layers_gets_patches_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "RANKS", (4,))
    monkeypatch.setattr(probe, "LADDER", (4,))
    with opened(between_idle_layers(tmp_path / "model", 2, 2)) as engine:
        made = Probe(engine, [World()], Limits(flips=0.25), SMALL, seconds=3600)
        groups = [made.measurer.group(made.source.items(2)[:1])]
        lost = structure.shape(groups, engine.spec.kv)["relative_norm"]
        ranges = made._ranges("cross")
        made._prove("cross", ["cross"], made._compression("cross", ranges)["curve"])
    assert lost[-1] > 0.5 * max(lost), "what is lost in the last layers would mislead, which nothing reads"
    assert made.served is not None and not isinstance(made.served.layers, str)
    assert set(select_layers(made.served.layers, 8)) <= {2, 3, 4, 5}
    assert len(ranges) == 2 and ranges[0].endswith("-100") and not ranges[1].endswith("-100")


@pytest.mark.parametrize("layers", [2, 4, 24, 28, 64])
def test_the_shortest_ranges_are_found_in_four_rounds(layers: int) -> None:
    for first, end in combinations(range(layers + 1), 2):
        needed, rounds = set(range(first, end)), list[int]()

        def enough(ranges: Sequence[str], needed: set[int] = needed, rounds: list[int] = rounds) -> list[bool]:
            rounds.append(len(ranges))
            return [needed <= covered(name) for name in ranges]

        def covered(name: str) -> set[int]:
            return {*select_layers(parse_depth(name) or (), layers)}

        wanted = dict.fromkeys(name_range(first, last, layers) for last in (layers, end))
        found = shortest_ranges(layers, enough)
        # Percents are finer than layers, so a range may have two names.
        assert [covered(name) for name in found] == [covered(name) for name in wanted if name != "0-100"]
        assert len(rounds) <= 4 and max(rounds) <= ENDS


@pytest.mark.parametrize("layers", [4, 24, 28, 80, 100])
def test_a_range_in_percents_is_the_layers_that_it_was_made_of(layers: int) -> None:
    for first, end in combinations(range(layers + 1), 2):
        depth = parse_depth(name_range(first, end, layers))
        assert depth is not None
        chosen = select_layers(depth, layers)
        assert chosen == tuple(range(first, end)) or (end == first + 1 and chosen == (first, end))


@pytest.mark.slow
def test_a_model_that_chains_may_be_reused_blindly() -> None:
    with opened(CHAINING) as engine:
        result = probed(engine)
    assert result["verdict"]["finding"] == "chains", result["verdict"]
    assert result["arms"]["cross"]["blind"]["n"] == SMALL.looks[-1], "never concluded early"
    assert result["fidelity"] == {"mode": "blind"}
    assert "proving" not in result


@pytest.mark.slow
def test_a_random_model_has_no_verdict(engine: HFEngine) -> None:
    result = probed(engine)
    assert result["verdict"]["finding"] == "unread"
    assert result["verdict"]["sentence"] == "no verdict: answers do not depend on the context; keep exact"
    assert result["fidelity"] == {"mode": "exact"}
    assert set(result["reading"]) == {"world", "scenes"}, "both kinds of generated contexts were tried"
    assert "curve" not in result and "survivors" not in result
    assert result["arms"]["cross"]["blind"]["kl"] > 0, "it was measured, and decides nothing"


@pytest.mark.slow
def test_when_time_is_up_every_stage_still_measures_something_and_nothing_is_called_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "BATCH", 6)
    tight = Sizes(
        reading=64, looks=(64, 160, 400), choosing=2, proving=6, survivors=1, streams=1, slides=1, moving=2,
        layouts=False, chunks=(16,),
    )  # fmt: skip
    with opened(CHAINING) as engine:
        result = Probe(engine, [World()], sizes=tight, seconds=0.01).run()
    assert result["reading"]["world"][0]["n"] == 6, "one batch"
    assert result["arms"]["cross"]["blind"]["n"] == 6
    assert result["verdict"]["finding"] in ("unclear", "unread")
    assert result["fidelity"] == {"mode": "exact"}
