"""Fitting a shared basis: what holds by definition, and the command around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from ctxwin import Chunk, Fidelity, Window
from ctxwin.cli.main import app
from ctxwin.kv.pooling import project
from ctxwin.profiles import PROFILES_VARIABLE, decode_basis, encode_basis, model_digest
from ctxwin_evals.decoder import Reader
from ctxwin_evals.items import Item
from ctxwin_evals.patching import Patcher
from ctxwin_evals.serving import ServedGroup
from ctxwin_evals.shared_basis import contexts_for, fit

if TYPE_CHECKING:
    from ctxwin.engines.hf.engine import HFEngine


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "own"))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(256, size=(56, 56, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, ["eval", "basis", *map(str, args)])


def test_a_basis_holds_what_it_was_fitted_on(engine: HFEngine) -> None:
    chunks = [Chunk.text(f"the color of frame {i} is red now") for i in range(3)]
    item = Item("words", 0, lambda: chunks, 3, (0, 1, 2), "?", "", "0", "0", "", system_prompt="watch")
    made = fit(engine, [item], 1000, "all")
    reader: Any = Reader(engine)
    found = list(ServedGroup(reader, [item], Patcher(reader.spec), "").deficits())
    assert made.basis.meta["deficits"] == len(found) == 2
    assert made.basis.identity == model_digest(engine.spec.model) and made.weight is not None
    assert made.rank == sum(lost.tokens for lost in found)
    own = replace(made.basis, identity=engine.spec.kv.identity)
    for lost in found:
        assert project(lost, own, engine.spec.kv, weight=made.weight).meta["captured"] > 0.999
    again = fit(engine, [item], 1000, "all")
    assert again.id == made.id and decode_basis(encode_basis(made)).id == made.id


def test_contexts_are_the_models_own(engine: HFEngine, pictures: Path) -> None:
    with pytest.raises(ValueError, match="--images DIR"):
        contexts_for(engine, 2, 0, None, None)
    first, second = (contexts_for(engine, 2, seed, pictures, None) for seed in (0, 1))
    drawn = [[tuple(c.id for c in item.load()) for item in items] for items in (first, second)]
    assert all(len(ids) == 4 for contexts in drawn for ids in contexts) and drawn[0] != drawn[1]


def test_the_command(
    engine: HFEngine, model_dir: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = invoke(model_dir, "--contexts", 1)
    assert refused.exit_code == 2 and "--images DIR" in refused.stderr
    with pytest.raises(ValueError, match="has no shared basis; fit one with `ctxwin eval basis"):
        Window(engine, fidelity=Fidelity("patched", advanced={"layout": "shared"}))
    file = tmp_path / "made.st"
    done = invoke(model_dir, "--images", pictures, "--contexts", 1, "--rank", 3, "--output", file, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    made = decode_basis(file.read_bytes())
    assert (said["id"], said["rank"], said["followed"]) == (made.id, 3, False) and made.rank == 3
    monkeypatch.setattr("ctxwin_evals.console.open_model", lambda *_: pytest.fail("worked in vain"))
    for place, words in ((file, "must be a new file"), (file / "in", "must be a writable folder")):
        refused = invoke(model_dir, "--images", pictures, "--output", place)
        assert refused.exit_code == 2 and words in refused.stderr


def test_options_are_checked(model_dir: Path) -> None:
    for option, bad in (("--contexts", 0), ("--rank", 0), ("--seed", -1), ("--layers", "some")):
        assert invoke(model_dir, option, bad).exit_code == 2
