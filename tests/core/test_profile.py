"""Profiles: bound to the weights they were measured on, found beside them or among the user's own."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from core.folders import model_in
from ctxwin import Fidelity
from ctxwin.profiles import (
    PROFILE_NAME,
    PROFILES_VARIABLE,
    SHIPPED,
    Profile,
    find_profile,
    model_digest,
    profiles_folder,
    resolve,
    user_profile,
    write_profile,
)
from ctxwin.tiny import checkpoint_dir
from released_models import default_cache


def profile_of(folder: Path, **fields: Any) -> Profile:
    made: dict[str, Any] = dict(
        weights=model_digest(folder), model="m", verdict="binds", finding="binds", n=96, date="2026-01-01", ctxwin="0",
        fidelity=Fidelity("patched", rank=8),
    )  # fmt: skip
    return Profile(**(made | fields))


def test_a_profile_is_followed_on_its_own_weights_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_in(tmp_path / "m")
    assert write_profile(profile_of(model), model) == model / PROFILE_NAME
    assert resolve(Fidelity(), str(model)) == Fidelity("patched", rank=8)
    model_in(model, 1.0)  # other weights in the same folder
    with caplog.at_level(logging.WARNING, "ctxwin"):
        assert resolve(Fidelity(), str(model)).mode == "exact"
    assert "other weights" in caplog.text
    model_in(model)
    assert resolve(Fidelity(), str(model)).mode == "patched"
    (model / "config.json").write_text('{"rope_theta": 5}')
    assert resolve(Fidelity(), str(model)).mode == "exact", "another config is another model"


@pytest.mark.parametrize(
    "text", ["{", '{"fidelity": {"mode": "patched", "rank": 8}}', '{"format": 2, "fidelity": {"mode": "blind"}}', ""]
)
def test_what_is_no_profile_of_this_version_is_refused_with_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_in(tmp_path / "m")
    (model / PROFILE_NAME).write_text(text)
    with caplog.at_level(logging.WARNING, "ctxwin"):
        assert resolve(Fidelity(), str(model)).mode == "exact"
    assert "ctxwin eval probe" in caplog.text


def test_a_profile_beside_no_weights_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = profile_of(model_in(tmp_path / "m"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / PROFILE_NAME).write_text(made.model_dump_json())
    with caplog.at_level(logging.WARNING, "ctxwin"):
        assert find_profile(empty) is None
    assert "cannot be read" in caplog.text


def test_a_folder_that_cannot_be_written_has_its_profile_among_the_users(tmp_path: Path, own: Path) -> None:
    model = model_in(tmp_path / "m")
    made = profile_of(model)
    (model / PROFILE_NAME).mkdir()  # cannot be replaced by a file, whoever runs this
    path = write_profile(made, model)
    assert path == user_profile(model) and path.parent == own == profiles_folder()
    assert not list(own.glob("*.tmp")) and not list(model.glob("*.tmp"))
    assert find_profile(model) == made
    assert find_profile(model_in(tmp_path / "copy")) == made, "named by the weights, not by the folder"
    assert find_profile(model_in(tmp_path / "other", 1.0)) is None


def test_what_was_measured_last_is_followed(tmp_path: Path) -> None:
    """A shipped model's folder cannot be written: a newer probe of it must not be passed over for the older one in it."""
    model = model_in(tmp_path / "m")
    shipped = profile_of(model, date="2026-01-01T00:00:00+00:00")
    newer = profile_of(model, date="2026-02-01T00:00:00+00:00", finding="unclear", fidelity=Fidelity("exact"))
    write_profile(shipped, model)
    user_profile(model).parent.mkdir()
    user_profile(model).write_text(newer.model_dump_json())
    assert find_profile(model) == newer and resolve(Fidelity(), str(model)).mode == "exact"
    newest = profile_of(model, date="2026-03-01T00:00:00+00:00")
    write_profile(newest, model)
    assert find_profile(model) == newest


def test_a_downloaded_models_profile_does_not_hang_on_whether_the_user_has_others(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = model_in(tmp_path / "snapshot")
    shipped = profile_of(snapshot)
    write_profile(shipped, snapshot)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert not own.exists() and find_profile("some/model") == shipped
    own.mkdir()
    assert find_profile("some/model") == shipped


def test_a_user_without_a_home_has_no_profiles_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in(tmp_path / "m")
    monkeypatch.delenv(PROFILES_VARIABLE)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert resolve(Fidelity(), str(model)).mode == "exact"
    write_profile(profile_of(model), model)
    assert resolve(Fidelity(), str(model)).mode == "patched"
    (model / PROFILE_NAME).unlink()
    (model / PROFILE_NAME).mkdir()
    with pytest.raises(OSError, match="CTXWIN_PROFILES"):
        write_profile(profile_of(model), model)


def test_writers_at_once_leave_a_whole_profile(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    made = [profile_of(model, n=n, verdict="x" * 10_000) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda one: write_profile(one, model), made)) == {model / PROFILE_NAME}
    assert find_profile(model) in made
    assert not list(model.glob("*.tmp"))


def test_a_profile_goes_where_it_is_told_to(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    assert write_profile(profile_of(model), model, tmp_path / "out") == tmp_path / "out" / PROFILE_NAME
    assert not (model / PROFILE_NAME).exists()


def test_a_profile_without_a_verdict_is_exact(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    for finding in ("unclear", "unread"):
        with pytest.raises(ValidationError, match="must be exact"):
            profile_of(model, finding=finding)
        profile_of(model, finding=finding, fidelity=Fidelity("exact"))
    with pytest.raises(ValidationError, match="got auto"):
        profile_of(model, fidelity=Fidelity("auto"))


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    model = model_in(tmp_path / "m")
    made = profile_of(model, measured={"blind": {"n": 3}})
    path = write_profile(made, model)
    assert Profile.model_validate_json(path.read_text()) == made
    assert json.loads(path.read_text())["format"] == 1


def test_what_is_neither_a_folder_nor_downloaded_has_no_profile() -> None:
    for name in ("Some/Hub-Name", "nowhere", "a/b/c"):
        assert find_profile(name) is None
        with pytest.raises(ValueError, match="local folder or a Hub name"):
            model_digest(name)


def test_a_shipped_profile_is_found_by_the_weights_and_by_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = model_in(tmp_path / "m"), model_in(tmp_path / "other", 1.0)
    monkeypatch.setattr("ctxwin.profiles.SHIPPED", tmp_path / "shipped")
    size = (model / "model.safetensors").stat().st_size
    assert size == (other / "model.safetensors").stat().st_size, "only a digest tells them apart"
    shipped = profile_of(model)
    path = tmp_path / "shipped" / f"{size}-{shipped.weights}.json"
    path.parent.mkdir()
    path.write_text(shipped.model_dump_json())
    with caplog.at_level(logging.WARNING, "ctxwin"):
        assert find_profile(model) == shipped and resolve(Fidelity(), str(model)).mode == "patched"
        assert find_profile(other) is None and not caplog.text
    own = profile_of(model, date="2026-02-01", finding="unclear", fidelity=Fidelity("exact"))
    write_profile(own, model)
    assert find_profile(model) == own, "what was measured here later is followed"


def model_with(folder: Path, config: dict[str, Any]) -> Path:
    """Return a folder with the bundled model's weights and another config."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(checkpoint_dir() / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_shipped_profile_is_found_whatever_library_wrote_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = find_profile(checkpoint_dir())
    assert shipped is not None
    monkeypatch.setattr("ctxwin.profiles.SHIPPED", tmp_path)
    size = (checkpoint_dir() / "model.safetensors").stat().st_size
    (tmp_path / f"{size}-{shipped.weights}.json").write_text(shipped.model_dump_json())
    config = json.loads((checkpoint_dir() / "config.json").read_bytes())
    text, rope = config["text_config"], config["text_config"]["rope_parameters"]
    same = {
        "library": config | {"transformers_version": "4.57.1", "_name_or_path": "someone/model"},
        "nested": config | {"text_config": text | {"_name_or_path": "/home/me", "transformers_version": "4.0"}},
        "order": dict(reversed(config.items())) | {"text_config": dict(reversed(text.items()))},
        "torch_dtype": {k: v for k, v in config.items() if k != "dtype"} | {"torch_dtype": config["dtype"]},
        "both": config | {"torch_dtype": "float16"},
    }
    other = {
        "rope": config | {"text_config": text | {"rope_parameters": rope | {"rope_theta": 500_000.0}}},
        "sections": config | {"text_config": text | {"rope_parameters": rope | {"mrope_section": [6, 6, 4]}}},
        "eps": config | {"text_config": text | {"rms_norm_eps": 1e-5}},
        "dtype": config | {"dtype": "float32"},
    }
    assert {name for name in same if find_profile(model_with(tmp_path / name, same[name])) == shipped} == {*same}
    assert {name for name in other if find_profile(model_with(tmp_path / name, other[name]))} == set()


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*")), ids=lambda path: path.stem)
def test_shipped_profiles_are_named_by_the_weights_they_were_measured_on(path: Path) -> None:
    profile = Profile.model_validate_json(path.read_bytes())
    size, _, weights = path.stem.partition("-")
    assert int(size) > 1 << 20 and weights == profile.weights and path.suffix == ".json"
    assert profile.finding in ("binds", "chains") and profile.n >= 80, "shipped are those that were shown safe"
    folder = default_cache() / profile.model
    if folder.is_dir():
        assert find_profile(folder) is not None and model_digest(folder) == weights


def test_the_bundled_model_is_patched_in_its_deep_layers() -> None:
    found = find_profile(checkpoint_dir())
    assert found is not None and found.finding == "binds" and found.n >= 64
    resolved = resolve(Fidelity(), str(checkpoint_dir()))
    assert resolved.mode == "patched" and resolved.layers == "deep" and resolved.survivors == "keep"
    assert resolved.advanced.layout == "quantized" and resolved.patch_rank is None
    # Twice the smallest that was shown safe; joint factors took 10.5 %.
    assert resolved.bytes_share is not None and 0.02 <= resolved.bytes_share <= 0.06
