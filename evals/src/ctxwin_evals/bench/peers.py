"""Others that keep KV beyond the GPU, asked for the same prompts: vLLM with another connector, in a process of its own.

Pictures are as many tokens of words in its prompts, so that its times hold no vision encoding either.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from ctxwin.engines.base import Engine
from ctxwin.engines.segments import Encoded
from ctxwin.engines.vllm_support import on_a_processor
from ctxwin_evals.bench.moves import words

CONNECTORS: dict[str, dict[str, Any]] = {
    "offloading": {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 30}},
    "lmcache": {"kv_connector": "LMCacheConnectorV1"},
}
"""vLLM's ``kv_transfer_config`` by the names in ``--peers``; without a connector its prefix cache is all there is."""
_ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def check_peers(names: Sequence[str], engine: str) -> None:
    """Raise ValueError for names that `CONNECTORS` does not have, or an engine without connectors."""
    if unknown := [name for name in names if name not in CONNECTORS]:
        raise ValueError(f"--peers must be some of {', '.join(CONNECTORS)}, got {', '.join(unknown)}")
    if names and engine != "vllm":
        raise ValueError(f"--peers run beside vLLM only, got --engine {engine}; leave one of them out")


class Peer:
    """A vLLM with a connector of `CONNECTORS`, beside an engine of its model; RuntimeError says why it does not run here."""

    def __init__(self, name: str, engine: Engine, folder: str, options: dict[str, Any]) -> None:
        self.engine, connector = engine, CONNECTORS[name]
        arguments: dict[str, Any] = {"max_model_len": engine.spec.max_tokens, "enable_prefix_caching": True, "seed": 0}
        if on_a_processor():  # as the engine is opened there
            arguments |= {"enforce_eager": True, "block_size": 32}
        if engine.spec.vision:
            arguments["limit_mm_per_prompt"] = {"image": 0, "video": 0}
        if connector:
            arguments["kv_transfer_config"] = {"kv_role": "kv_both", **connector}
        command = [sys.executable, "-m", "ctxwin_evals.bench.peers", folder, json.dumps(arguments | options)]
        pipe, environment = subprocess.PIPE, os.environ | _ENVIRONMENT
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def time_prompts(
        self, prompts: Sequence[Sequence[Encoded]], query: Encoded, salt: str
    ) -> tuple[float, float, float]:
        """Ask as `_Bench.time_prompts` does; the seconds on a CPU are 0, since it computes in another process."""
        ids = [[token for part in [*prompt, query] for token in self._plain(part)] for prompt in prompts]
        assert self._process.stdin is not None
        print(json.dumps({"prompts": ids, "salt": salt}), file=self._process.stdin, flush=True)
        answer = self._read()
        return answer["ttft_s"], answer["computed"], 0.0

    def close(self) -> None:
        """End its process."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _plain(self, part: Encoded) -> Sequence[int]:
        rng = np.random.default_rng(int(part.chunk_id[:8], 16)) if part.media else None
        return part.token_ids if rng is None else words(self.engine, part.tokens, rng)


def main(folder: str, options: str) -> None:
    """Answer a `Peer`, in lines of JSON, until its input ends; what vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        from ctxwin.engines.torchvision_repair import repair

        repair()
        from vllm import LLM, SamplingParams

        llm, sampling = LLM(folder, **json.loads(options)), SamplingParams(max_tokens=1, temperature=0.0)
    except Exception as error:  # whatever a foreign connector raises at its start
        return tell(error=str(error).partition("\n")[0])
    tell(ready=True)
    for line in sys.stdin:
        job, took, computed = json.loads(line), list[float](), list[int]()
        for ids in job["prompts"]:
            began = time.perf_counter()
            (output,) = llm.generate({"prompt_token_ids": ids, "cache_salt": job["salt"]}, sampling, use_tqdm=False)
            took.append(time.perf_counter() - began)
            computed.append(len(ids) - (output.num_cached_tokens or 0))
        tell(ttft_s=fmean(took[1:]), computed=fmean(computed[1:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
