"""The trained hybrid: recurrent layers beside attention, and what its chunks absorbed while they were prefilled."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from ctxwin.engines.hf.engine import HFEngine
from evals.studies import hybrid as study
from train_tiny.data import Vocabulary, make_batch
from train_tiny.hybrid import READS_KV, READS_STATES, build_hybrid, decode_questions, pictures_of
from train_tiny.recipe import Recipe, batch_spec
from train_tiny.tokenizer import build_tokenizer

MODELS = Path(__file__).parents[1] / "models"
HYBRID, STATES = MODELS / "hybrid", MODELS / "hybrid-states"
"""Two that bind while they prefill; questions read what chunks absorbed from the KV of one, from the states of the other."""


@pytest.mark.parametrize("layers", [READS_KV, READS_STATES], ids=["kv", "states"])
def test_training_computes_what_transformers_computes(layers: tuple[str, ...]) -> None:
    """Questions side by side are each what one sequence of context and question gives."""
    tokenizer = build_tokenizer()
    vocabulary, model = Vocabulary(tokenizer), build_hybrid(tokenizer, 0, layers)
    rng = np.random.default_rng(0)
    spec = batch_spec(Recipe(hybrid=True, frames_per_step=16), 2, 1500, rng)
    batch, text = make_batch(vocabulary, rng, spec), model.model.language_model
    with torch.no_grad():
        words = functional.embedding(batch.ids, text.embed_tokens.weight)
        seen = pictures_of(model, batch.pixels)
        x = words.masked_scatter((batch.ids == vocabulary.image)[..., None], seen)
        mask = torch.zeros(batch.mask.shape).masked_fill_(~batch.mask, float("-inf"))
        made = decode_questions(text, x, batch.positions, mask, batch.real, batch.length, lambda *_: None)
        for row, question in ((0, 0), (1, 2)):
            begin = batch.real.shape[1] + question * batch.length
            at = [*range(int(batch.real[row].sum())), *range(begin, begin + batch.length)]
            positions = batch.positions[row : row + 1][:, :, at].transpose(0, 1)
            whole = text(inputs_embeds=x[row : row + 1, at], position_ids=positions, use_cache=False).last_hidden_state
            assert float((whole[0] - made[row, at]).abs().max()) < 2e-5


@pytest.fixture(scope="module")
def engines() -> dict[Path, HFEngine]:
    return {folder: HFEngine(folder, dtype="float32", position_free=True) for folder in (HYBRID, STATES)}


Rows = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def rows(engines: dict[Path, HFEngine]) -> dict[Path, Rows]:
    return {
        folder: {row["way"]: row for row in study.measure(engine, "multi_hop", 7, lambda _: None)}
        for folder, engine in engines.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("folder", [HYBRID, STATES], ids=["kv", "states"])
def test_it_answers_and_its_states_compose(folder: Path, rows: dict[Path, Rows]) -> None:
    assert rows[folder]["re-prefill"]["right"] >= 0.9
    composed = rows[folder]["composed of exact maps"]
    assert composed["agreed"] == 1 and composed["kl"] < 1e-5


@pytest.mark.slow
def test_what_binds_lies_in_the_kv_of_one_and_in_the_states_of_the_other(rows: dict[Path, Rows]) -> None:
    for folder, kv, states in ((HYBRID, 1, 0), (STATES, 0, 1)):
        agreed = {way: row["agreed"] for way, row in rows[folder].items()}
        assert agreed["blind"] <= 0.3
        assert abs(agreed["KV exact, maps blind"] - kv) <= 0.3 and abs(agreed["maps exact, KV blind"] - states) <= 0.3


@pytest.mark.slow
def test_patches_bring_the_answers_back(rows: dict[Path, Rows]) -> None:
    of_kv, of_states = rows[HYBRID]["KV rank 4"], rows[STATES]["KV rank 4, states rank 64"]
    assert of_kv["agreed"] >= 0.9 and 0 < of_kv["patches"] < 0.05
    assert of_states["agreed"] >= 0.9 and 0 < of_states["patches"] < 0.3
    assert rows[STATES]["KV rank 4"]["agreed"] <= 0.3


@pytest.mark.slow
def test_windows_answer_from_patched_states_as_before(engines: dict[Path, HFEngine]) -> None:
    rows = study.measure_windows(engines[STATES], 3, lambda _: None)
    assert all(row["computed"] == 0 for row in rows) and [row["agreed"] for row in rows[1:]] == [1, 1, 1]
    assert all(0 < row["patches"] < 0.15 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("folder", [HYBRID, STATES], ids=["kv", "states"])
def test_what_is_forgotten_is_answered_as_if_it_had_never_been_there(
    folder: Path, engines: dict[Path, HFEngine]
) -> None:
    left = {row["way"]: row for row in study.measure_eviction(engines[folder], 7, lambda _: None)}
    forgotten, without = left["evicted, forget=True"], left["re-prefill without it"]
    assert (forgotten["said"], forgotten["decided"]) == (without["said"], without["decided"])
    assert max(forgotten["said"], forgotten["decided"]) <= 0.4
    assert left["KV evicted, states kept"]["decided"] >= 0.9, "survivors remember"
    if folder == STATES:
        assert left["KV evicted, states kept"]["said"] >= forgotten["said"] + 0.4, "and so do states that are kept"


@pytest.mark.parametrize("folder", [HYBRID, STATES], ids=["kv", "states"])
def test_it_is_small_and_holds_no_pickle(folder: Path) -> None:
    files = [path for path in folder.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".md"}
