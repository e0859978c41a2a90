"""Plain requests to a vLLM, with every token timed: no transfer, nothing that the connector would act on."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxwin.engines.base import Encoded
    from ctxwin.engines.vllm.drivers import Driver
    from ctxwin.engines.vllm.engine import VLLMEngine


@dataclass
class Served:
    """What serving one turn took, beside its time.

    Attributes:
        token_ids: of the answer.
        prompt: tokens of the prompt; computed: of them, by a forward; cached: found in vLLM's prefix cache; loaded: bytes
            of KV that were written into the paged cache.
        lanes: tokens of placed chunks by lane; empty for users of the prefix cache.
        misses, fallbacks: KV that was gone from the store, and loads that failed.
    """

    token_ids: tuple[int, ...]
    prompt: int
    computed: int
    cached: int
    loaded: int = 0
    lanes: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    fallbacks: int = 0


def request(
    driver: Driver, prompt: dict[str, Any], answer: int, on_token: Callable[[], None], stop: Iterable[int] = ()
) -> Served:
    """Sends a rendered prompt and waits for its greedy answer.

    Args:
        driver: of the vLLM.
        prompt: as vLLM's renderer makes it.
        answer: tokens to generate.
        on_token: called at each token.
        stop: token ids that end the answer and are no part of it.

    Raises what vLLM raises, and EngineFailed where it has ended.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=answer,
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=sorted(stop),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    ticket = driver.submit(prompt, sampling, 0)
    count = len(prompt["prompt_token_ids"])
    tokens: list[int] = []
    cached = 0
    while True:
        output = _next(ticket.outputs, driver)
        if isinstance(output, BaseException):
            raise output
        (part,) = output.outputs
        cached = max(cached, output.num_cached_tokens or 0)
        for token in part.token_ids:
            tokens.append(token)
            on_token()
        if output.finished:
            if part.finish_reason == "stop":
                tokens.pop()
            return Served(tuple(tokens), count, count - cached, cached)


def _next(outputs: queue.SimpleQueue[Any], driver: Driver) -> Any:
    while True:
        try:
            return outputs.get(timeout=5.0)
        except queue.Empty:
            if driver.dead is not None and outputs.empty():
                raise driver.dead from None


class Plain:
    """Plain requests of chunks to an engine's vLLM.

    What vLLM's own processor cache would keep of a picture is kept, so that a request costs its caller no more than there.
    """

    def __init__(self, engine: VLLMEngine) -> None:
        from ctxwin.engines.vllm.inputs import Inputs

        self._engine, core = engine, engine.core
        self._driver, self._stop = core.driver, core.checkpoint.eos
        # Embeddings travel inside the requests, as those of other users of vLLM do, in whatever process it runs.
        self._inputs = Inputs(core.driver.config.model_config, core.driver.renderer, core.inputs.model)
        self._rendered: dict[str, dict[str, Any]] = {}

    def ask(self, parts: Sequence[Encoded], answer: int, on_token: Callable[[], None]) -> Served:
        """One request over encoded parts; see `request`."""
        return request(self._driver, self._prompt(parts), answer, on_token, self._stop)

    def _prompt(self, parts: Sequence[Encoded]) -> dict[str, Any]:
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids = list(itertools.chain.from_iterable(part.token_ids for part in parts))
        salt = self._engine.plain_salt or None
        items: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        places: dict[str, list[Any]] = {}
        at = 0
        for part in parts:
            if part.media:
                made = self._render(part)
                for kind, found in made["mm_kwargs"].items():
                    items.setdefault(kind, []).extend(found)
                    hashes.setdefault(kind, []).extend(made["mm_hashes"][kind])
                    places.setdefault(kind, []).extend(
                        PlaceholderRange(offset=p.offset + at, length=p.length, is_embed=p.is_embed)
                        for p in made["mm_placeholders"][kind]
                    )
            at += part.tokens
        if not items:
            return dict(tokens_input(ids, cache_salt=salt))
        return dict(mm_input(ids, MultiModalKwargsItems(items), hashes, places, cache_salt=salt))

    def _render(self, part: Encoded) -> dict[str, Any]:
        found = self._rendered.get(part.chunk_id)
        if found is None:
            found = self._inputs.prompt(part.token_ids, part.media, self._engine.embed, "").prompt
            self._rendered[part.chunk_id] = found
        return found
