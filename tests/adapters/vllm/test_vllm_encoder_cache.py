"""Vision embeddings through vLLM's encoder-cache connector: requests that name a picture and carry nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ctxwin.store import codec
from ctxwin_vllm.lifecycle.folders import sum_of, write_file
from ctxwin_vllm.transport import PARAM
from ctxwin_vllm.transport import embeddings as embedding_files
from ctxwin_vllm.transport.embeddings import EmbeddingFiles
from ctxwin_vllm.vision import WorkerExtension
from engines import models

ROOT = Path(__file__).resolve().parents[3]


def embeddings(seed: int, tokens: int = 9, width: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def put(files: EmbeddingFiles, name: str, given: torch.Tensor) -> None:
    """As the transport writes them."""
    write_file(files.path(name), embedding_files.encode(given, files.identity))


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_is_put_comes_back(self, tmp_path: Path, dtype: torch.dtype) -> None:
        files = EmbeddingFiles(tmp_path, "m")
        given = embeddings(1, dtype=dtype)
        put(files, "a/b:c@d", given)
        found = EmbeddingFiles(tmp_path, "m").get("a/b:c@d")
        assert found is not None and found.dtype == dtype and torch.equal(found, given)
        assert [path.name for path in tmp_path.iterdir()] == [embedding_files.file_name("a/b:c@d")]
        assert files.path("a/b:c@d").stat().st_mode & 0o077 == 0

    def test_names(self) -> None:
        assert embedding_files.name_of("name@provenance@more") == embedding_files.name_of("name") == "name"
        assert len({embedding_files.file_name(name) for name in ("", "a", "A", "a/b", "../a")}) == 5
        assert "/" not in embedding_files.file_name("../../etc/passwd")

    def test_of_no_use(self, tmp_path: Path) -> None:
        """Every byte counts, and so does the model."""
        files = EmbeddingFiles(tmp_path, "m")
        assert files.get("x") is None and EmbeddingFiles(tmp_path / "a folder that is gone").get("x") is None
        put(files, "x", embeddings(1, tokens=1, width=2))
        good = files.path("x").read_bytes()
        assert EmbeddingFiles(tmp_path, "n").get("x") is None
        for at in range(len(good)):
            files.path("x").unlink()
            files.path("x").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert files.get("x") is None, at
        for end in range(len(good)):
            files.path("x").write_bytes(good[:end])
            assert files.get("x") is None, end

    def test_only_embeddings(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"must be \[tokens, width\]"):
            embedding_files.encode(torch.zeros(3))
        files = EmbeddingFiles(tmp_path)
        for tensors in ({"other": torch.zeros(1, 1)}, {"embeddings": torch.zeros(2)}, {}):
            blob = codec.encode_tensors(tensors, {"identity": ""}, checked=False)
            files.path("x").write_bytes(blob + sum_of(blob).to_bytes(8, "little"))
            assert files.get("x") is None


def damage(path: Path) -> None:
    """Writes into a file, as nobody does who follows the rules."""
    with path.open("r+b") as file:
        file.write(b"\xff" * (path.stat().st_size // 2))


@pytest.mark.parametrize("outside", ["source", "target"])
def test_the_tower_reads_and_writes_in_the_spool_alone(tmp_path: Path, outside: str) -> None:
    """vLLM's server lets clients call methods of its workers in its development mode."""
    transport, other = tmp_path / "transport", tmp_path / "other"
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={PARAM: str(transport)}))
    worker: Any = WorkerExtension()
    worker.vllm_config = config
    source, target = transport / "media-a", transport / "encoded-a"
    for folder in (transport, other):
        folder.mkdir()
        (folder / "media-a").write_bytes(codec.encode_tensors({"inputs": torch.zeros(1), "grids": torch.zeros(1)}))
    for wrong in (other / "x", transport / ".." / "other" / "x", transport / "span-a"):
        given = {"source": source, "target": target} | {outside: wrong}
        with pytest.raises(ValueError, match="files of ctxwin_encode_media"):
            worker.ctxwin_encode_media(str(given["source"]), str(given["target"]), False)
    assert [path.name for path in other.iterdir()] == ["media-a"]


class Feature:
    """A media item that carries nothing, as vLLM's scheduler sees it."""

    def __init__(self, identifier: str, offset: int, tokens: int = 9) -> None:
        self.identifier = identifier
        self.modality = "image"
        self.data: Any = None
        self.mm_position = SimpleNamespace(offset=offset, length=tokens, get_num_embeds=lambda: tokens)


def request(name: str, *features: Feature) -> Any:
    return SimpleNamespace(request_id=name, mm_features=list(features))


class TestScheduler:
    @pytest.fixture
    def scheduler(self, tmp_path: Path) -> Iterator[Any]:
        from ctxwin_vllm.connector.encoder_cache import Scheduler

        opened = Scheduler(EmbeddingFiles(tmp_path), 64, torch.float32, step=96)
        yield opened
        assert not list(tmp_path.glob(".*"))  # the folder is what a client wrote into it

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_was_found_is_what_is_loaded(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Between the check and the load the file is written into and goes away, with all the others."""
        import cloudpickle  # vLLM's own, as it sends its workers what to do

        from ctxwin_vllm.connector.encoder_cache import EmbeddingMetadata, EncoderCacheConnector, Scheduler

        files = EmbeddingFiles(tmp_path / "embed")
        files.folder.mkdir()
        scheduler = Scheduler(files, 64, dtype, step=96)
        put(files, "one", embeddings(1, dtype=dtype))
        asked = request("a", Feature("one@here", 2))
        assert scheduler.ready(asked, 0) and scheduler.holds("one")
        damage(files.path("one"))
        shutil.rmtree(tmp_path / "embed")
        scheduler.plan(asked, "one@here")
        step = EmbeddingMetadata(scheduler.loads)
        buffers: list[Any] = []
        sent = cloudpickle.dumps(step, protocol=5, buffer_callback=buffers.append)
        assert len(sent) < 1000 and len(repr(step)) < 1000  # of a dying engine vLLM logs what it was to do
        worker = EncoderCacheConnector.__new__(EncoderCacheConnector)
        worker.bind_connector_metadata(cloudpickle.loads(sent, buffers=[bytes(b) for b in buffers]))
        cache: dict[str, torch.Tensor] = {}
        worker.start_load_caches(cache)
        assert cache.keys() == {"one@here"} and torch.equal(cache["one@here"], embeddings(1, dtype=dtype))

    def test_only_what_the_next_steps_may_need_is_at_hand(self, scheduler: Any) -> None:
        """A long window's media are more than anybody would keep in memory twice."""
        files = scheduler.files
        names = [f"frame {i}" for i in range(50)]
        for i, name in enumerate(names):
            put(files, name, embeddings(i))
        long = request("a", *(Feature(name, 2 + 10 * i) for i, name in enumerate(names)))
        step = 96
        for computed in range(0, 600, step):
            assert scheduler.ready(long, computed)
            needed = [i for i in range(50) if 2 + 10 * i < computed + step and 11 + 10 * i > computed]
            assert all(scheduler.holds(names[i]) for i in needed) and len(scheduler.held.get("a", ())) <= 20
            assert not any(scheduler.holds(names[i]) for i in range(50) if 11 + 10 * i <= computed)
        assert not scheduler.held and not scheduler._in_memory
        assert scheduler.ready(long, 0) and scheduler.holds("frame 0")  # preempted
        scheduler.forget("a")
        assert not scheduler.held and not scheduler._in_memory

    def test_what_loaded_kv_covers_is_looked_for_when_the_load_has_failed(self, scheduler: Any) -> None:
        put(scheduler.files, "behind", embeddings(1))
        covered = request("a", Feature("covered", 2), Feature("behind", 20))
        assert scheduler.ready(covered, 11) and not scheduler.unavailable
        assert scheduler.ready(covered, 20) and not scheduler.holds("covered")
        assert not scheduler.ready(covered, 0) and scheduler.unavailable == {"a"}

    def test_one_request_does_not_answer_for_another(self, scheduler: Any) -> None:
        """The same name with another number of tokens is other content."""
        put(scheduler.files, "one", embeddings(1))
        assert scheduler.ready(request("a", Feature("one", 2)), 0) and scheduler.holds("one")
        assert not scheduler.ready(request("b", Feature("one", 2, tokens=8)), 0) and not scheduler.holds("one")
        assert scheduler.unavailable == {"b"}
        assert scheduler.ready(request("a", Feature("one", 2)), 0) and scheduler.holds("one")

    def test_requests_share_what_one_of_them_holds(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is read once, and once more when all of them have ended."""
        put(scheduler.files, "one", embeddings(1))
        get, reads = scheduler.files.get, list[str]()
        monkeypatch.setattr(scheduler.files, "get", lambda name: (reads.append(name), get(name))[1])
        first, second = request("a", Feature("one", 2)), request("b", Feature("one", 5))
        assert scheduler.ready(first, 0) and scheduler.ready(second, 0) and scheduler.ready(first, 0)
        scheduler.forget("a")
        assert scheduler.ready(second, 0) and scheduler.holds("one") and reads == ["one"]
        scheduler.forget("b")
        assert not scheduler.held and scheduler.ready(first, 0) and reads == ["one", "one"]

    def test_what_has_another_shape_is_read_and_warned_about_once(
        self, scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its request carries the picture, which vLLM encodes; the next request looks again, at what may be mended."""
        put(scheduler.files, "one", embeddings(1, tokens=8))
        get, reads = scheduler.files.get, list[str]()
        monkeypatch.setattr(scheduler.files, "get", lambda name: (reads.append(name), get(name))[1])
        feature = Feature("one", 2)
        feature.data = {"pixels": SimpleNamespace(field=SimpleNamespace(keep_on_cpu=False))}
        for computed in (0, 0, 4):
            assert scheduler.ready(request("a", feature), computed) and not scheduler.holds("one")
        assert reads == ["one"] and len(caplog.messages) == 1 and "must be [9, 64]" in caplog.text
        scheduler.forget("a")
        put(scheduler.files, "one", embeddings(1))
        assert scheduler.ready(request("b", feature), 0) and scheduler.holds("one")


GUARD = [pytest.mark.slow, pytest.mark.guard]


# The second one costs three more processes; `test_vllm_ec_windows` has an engine in processes of its own as well.
@pytest.fixture(
    scope="module",
    params=[pytest.param("in process, deepstack", marks=GUARD), pytest.param("multiprocess", marks=pytest.mark.slow)],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of the requests of `encoder_cache_driver.scenarios`."""
    place = tmp_path_factory.mktemp("encoder-cache")
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
    driver = "adapters.vllm.encoder_cache_driver"
    command = [sys.executable, "-m", driver, str(place / "job.json"), str(place / "out.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, Any] = json.loads((place / "out.json").read_text())
    found["log"] = done.stdout + done.stderr
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The embeddings are the same bits, and so is everything made from them."""
    assert len(a["logprobs"]) > 100
    return a["ids"] == b["ids"] and a["logprobs"] == b["logprobs"]


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

    def test_nothing_that_a_client_sends_is_saved(self, run: dict[str, Any]) -> None:
        assert run["files"] == [embedding_files.file_name("one")]
        assert run["by a stranger"]["runs"] == 1 and not same(run["by a stranger"], run["first"])

    def test_what_cannot_be_had_fails_alone(self, run: dict[str, Any]) -> None:
        for name in ("gone", "covered and gone", "corrupt", "another shape", "another model"):
            assert run[name]["reason"] == "error" and run[name]["ids"] == [], name
        assert run["corrupt, with pixels"]["runs"] == 1 and same(run["corrupt, with pixels"], run["first"])
        assert same(run["mended"], run["first"]) and run["mended"]["runs"] == 0

    def test_a_file_that_goes_away_between_its_check_and_its_load(self, run: dict[str, Any]) -> None:
        """Cold, damaged and removed with the whole folder: the request is answered all the same, and so is the next one."""
        assert run["struck"]["reason"] == "length" and run["struck"]["runs"] == 0
        assert same(run["struck"], run["first"])
        assert run["behind it"]["reason"] == "error" and run["after all"]["reason"] == "length"

    def test_nothing_is_left_in_the_folder(self, run: dict[str, Any]) -> None:
        assert run["left"] == [embedding_files.file_name("one")]
