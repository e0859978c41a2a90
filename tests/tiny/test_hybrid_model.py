"""The trained hybrid: recurrent layers beside attention, and what its chunks absorbed while they were prefilled."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from ctxwin.engines.hf.engine import HFEngine
from ctxwin.evals.studies import hybrid as study
from train_tiny.data import Vocabulary, make_batch
from train_tiny.hybrid import build_hybrid, decode_questions, pictures_of
from train_tiny.recipe import Recipe, batch_spec
from train_tiny.tokenizer import build_tokenizer

HYBRID = Path(__file__).parents[1] / "models" / "hybrid"


def test_training_computes_what_transformers_computes() -> None:
    """Questions side by side are each what one sequence of context and question gives."""
    tokenizer = build_tokenizer()
    vocabulary, model = Vocabulary(tokenizer), build_hybrid(tokenizer, 0)
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
def rows() -> dict[str, dict[str, float]]:
    engine = HFEngine(HYBRID, dtype="float32", position_free=True)
    return {row["way"]: row for row in study.measure(engine, "multi_hop", 12, lambda _: None)}


def test_it_answers_and_its_states_compose(rows: dict[str, dict[str, float]]) -> None:
    assert rows["re-prefill"]["right"] >= 0.9
    composed = rows["composed of exact maps"]
    assert composed["agreed"] == 1 and composed["kl"] < 1e-5


def test_chunks_that_saw_nothing_lose_the_answers_and_patches_bring_them_back(
    rows: dict[str, dict[str, float]],
) -> None:
    assert rows["blind"]["agreed"] <= 0.3
    patched = rows["KV rank 4, states rank 4"]
    assert patched["agreed"] >= 0.9 and 0 < patched["patches"] < 0.05


def test_a_patch_of_full_rank_gives_the_states_of_one_forward() -> None:
    from ctxwin.kv.states import composed

    torch.manual_seed(0)
    alone = {"0.conv": torch.ones(4), "0.map": torch.randn(2, 8, 8), "0.own": torch.randn(2, 8, 8)}
    alone["0.recurrent"] = alone["0.own"]
    before, exact = {"0.recurrent": torch.randn(2, 8, 8)}, {"0.recurrent": torch.randn(2, 8, 8)}
    patched, numbers = study.deficit(exact, before, alone, 8)
    torch.testing.assert_close(composed(before, patched)["0.recurrent"], exact["0.recurrent"])
    assert numbers == 8 * (8 + 16)
    less, _ = study.deficit(exact, before, alone, 2)
    assert not torch.allclose(composed(before, less)["0.recurrent"], exact["0.recurrent"])


def test_it_is_small_and_holds_no_pickle() -> None:
    files = [path for path in HYBRID.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 4_000_000
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".md"}
