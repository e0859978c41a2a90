"""One request on vLLM: submit its loads, read its outputs, collect its captures."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxwin.engines.results import ScoredToken
from ctxwin.engines.sampling import Sampling, SamplingOptions
from ctxwin.errors import AnswerStopped, EngineFailed
from ctxwin_vllm.transport.base import PARAM, Transfer, Transport

if TYPE_CHECKING:
    import torch

    from ctxwin.kv.layout import SpanOrigin
    from ctxwin_vllm.drivers import Driver, Ticket

POLL_S = 0.01  # how often background work checks whether it must give way
BACKGROUND = 10  # priority of background work; vLLM serves lower numbers first, and other requests have 0

OnToken = Callable[[list[int]], bool]
_SAME = ("max_tokens", *SamplingOptions.__annotations__)  # the same fields in vLLM's parameters


class LoadError(Exception):
    """The connector could not load or read back a span; no result of the request may be used."""


class CallerError(Exception):
    """The caller's ``on_token`` raised; its exception is the cause."""


@dataclass
class Outcome:
    """Result of one request.

    Attributes:
        token_ids: generated ids, the ending token excluded.
        logprobs: first-token log-probabilities by token id.
        first_token_at: `time.perf_counter` at the first token.
        finished: False where ``on_token`` stopped it; reason: vLLM's finish reason.
        forced: log-probabilities by token id before each of the scored last prompt tokens, then after them.
        sums: see `Transfer.sums`.
        kv: ``(k, v)`` of the prompt and of the answer, where all of it is captured: ``[layers, slots, heads, dim]``, in vLLM's
            positions.
        origin: of that KV, where workers of other processes may keep a copy of it.
        begin: vLLM's position of the question.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)
    first_token_at: float = 0.0
    finished: bool = True
    reason: str = ""
    forced: list[dict[int, float]] = field(default_factory=list)
    sums: torch.Tensor | None = None
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    origin: SpanOrigin | None = None
    begin: int = 0


@dataclass(frozen=True)
class Forced:
    """Request for the ``best`` log-probabilities before each of the last ``tokens`` of a prompt, and after them.

    ``stopped`` is polled; once it is true the request is cancelled and AnswerStopped raised.
    """

    tokens: int
    best: int
    stopped: Callable[[], bool]


class StreamGuard:
    """Passes each token of a stream to a caller once.

    A request that was preempted and whose load then fails is served again from the beginning. Tokens that the caller has
    received cannot be taken back, so the new answer has to begin with them.
    """

    def __init__(self, on_token: Callable[[int, str], bool], decode: Callable[[list[int]], str]) -> None:
        self._on_token = on_token
        self._decode = decode
        self._ids: list[int] = []
        self._continue = True
        self.earlier: list[int] = []

    def __call__(self, ids: list[int]) -> bool:
        """Pass on the last of all ``ids`` generated so far; return False once the caller stops.

        The ``earlier`` ones of an answer of several requests are not among them.

        Raises EngineFailed if a token that was passed on has changed.
        """
        if self.earlier:
            ids = [*self.earlier, *continued(ids, len(self.earlier))]
        at = len(ids) - 1
        if at >= len(self._ids):
            self._ids.append(ids[at])
            self._continue = self._on_token(ids[at], self._decode(ids)) is not False
        elif ids[at] != self._ids[at]:
            raise self._changed()
        return self._continue or len(ids) < len(self._ids)

    def check(self, ids: list[int]) -> None:
        """Raise EngineFailed for a complete answer that is shorter than what was streamed of it."""
        if len(ids) < len(self._ids):
            raise self._changed()

    def _changed(self) -> EngineFailed:
        return EngineFailed("KV of the answer was lost while it was streamed, and anew it is another one; ask again")


def continued(ids: Sequence[int], count: int) -> list[int]:
    """Return the tokens of an answer that follow ``count`` of an earlier request."""
    return [ScoredToken(i, i.index + count, i.logprob, i.best) if isinstance(i, ScoredToken) else i for i in ids]


def run(
    driver: Driver,
    transport: Transport,
    requests: Sequence[tuple[dict[str, Any], Transfer]],
    sampling: Sampling,
    ending: Sequence[int] = (),
    on_token: OnToken | None = None,
    background: bool = False,
    forced: Forced | None = None,
    lora: Any = None,
) -> list[Outcome]:
    """Run requests to their ends, submitted at once so that vLLM steps them together, batched with its other requests.

    Args:
        driver, transport: of a started engine.
        requests: of each a rendered engine input, and what to load and capture, which on return holds the outcome, up to where
            ``on_token`` stopped it.
        sampling, ending: how to decode, and the token ids that end an answer.
        on_token: called in this thread with all ids after each token that does not end an answer; returning False stops.
        background: True for background work; other requests go first.
        forced: scores of a prompt's last tokens to read.
        lora: the adapter to compute them with, vLLM's ``LoRARequest``.

    Raises:
        LoadError, CallerError: of any of them, see there. vLLM's own errors pass through. All are cancelled in each case.
    """
    handles: list[str] = []
    tickets: list[Ticket] = []
    outcomes = [Outcome() for _ in requests]
    collected = 0
    try:
        for _, transfer in requests:
            try:
                handles.append(transport.add(transfer))
            except OSError as error:
                raise LoadError(f"what the request loads could not be submitted: {error}") from error
        parameters = [_parameters(sampling, ending, handle, forced) for handle in handles]
        with driver.counted(background, len(requests)):
            with driver.together():
                for (prompt, _), options in zip(requests, parameters, strict=True):
                    tickets.append(driver.submit(prompt, options, BACKGROUND if background else 0, lora))
            for outcome in outcomes:
                outcome.reason = _follow(driver, tickets.pop(0), outcome, sampling, on_token, forced)
        for handle, (_, transfer), outcome in zip(handles, requests, outcomes, strict=True):
            transport.collect(handle, transfer, outcome.reason != "error")
            collected += 1
    except BaseException:
        for ticket in tickets:
            driver.cancel(ticket)
        for handle, (_, transfer) in list(zip(handles, requests, strict=False))[collected:]:
            transport.collect(handle, transfer, False)  # its cost counts all the same
        raise
    finally:
        for handle in handles:
            transport.remove(handle)
    for (prompt, transfer), outcome in zip(requests, outcomes, strict=True):
        _check_outcome(driver, prompt, transfer, outcome, forced.tokens if forced else 0, sampling.json_schema)
    return outcomes


def _check_outcome(
    driver: Driver, prompt: dict[str, Any], transfer: Transfer, outcome: Outcome, scored: int, schema: str | None
) -> None:
    """Raise LoadError where a request was not computed behind the KV that it was to load."""
    cached = transfer.local_tokens + transfer.planned_tokens
    loaded = transfer.error is None and transfer.loaded_tokens == transfer.planned_tokens
    if scored and cached >= len(prompt["prompt_token_ids"]) - scored:
        raise EngineFailed("places of the answer were not computed, so that it could not be scored")
    if not outcome.finished and cached >= transfer.placeholder_tokens:
        # The tokens so far came from sound KV. A later failed or pending load, after a preemption for example, does not
        # matter: served again, the caller would receive once more what it has stopped.
        if not loaded:
            transfer.captured.clear()
        return
    if outcome.reason == "error" and loaded and schema and not prompt.get("mm_kwargs"):  # lost media are not told
        raise EngineFailed(f"vLLM could not follow the JSON schema {schema[:60]}; ask with a simpler one, or none")
    if transfer.error is not None or outcome.reason == "error":
        raise LoadError(str(transfer.error or "vLLM reported a failed load")) from transfer.error
    if not loaded:
        # The scheduler expected tokens that were not written: their blocks hold garbage under the hashes of real ones.
        driver.reset_prefix_cache()
        raise LoadError(f"{transfer.planned_tokens} tokens were to be loaded, got {transfer.loaded_tokens}")
    if cached < transfer.placeholder_tokens:
        # vLLM did not query the connector, or not for all tokens: zeros were computed in place of media.
        driver.reset_prefix_cache()
        raise LoadError(f"{transfer.placeholder_tokens} tokens were to come from the cache or from spans, got fewer")


def _follow(
    driver: Driver,
    ticket: Ticket,
    outcome: Outcome,
    sampling: Sampling,
    on_token: OnToken | None,
    forced: Forced | None,
) -> str:
    """Read outputs until the request ends; return vLLM's finish reason."""
    ended = False
    try:
        while not ended:
            output = _next(driver, ticket.outputs, forced)
            if isinstance(output, BaseException):
                ended = True
                raise output
            ended = output.finished
            (part,) = output.outputs
            fresh = _fresh(part, len(outcome.token_ids), sampling.token_logprobs)
            if forced is not None and fresh and not outcome.forced:
                outcome.forced = _forced(output, part, forced)
            if fresh and not outcome.first_token_at:
                outcome.first_token_at = time.perf_counter()
                if part.logprobs and sampling.logprobs:
                    outcome.logprobs = _best(part.logprobs[0], sampling.logprobs)
            if part.finish_reason == "stop" and fresh:
                fresh.pop()
            for token in fresh:
                outcome.token_ids.append(token)
                try:
                    outcome.finished = on_token is None or on_token(outcome.token_ids)
                except Exception as error:
                    raise CallerError from error
                if not outcome.finished:
                    return str(part.finish_reason) if ended else "abort"
        return str(part.finish_reason)
    finally:
        if not ended:
            driver.cancel(ticket)


def _forced(output: Any, part: Any, forced: Forced) -> list[dict[int, float]]:
    """Return the scores of a request with `Forced`. Raises EngineFailed where vLLM did not compute those positions."""
    ids, rows = list(output.prompt_token_ids or ()), output.prompt_logprobs
    scores = []
    for at in range(len(ids) - forced.tokens, len(ids)):
        entries = rows[at] if rows is not None and len(rows) == len(ids) else None
        if not entries or ids[at] not in entries:
            raise EngineFailed(f"vLLM gave no log-probabilities for token {at} of {len(ids)} of a prompt")
        scores.append(_best(entries, forced.best) | {ids[at]: float(entries[ids[at]].logprob)})
    return [*scores, _best(part.logprobs[0], forced.best)]


def _next(driver: Driver, outputs: queue.SimpleQueue[Any], forced: Forced | None) -> Any:
    """Return the next output; check every few seconds that vLLM still runs, in case it died silently."""
    while True:
        try:
            return outputs.get(timeout=5.0 if forced is None else POLL_S)
        except queue.Empty:
            if forced is not None and forced.stopped():
                raise AnswerStopped("the engine is wanted for other work") from None
            if (dead := driver.dead) is not None and outputs.empty():
                raise dead from None


def _parameters(sampling: Sampling, ending: Sequence[int], handle: str, forced: Forced | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    schema, logprobs = sampling.json_schema, sampling.logprobs
    seed = {"seed": -(2**63)} if sampling.seed == -1 else {}  # vLLM takes -1 for none
    if logprobs >= 0 and sampling.token_logprobs is not None:
        logprobs = max(logprobs, sampling.token_logprobs)  # vLLM adds the token's own
    prompt: dict[str, Any] = {}
    if forced is not None:
        logprobs = forced.best
        if forced.tokens:
            # Without the last option vLLM would neither load nor hit. Positions that it did not compute hold garbage, which is
            # never read: the tokens of an answer are in no block that another request could have left.
            prompt = {"prompt_logprobs": forced.best, "flat_logprobs": True, "skip_reading_prefix_cache": False}
    return SamplingParams(
        **prompt,
        **{name: getattr(sampling, name) for name in _SAME} | seed,
        logprobs=None if not logprobs and sampling.token_logprobs is None else logprobs,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=_closed(schema)),
        # The ending ids come from the tokenizer and the generation config, collected once for every engine.
        ignore_eos=True,
        stop_token_ids=[*ending, *sampling.stop_ids],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": {PARAM: handle}},
    )


def _closed(schema: str) -> Any:
    """Return a schema whose objects have the named properties alone, or small models would go on inventing more.

    Where ``allOf`` joins several they stay open, since each would exclude what the others name.
    """
    from vllm.v1.structured_output.backend_guidance import process_for_additional_properties

    joined: list[Any] = []
    json.loads(schema, object_hook=lambda part: joined.extend(list(part.get("allOf") or ())[1:]))
    return schema if joined else process_for_additional_properties(schema)


def check(driver: Driver, sampling: Sampling) -> None:
    """Raise ValueError for a JSON schema that vLLM cannot enforce, or that nothing fits. Cost: some milliseconds."""
    if sampling.json_schema is None:
        return
    from llguidance import LLMatcher, LLTokenizer
    from vllm.config import StructuredOutputsConfig

    config = driver.config
    # With "auto" vLLM compiles all schemas with the library that it chose for the first, whatever it checked them with.
    library = StructuredOutputsConfig(backend=config.structured_outputs_config.backend.replace("auto", "xgrammar"))
    try:
        parameters = _parameters(sampling, (), "")
        grammar = LLMatcher.grammar_from_json_schema(parameters.structured_outputs.json)
        parameters.verify(config.model_config, config.speculative_config, library, driver.renderer.tokenizer)
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_stopped():  # also by what it cannot enforce, which xgrammar ignores
            reason = matcher.get_error().partition("\n<state>")[0]
            raise ValueError(reason.replace("NoExtensionBias", "nothing fits it"))
    except Exception as error:  # any error of the libraries that read schemas
        reason = " ".join(str(error).split())
        raise ValueError(f"the JSON schema must be one that vLLM enforces, but: {reason}; leave that out") from error


def _fresh(part: Any, index: int, best: int | None) -> list[int]:
    """Return the ids of an output; as `ScoredToken` with the ``best`` alternatives if ``best`` is not None."""
    if best is None or not part.token_ids:
        return list(part.token_ids)
    return [
        ScoredToken(token, index + i, float(entries[token].logprob), _best(entries, best))
        for i, (token, entries) in enumerate(zip(part.token_ids, part.logprobs, strict=True))
    ]


def _best(entries: Any, count: int) -> dict[int, float]:
    """Return the ``count`` best log-probabilities of a position by token, all for -1; vLLM adds the sampled token to them."""
    logprobs = {token: float(entry.logprob) for token, entry in entries.items()}
    best = logprobs if count < 0 else sorted(logprobs, key=lambda token: (-logprobs[token], token))[:count]
    return {token: logprobs[token] for token in best}


def with_handle(sampling: Any, handle: str) -> Any:
    """Return vLLM's sampling parameters with the handle of a transfer; with "" without one, which a client has forged."""
    extra = getattr(sampling, "extra_args", None) or {}
    parameters = extra.get("kv_transfer_params")
    kept = {k: v for k, v in parameters.items() if k != PARAM} if isinstance(parameters, dict) else parameters
    if not handle and kept == parameters:
        return sampling
    copy = sampling.clone()
    copy.extra_args = {**extra, "kv_transfer_params": {PARAM: handle} if handle else kept}
    return copy
