"""One request on an in-process vLLM engine, step by step."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxwin.adapters.vllm.registry import PARAM, Exchange, Transfer
from ctxwin.engines.base import Sampling

_serial = itertools.count()


class LoadError(Exception):
    """The connector could not load or read back a span; nothing of the request may be used."""


class CallerError(Exception):
    """The caller's ``on_token`` raised; its exception is the cause."""


@dataclass
class Outcome:
    """What one request returned.

    Attributes:
        token_ids: generated ids, the ending token excluded.
        logprobs: first-token log-probabilities by token id.
        first_token_at: `time.perf_counter` at the first token.
        finished: False where ``on_token`` stopped it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)
    first_token_at: float = 0.0
    finished: bool = True


def run(
    llm: Any,
    exchange: Exchange,
    prompt: dict[str, Any],
    transfer: Transfer,
    sampling: Sampling,
    ending: Sequence[int] = (),
    on_token: Callable[[list[int]], bool] | None = None,
) -> Outcome:
    """Runs one request to its end; the caller holds the engine's lock.

    Args:
        llm: a started engine.
        exchange: its exchange.
        prompt: a rendered engine input.
        transfer: what to load and capture; filled on return.
        sampling: how to decode.
        ending: token ids that end the answer.
        on_token: called with all ids after each token that does not end the answer; returning False stops.

    Raises:
        LoadError, CallerError: see there. Whatever vLLM raises passes through. The request is taken back in each case.
    """
    engine = llm.llm_engine
    handle = exchange.add(transfer)
    outcome = Outcome()
    request = None
    try:
        with _no_compilation(engine.vllm_config):
            request = engine.add_request(f"ctxwin-{next(_serial)}", prompt, _parameters(sampling, ending, handle))
            reason = _steps(engine, request, outcome, sampling, on_token)
            request = None
    finally:
        if request is not None:
            with contextlib.suppress(Exception):  # the first error is the one to report
                engine.abort_request([request], internal=True)
        exchange.remove(handle)
    if transfer.error is not None or reason == "error":
        raise LoadError(str(transfer.error or "vLLM reported a failed load")) from transfer.error
    if transfer.loaded_tokens != transfer.planned_tokens:
        # The scheduler counted on tokens that nobody wrote: their blocks hold garbage under the hashes of real ones.
        engine.reset_prefix_cache()
        raise LoadError(f"{transfer.planned_tokens} tokens were to be loaded, got {transfer.loaded_tokens}")
    return outcome


def _steps(
    engine: Any, request: str, outcome: Outcome, sampling: Sampling, on_token: Callable[[list[int]], bool] | None
) -> str | None:
    """Steps until the request ends; returns vLLM's reason."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            (part,) = output.outputs
            fresh = list(part.token_ids)
            if fresh and not outcome.first_token_at:
                outcome.first_token_at = time.perf_counter()
                outcome.logprobs = _first(part.logprobs, sampling.logprobs)
            if part.finish_reason == "stop" and fresh:
                fresh.pop()
            for token in fresh:
                outcome.token_ids.append(token)
                if on_token is not None and not _asked(on_token, outcome.token_ids):
                    outcome.finished = False
                    break
            if output.finished:
                return str(part.finish_reason)
            if not outcome.finished:
                engine.abort_request([request], internal=True)
                return "abort"
    return "error"


def _asked(on_token: Callable[[list[int]], bool], token_ids: list[int]) -> bool:
    try:
        return on_token(token_ids)
    except Exception as error:
        raise CallerError from error


def _parameters(sampling: Sampling, ending: Sequence[int], handle: str) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        logprobs=sampling.logprobs or None,
        # The ending ids are the tokenizer's and the generation config's, collected once for every engine.
        ignore_eos=True,
        stop_token_ids=[*ending, *sampling.stop_ids],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": {PARAM: handle}},
    )


def _first(logprobs: Any, wanted: int) -> dict[int, float]:
    """The log-probabilities of the first position; vLLM adds the sampled token to the ``wanted`` best."""
    if not logprobs or not wanted:
        return {}
    found = {token: float(entry.logprob) for token, entry in logprobs[0].items()}
    if wanted < 0:
        return found
    best = sorted(found, key=lambda token: (-found[token], token))[:wanted]
    return {token: found[token] for token in best}


@contextlib.contextmanager
def _no_compilation(config: Any) -> Iterator[None]:
    """Runs vLLM's few ``torch.compile``d sampling functions as written on a CPU, whose compiler takes 17 s for them."""
    import torch

    if config.device_config.device_type == "cpu" and config.model_config.enforce_eager:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
