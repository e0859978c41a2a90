"""The file of a model's shared basis: bound to the weights, found where profiles are, refused where it cannot be right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from core.folders import model_in
from ctxwin import Fidelity, Window, open_engine
from ctxwin.engines.encoding.checkpoint import weights_digest
from ctxwin.kv.basis import SharedBasis
from ctxwin.kv.layout import KVSpec, RopeSpec
from ctxwin.kv.lowrank import Weight
from ctxwin.profiles import (
    BASIS_NAME,
    ModelBasis,
    encode_basis,
    find_basis,
    model_digest,
    require_basis,
    resolve,
    served_basis,
    user_profile,
    write_basis,
)
from ctxwin.tiny import checkpoint_dir
from window import on_engines

SPEC = KVSpec(
    identity="engine", family="gqa", layers=4, heads=2, k_dim=4, v_dim=4, dtype="bfloat16",
    rope=RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4),
)  # fmt: skip
SHARED = Fidelity("patched", advanced={"layout": "shared"}, rank=4)


def basis_of(folder: Path, date: str = "2026-01-01", seed: int = 0, layers: tuple[int, ...] = (2, 3)) -> ModelBasis:
    right = torch.randn(len(layers), 6, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    weight = Weight(torch.full((4, 2, 4), 0.5), torch.eye(4).expand(4, 2, 4, 4))
    return ModelBasis(SharedBasis(model_digest(folder), "joint", layers, 2, 4, 4, right), weight, date)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    made, before = basis_of(model), weights_digest(model)
    assert write_basis(made, model) == model / BASIS_NAME
    found = require_basis(model)
    assert found.id == made.id and torch.equal(found.basis.right, made.basis.right) and found.date == made.date
    assert found.weight is not None and made.weight is not None
    for a, b in ((found.weight.k, made.weight.k), (found.weight.v, made.weight.v)):
        assert a is not None and b is not None and torch.equal(a, b)
    assert encode_basis(found) == encode_basis(made), "the same file, byte by byte"
    assert weights_digest(model) == before, "a basis must not make another model of the folder"
    # vLLM takes whatever ends so for weights.
    assert not BASIS_NAME.endswith((".safetensors", ".bin", ".pt"))


def test_a_name_is_of_the_layout_and_the_basis(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    made = basis_of(model)
    write_basis(made, model)
    shared = resolve(SHARED, str(model))
    assert shared.advanced.basis == made.id and made.id in shared.patch_name and "shared" in shared.patch_name
    joint = Fidelity("patched", rank=4, advanced={"layout": "joint"})
    assert resolve(joint, str(model)).patch_name == "rank=4,layers=all", "as it always was"
    write_basis(other := basis_of(model, "2026-02-01", seed=1), model)
    assert (
        resolve(SHARED, str(model)).patch_name != shared.patch_name
        and resolve(SHARED, str(model)).advanced.basis == other.id
    )
    assert resolve(shared, str(model)).advanced.basis == other.id, (
        "what a checkpoint kept does not refuse a newer basis"
    )
    assert resolve(Fidelity("exact", advanced={"layout": "shared"}), str(model)).advanced.basis is None


def test_without_a_basis_a_window_says_how_to_fit_one(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    with pytest.raises(ValueError, match=r"^model 'm' has no shared basis; fit one with `ctxwin eval basis MODEL`"):
        resolve(SHARED, str(model))
    write_basis(basis_of(model), model)
    with pytest.raises(ValueError, match="rank must be at most 6"):
        resolve(SHARED.model_copy(update={"rank": 7}), str(model))
    assert resolve(SHARED.model_copy(update={"rank": 7, "bytes_share": 0.5}), str(model)).advanced.basis


@pytest.mark.parametrize("broken", ["cut", "empty", "bits", "weights", "not finite", "shape"])
def test_a_broken_file_is_refused(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_in(tmp_path / "m")
    made = basis_of(model)
    path = write_basis(made, model)
    data = path.read_bytes()
    if broken == "weights":
        model_in(model, 1.0)
    elif broken == "not finite":
        bad = replace(made.basis, right=torch.full_like(made.basis.right, float("nan")))
        write_basis(replace(made, basis=bad), model)
    elif broken == "shape":
        write_basis(replace(made, basis=replace(made.basis, layers=(1, 2, 3))), model)
    elif broken == "bits":
        at = data.index(made.basis.right.view(torch.uint8).numpy().tobytes())
        path.write_bytes(data[: at + 3] + bytes([data[at + 3] ^ 1]) + data[at + 4 :])
        assert len(load(path.read_bytes())) == 3, "safetensors itself sees nothing wrong"
    else:
        path.write_bytes(data[: len(data) // 2] if broken == "cut" else b"")
    assert find_basis(model) is None and str(path) in caplog.text
    said = "other weights" if broken == "weights" else "none of this version"
    with pytest.raises(ValueError, match=f"no shared basis .*{said}.*fit one with"):
        resolve(SHARED, str(model))


def test_a_folder_that_cannot_be_written_has_its_basis_among_the_users(tmp_path: Path, own: Path) -> None:
    model = model_in(tmp_path / "m")
    (model / BASIS_NAME).mkdir()  # cannot be replaced by a file, whoever runs this
    made = basis_of(model)
    path = write_basis(made, model)
    assert path == user_profile(model, ".st") and path.parent == own
    assert require_basis(model).id == require_basis(model_in(tmp_path / "copy")).id == made.id
    assert find_basis(model_in(tmp_path / "other", 1.0)) is None and find_basis("no/such-model") is None


def test_what_is_served_is_a_part_of_the_basis(tmp_path: Path) -> None:
    model = str(model_in(tmp_path / "m"))
    made = basis_of(Path(model), layers=(1, 2, 3))
    write_basis(made, model)
    for rank, layers, at in ((4, "all", (1, 2, 3)), (6, "deep", (2, 3))):
        asked = resolve(Fidelity("patched", advanced={"layout": "shared"}, rank=rank, layers=layers), model)  # type: ignore[arg-type]
        cut = served_basis(model, SPEC, asked)
        assert cut.basis is not None and (cut.basis.rank, cut.basis.layers, cut.basis.identity) == (rank, at, "engine")
        assert torch.equal(cut.basis.right, made.basis.right[-len(at) :, :rank])
        assert served_basis(model, SPEC, asked).basis is cut.basis
    # A token's KV is 4 * 2 * 8 = 64 numbers; a twentieth of them are three.
    some = served_basis(
        model, SPEC, resolve(Fidelity("patched", advanced={"layout": "shared"}, bytes_share=0.05), model)
    )
    none = served_basis(
        model, SPEC, resolve(Fidelity("patched", advanced={"layout": "shared"}, bytes_share=0.01), model)
    )
    assert some.basis is not None and some.basis.rank == 3 and none.basis is None
    with pytest.raises(ValueError, match="heads and widths"):
        served_basis(model, replace(SPEC, heads=1), resolve(SHARED, model))


def test_the_bundled_model_has_a_basis() -> None:
    shipped = require_basis(checkpoint_dir())
    assert (shipped.rank, shipped.basis.layers) == (64, (2, 3)) and shipped.weight is not None
    assert shipped.basis.meta["weighted"] and shipped.basis.nbytes == 32768


def test_an_orbit_over_the_models_basis() -> None:
    shared = on_engines.SHARED.model_copy(update={"orbit": True})
    with open_engine("tiny:hf", dtype="float32") as engine, Window(engine, "header", fidelity=shared) as window:
        window.extend([on_engines.chunk(i) for i in range(3)])
        window.ask(on_engines.QUESTIONS[0], max_tokens=2)
        window.maintenance.prepare_orbit(window.ids[:2])
        patches = [engine.repo.get_patch(key) for key in engine.store.list("orbit/")]
        shapes = sorted((p.layout, p.rank, p.meta["orders"]) for p in patches if p is not None)
        assert shapes == [("shared", 48, 1), ("shared", 48, 1), ("shared", 48, 2)]
