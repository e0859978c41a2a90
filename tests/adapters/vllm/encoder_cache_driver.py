"""What `test_vllm_encoder_cache` runs in processes of its own: plain vLLM with the EC connector, and a KV connector that fails.

``python -m adapters.vllm.encoder_cache_driver JOB OUT``; vLLM's own processes import this module too, for the
classes that it names.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from ctxwin_vllm.connector.encoder_cache import EncoderCacheConnector
from ctxwin_vllm.lifecycle.folders import write_file
from ctxwin_vllm.transport import embeddings

HEAD = [10, 11]
QUESTION = list(range(20, 40))
STRUCK = "one@struck"
WARM_UP = 12  # pictures of 9 tokens: more than the encoder cache of 96 holds beside the one that is asked for


class Failed(KVConnectorMetadata):
    """Blocks whose load is to fail in this step."""

    def __init__(self, blocks: set[int]) -> None:
        self.blocks = blocks


class FailingConnector(KVConnectorBase_V1):
    """Promises ``{"promised": n}`` tokens of a request as a synchronous load, and then fails to load any of them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._planned: set[int] = set()
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promised = (request.kv_transfer_params or {}).get("promised", 0)
        return max(0, promised - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            size = self._vllm_config.cache_config.block_size
            self._planned.update(ids[: -(-request.kv_transfer_params["promised"] // size)])

    def build_connector_meta(self, scheduler_output: Any) -> Failed:
        planned, self._planned = self._planned, set()
        return Failed(planned)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._failed |= self._get_connector_metadata().blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class StrickenConnector(EncoderCacheConnector):
    """Loses its folder when vLLM has been told that `STRUCK` is there, and has not been told to load it."""

    def has_cache_item(self, identifier: str) -> bool:
        found = super().has_cache_item(identifier)
        if identifier == STRUCK and found:
            files = self.scheduler.files
            files.path("one").write_bytes(b"?" * files.path("one").stat().st_size)
            shutil.rmtree(files.folder)
        return found


class Tower:
    """vLLM's worker extension: counts the runs of the vision tower in every worker."""

    def tower_runs(self) -> int:
        visual = self.get_model().visual
        if not hasattr(visual, "runs"):
            visual.runs = 0
            forward = visual.forward

            def counted(*args: Any, **kwargs: Any) -> Any:
                visual.runs += 1
                return forward(*args, **kwargs)

            visual.forward = counted
        return visual.runs

    def held(self) -> list[str]:
        """What lies in the worker's encoder cache."""
        return sorted(self.model_runner.encoder_cache)

    def keep(self, name: str, path: str) -> None:
        """Writes what lies in the worker's encoder cache, as the engine does."""
        write_file(Path(path), embeddings.encode(self.model_runner.encoder_cache[name], "test"))


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (84, 84, 3), dtype=np.uint8)


class Driver:
    """One engine and the requests to it."""

    def __init__(self, model: str, folder: str, ranks: int = 1) -> None:
        from transformers import AutoConfig
        from vllm import LLM
        from vllm.model_executor.models.registry import ModelRegistry

        # Imported here, since vLLM would look at the class in a process of its own.
        for name in AutoConfig.from_pretrained(model).architectures:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        self.llm = LLM(
            model, dtype="float32", enforce_eager=True, block_size=32, kv_cache_memory_bytes=1 << 27, max_model_len=512,
            max_num_batched_tokens=96, max_logprobs=-1, disable_log_stats=True, skip_mm_profiling=True,
            tensor_parallel_size=ranks, mm_processor_cache_gb=0, worker_extension_cls="adapters.vllm.encoder_cache_driver.Tower",
            limit_mm_per_prompt={"image": 4}, enable_mm_embeds=True, mm_device_do_normalize=False,
            kv_transfer_config={
                "kv_connector": "FailingConnector", "kv_connector_module_path": "adapters.vllm.encoder_cache_driver",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            },
            ec_transfer_config={
                "ec_connector": "StrickenConnector", "ec_connector_module_path": "adapters.vllm.encoder_cache_driver",
                "ec_role": "ec_both",
                "ec_connector_extra_config": {"folder": folder, "identity": "test"},
            },
        )  # fmt: skip
        config = self.llm.llm_engine.vllm_config
        self.image = config.model_config.hf_config.image_token_id
        self.runs = self.tower_runs()
        self._serial = 0

    def tower_runs(self) -> int:
        return max(self.llm.collective_rpc("tower_runs"))

    def held(self) -> list[str]:
        return self.llm.collective_rpc("held")[0]

    def seen(self, seed: int, name: str, **extra: Any) -> dict[str, Any]:
        """A request with pixels, through vLLM's own processor."""
        prompt = {
            "prompt_token_ids": [*HEAD, self.image, *QUESTION],
            "multi_modal_data": {"image": [picture(seed)]},
            "multi_modal_uuids": {"image": [name]},
            "cache_salt": self._salt(),
        }
        return self._run(prompt, extra)

    def bare(self, *names: str, **extra: Any) -> dict[str, Any]:
        """A request whose pictures are a grid and an identifier."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids, places = [*HEAD], []
        for _ in names:
            places.append(PlaceholderRange(offset=len(ids), length=9))
            ids += [self.image] * 9
        items = MultiModalKwargsItems({"image": [self._grid() for _ in names]})
        prompt = mm_input([*ids, *QUESTION], items, {"image": list(names)}, {"image": places}, cache_salt=self._salt())
        return self._run(dict(prompt), extra)

    def _grid(self) -> Any:
        import torch
        from transformers import BatchFeature
        from vllm.multimodal.inputs import MultiModalKwargsItems

        processor = self.llm.llm_engine.renderer.get_mm_processor()
        data = BatchFeature({"image_grid_thw": torch.tensor([[1, 6, 6]])})
        return MultiModalKwargsItems.from_hf_inputs(data, processor._get_mm_fields_config(data, {}))["image"][0]

    def _salt(self) -> str:
        """Every request computes all of its KV."""
        self._serial += 1
        return f"salt-{self._serial}"

    def _run(self, prompt: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(max_tokens=2, temperature=0, logprobs=-1, detokenize=False, extra_args=extra)
        before, last = self.tower_runs(), None
        engine.add_request(f"r{self._serial}", prompt, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                last = output if output.finished else last
        part = last.outputs[0]
        logprobs = part.logprobs[0] if part.logprobs else {}
        return {
            "reason": part.finish_reason, "ids": list(part.token_ids), "runs": self.tower_runs() - before,
            "logprobs": {str(token): entry.logprob for token, entry in logprobs.items()},
        }  # fmt: skip

    def flood(self) -> None:
        """Pushes everything else out of the encoder cache."""
        for seed in range(WARM_UP):
            self.seen(100 + seed, f"flood-{seed}")


def scenarios(driver: Driver, folder: Path) -> dict[str, Any]:
    """What became of each request, by name."""
    import torch

    one = folder / embeddings.file_name("one")
    out: dict[str, Any] = {"first": driver.seen(1, "one")}
    driver.llm.collective_rpc("keep", args=("one", str(one)))
    out["by a stranger"] = driver.seen(2, "two", ec_transfer_params={"ctxwin": {"save": "a guess"}})
    out["files"] = sorted(path.name for path in folder.glob("embed-*"))
    driver.flood()
    out["held"] = driver.held()
    # Long after: the same picture by its name alone, at two provenances, twice in one request, under KV that fails.
    out["later"] = driver.bare("one@here")
    out["held later"] = driver.held()
    out["elsewhere"] = driver.bare("one@there")
    out["warm failure"] = driver.bare("one@there", kv_transfer_params={"promised": 25})
    driver.flood()
    out["twice"] = driver.bare("one", "one")
    driver.flood()
    out["twice, failing"] = driver.bare("one", "one", kv_transfer_params={"promised": 30})
    driver.flood()
    out["cold failure"] = driver.bare("one", kv_transfer_params={"promised": 25})
    driver.flood()
    out["pixels"] = driver.seen(1, "one")  # has pixels, and is served from the folder all the same
    driver.flood()
    # Nothing to be had: these requests fail alone.
    out["gone"] = driver.bare("two")
    out["covered and gone"] = driver.bare("two", kv_transfer_params={"promised": 25})
    good = one.read_bytes()

    def replace(content: bytes) -> None:
        one.unlink()
        one.write_bytes(content)

    replace(good[:-40] + bytes([good[-40] ^ 1]) + good[-39:])
    out["corrupt"] = driver.bare("one")
    out["corrupt, with pixels"] = driver.seen(1, "one")
    driver.flood()
    replace(embeddings.encode(torch.zeros(8, 64), "test"))
    out["another shape"] = driver.bare("one")
    replace(embeddings.encode(torch.zeros(9, 64), "another model"))
    out["another model"] = driver.bare("one")
    replace(good)
    out["mended"] = driver.bare("one")
    driver.flood()
    out["left"] = sorted(path.name for path in folder.rglob("*"))
    out["struck"] = driver.bare(STRUCK)
    out["behind it"] = driver.bare("one@now")
    out["after all"] = driver.seen(1, "one")
    return out


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    driver = Driver(job["model"], job["folder"])
    out = scenarios(driver, Path(job["folder"]))
    driver.llm.llm_engine.engine_core.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
