"""Vision embeddings through vLLM's EC connector: requests that name a picture and carry nothing of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxwin.adapters.vllm import ecfiles
from ctxwin.adapters.vllm.ecfiles import EmbeddingFiles, Held, Pins
from ctxwin.errors import StoreCorrupt
from engines import models

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
ROOT = Path(__file__).resolve().parents[2]


def embeddings(seed: int, tokens: int = 9, width: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_put_comes_back(self, tmp_path: Path, dtype: torch.dtype) -> None:
        files = EmbeddingFiles(tmp_path, "m")
        put = embeddings(1, dtype=dtype)
        files.put("a/b:c@d", put)
        found = EmbeddingFiles(tmp_path, "m").get("a/b:c@d")
        assert found is not None and found.dtype == dtype and torch.equal(found, put)
        assert files.check(files.path("a/b:c@d")) == Held((9, 64), str(dtype).removeprefix("torch."))
        assert [path.name for path in tmp_path.iterdir()] == [ecfiles.file_name("a/b:c@d")]
        assert files.path("a/b:c@d").stat().st_mode & 0o077 == 0

    def test_names(self) -> None:
        assert ecfiles.name_of("name@provenance@more") == ecfiles.name_of("name") == "name"
        assert len({ecfiles.file_name(name) for name in ("", "a", "A", "a/b", "../a")}) == 5
        assert "/" not in ecfiles.file_name("../../etc/passwd")

    def test_of_no_use(self, tmp_path: Path) -> None:
        """Every byte counts, and so does the model; a file that changes is looked at again."""
        files = EmbeddingFiles(tmp_path, "m")
        assert files.get("x") is None and files.check(files.path("x")) is None
        files.put("x", embeddings(1, tokens=1, width=2))
        good = files.path("x").read_bytes()
        assert EmbeddingFiles(tmp_path, "n").get("x") is None
        for at in range(len(good)):
            files.path("x").unlink()
            files.path("x").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert files.check(files.path("x")) is None and files.get("x") is None, at
        for end in range(len(good)):
            files.path("x").write_bytes(good[:end])
            assert files.get("x") is None, end
        files.put("x", embeddings(2, tokens=3))
        assert files.check(files.path("x")) == Held((3, 64), "float32")

    def test_a_sound_file_is_read_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = EmbeddingFiles(tmp_path)
        files.put("x", embeddings(1))
        assert files.known(files.path("x")) == (False, None)
        held = files.check(files.path("x"))
        monkeypatch.setattr(files, "read", None)
        assert files.check(files.path("x")) == held is not None

    def test_only_embeddings(self) -> None:
        from ctxwin.store import codec

        with pytest.raises(ValueError, match=r"must be \[tokens, width\]"):
            ecfiles.encode(torch.zeros(3))
        for tensors in ({"other": torch.zeros(1, 1)}, {"embeddings": torch.zeros(2)}, {}):
            with pytest.raises(StoreCorrupt):
                ecfiles.decode(codec.encode_tensors(tensors, {"identity": ""}))

    def test_a_failed_write_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = EmbeddingFiles(tmp_path)
        files.put("x", embeddings(1))

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            files.put("x", embeddings(2))
        found = files.get("x")
        assert found is not None and torch.equal(found, embeddings(1))
        assert len(list(tmp_path.iterdir())) == 1


class TestPins:
    def test_a_pinned_file_outlives_its_removal(self, tmp_path: Path) -> None:
        files = EmbeddingFiles(tmp_path)
        files.put("x", embeddings(1))
        pins = Pins(files, linger=2)
        path = pins.pin("x", "first")
        assert path is not None and pins.pin("x", "second") == path and pins.pin("y", "first") is None
        assert pins.find("x", "first") == path and pins.find("x", "third") is None
        files.put("x", embeddings(2))
        files.discard("x")
        found = files.read(path)
        assert found is not None and torch.equal(found, embeddings(1))
        pins.unpin("x", "first")
        pins.tick()
        pins.tick()
        pins.tick()
        assert path.exists() and len(pins) == 1
        pins.unpin("x", "second")
        assert len(pins) == 0 and pins.find("x", "second") is None
        pins.tick()
        assert path.exists()  # a step that is being computed may read it
        pins.tick()
        assert not path.exists()
        pins.close()
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_process_left(self, tmp_path: Path) -> None:
        ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
        left = tmp_path / f".pins-{ended.stdout.strip()}-x"
        ours = tmp_path / f".pins-{os.getpid()}-x"
        for folder in (left, ours):
            folder.mkdir()
        files = EmbeddingFiles(tmp_path)
        files.put("x", embeddings(1))
        assert Pins(files).pin("x", "a") is not None
        assert ours.exists() and not left.exists()


class Feature:
    """A media item that carries nothing, as vLLM's scheduler sees it."""

    def __init__(self, identifier: str, offset: int, tokens: int = 9) -> None:
        self.identifier = identifier
        self.data = None
        self.mm_position = SimpleNamespace(offset=offset, length=tokens, get_num_embeds=lambda: tokens)


def request(name: str, *features: Feature) -> Any:
    return SimpleNamespace(request_id=name, mm_features=list(features), ec_transfer_params=None)


@needs_vllm
class TestScheduler:
    @pytest.fixture
    def scheduler(self, tmp_path: Path) -> Iterator[Any]:
        from ctxwin.adapters.vllm.ec import _Scheduler

        opened = _Scheduler(EmbeddingFiles(tmp_path), 64, "float32", "")
        yield opened
        opened.close()
        assert not list(tmp_path.glob(".*"))

    def test_a_large_file_is_checked_beside_the_scheduler(
        self, scheduler: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ctxwin.adapters.vllm import ec

        monkeypatch.setattr(ec, "_LARGE", 0)
        files, begin = scheduler._files, threading.Event()
        check = files.check
        monkeypatch.setattr(files, "check", lambda path: (begin.wait(10), check(path))[1])
        files.put("good", embeddings(1))
        files.path("bad").write_bytes(b"nothing that anybody can read")
        good, bad = request("a", Feature("good@x", 2)), request("b", Feature("bad", 2))
        for _ in range(3):
            assert not scheduler.ready(good, 0) and not scheduler.ready(bad, 0) and not scheduler.unavailable
        begin.set()
        until = time.monotonic() + 10
        while not (scheduler.ready(good, 0) and scheduler.unavailable) and time.monotonic() < until:
            scheduler.ready(bad, 0)
            time.sleep(0.01)
        assert scheduler.ready(good, 0) and scheduler.holds("good") and scheduler.unavailable == {"b"}
        scheduler.plan(good, "good@x")
        (path,) = scheduler.loads.values()
        files.discard("good")
        found = files.read(Path(path))
        assert found is not None and torch.equal(found, embeddings(1))
        scheduler.forget("a")
        scheduler.forget("b")
        assert len(scheduler.pins) == 0 and not scheduler._names and not scheduler._ready and not scheduler.unavailable

    def test_what_loaded_kv_covers_is_looked_for_when_the_load_has_failed(self, scheduler: Any) -> None:
        scheduler._files.put("behind", embeddings(1))
        covered = request("a", Feature("covered", 2), Feature("behind", 20))
        assert scheduler.ready(covered, 11) and not scheduler.unavailable
        assert scheduler.ready(covered, 20) and not scheduler.holds("covered")
        assert not scheduler.ready(covered, 0) and scheduler.unavailable == {"a"}

    def test_one_request_does_not_answer_for_another(self, scheduler: Any) -> None:
        """The same name with another number of tokens is other content."""
        scheduler._files.put("one", embeddings(1))
        assert scheduler.ready(request("a", Feature("one", 2)), 0) and scheduler.holds("one")
        assert not scheduler.ready(request("b", Feature("one", 2, tokens=8)), 0) and not scheduler.holds("one")
        assert scheduler.unavailable == {"b"}
        assert scheduler.ready(request("a", Feature("one", 2)), 0) and scheduler.holds("one")


# The second one costs three more processes; `test_vllm_ec_windows` has an engine in processes of its own as well.
@pytest.fixture(scope="module", params=["in process, deepstack", pytest.param("multiprocess", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of the requests of `ec_driver.scenarios`."""
    place = tmp_path_factory.mktemp("ec")
    kind = "qwen3_vl" if "deepstack" in request.param else "qwen2_5_vl"
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    fields = {"rope_parameters": rope} if kind == "qwen2_5_vl" else {}
    model = models.wide(lambda f: models.write_vision_model(f, kind), place / "model", **fields)
    folder = place / "embeddings"
    folder.mkdir()
    (place / "job.json").write_text(json.dumps({"model": str(model), "folder": str(folder)}))
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(request.param == "multiprocess")),
    }  # fmt: skip
    command = [sys.executable, "-m", "engines.ec_driver", str(place / "job.json"), str(place / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads((place / "out.json").read_text())
    found["log"] = done.stdout + done.stderr
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The embeddings are the same bits, and so is everything made from them."""
    assert len(a["logprobs"]) > 100
    return a["ids"] == b["ids"] and a["logprobs"] == b["logprobs"]


@needs_vllm
class TestEngine:
    def test_long_after_the_encoder_cache_forgot(self, run: dict[str, Any]) -> None:
        assert run["first"]["runs"] == 1 and run["first"]["reason"] == "length"
        assert "one" not in run["held"] and len(run["held"]) >= 9
        assert "one@here" in run["held later"]
        for name in ("later", "elsewhere", "pixels"):
            assert run[name]["runs"] == 0, name
            assert same(run[name], run["first"]), name

    def test_a_load_that_fails(self, run: dict[str, Any]) -> None:
        """Recomputing what a synchronous load should have brought needs the picture, which the workers never had."""
        assert run["log"].count("Recovered from KV load failure") >= 3
        for name in ("warm failure", "cold failure"):
            assert run[name]["reason"] == "length" and run[name]["runs"] == 0, name
            assert same(run[name], run["first"]), name
        assert run["twice"]["runs"] == run["twice, failing"]["runs"] == 0
        assert same(run["twice, failing"], run["twice"]) and not same(run["twice"], run["first"])

    def test_only_who_may_saves(self, run: dict[str, Any]) -> None:
        assert run["files"] == [ecfiles.file_name("one")]
        assert run["by a stranger"]["runs"] == 1 and not same(run["by a stranger"], run["first"])

    def test_what_cannot_be_had_fails_alone(self, run: dict[str, Any]) -> None:
        for name in ("gone", "covered and gone", "corrupt", "another shape", "another model"):
            assert run[name]["reason"] == "error" and run[name]["ids"] == [], name
        assert run["corrupt, with pixels"]["runs"] == 1 and same(run["corrupt, with pixels"], run["first"])
        assert same(run["mended"], run["first"]) and run["mended"]["runs"] == 0

    def test_nothing_stays_pinned(self, run: dict[str, Any]) -> None:
        assert len(run["left"]) <= 1  # of the last request, where vLLM's engine process was killed at its end
