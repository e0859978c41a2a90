"""Windows of vLLM's own chats, responses and messages: the engine client of vLLM's server.

vLLM's routes parse the request, render the prompt, sample, stream and parse answers as usual. Only their calls of the engine pass
through here and get KV for the prompt through the connector. If that fails, the failure is counted and logged, and vLLM computes
the request alone. The engine's own requests (missing parts of a window, audits) bypass this client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from functools import lru_cache, partial
from typing import Any

from ctxwin.errors import EngineFailed
from ctxwin.fidelity import Fidelity
from ctxwin_chats.prediction import common_prefix
from ctxwin_chats.prefill import Ahead
from ctxwin_server.app.request_options import RequestOptions
from ctxwin_server.app.service import Service, TenantState
from ctxwin_server.chat.conversations import Turn, WriteBackPending, resolved_fidelity
from ctxwin_vllm.engine import VLLMEngine
from ctxwin_vllm.media_cache import ReceivedMedia, confirm_media, names_of, names_sent
from ctxwin_vllm.rendered import NotAWindow, Pictures, RenderedPrompt, RenderedRequest
from ctxwin_vllm.requests import with_handle

_SERVING = ("openai_serving_chat", "openai_serving_responses", "anthropic_serving_messages")
"""Handlers of `request_options.ROUTES` in the state of vLLM's app."""
_log = logging.getLogger("ctxwin.serve")


def install_chat_client(state: Any, client: Any, service: Service) -> None:
    """Replace the engine client of vLLM's request handlers, in the state of its app, by one that serves windows.

    Raises EngineFailed for a server whose chats would not use it.
    """
    ours = ChatClient(client, service, confirm_media(client))
    for name in list(state):
        if getattr(state[name], "engine_client", None) is client:
            state[name].engine_client = ours
    state.engine_client = ours
    others = [name for name in _SERVING if getattr(getattr(state, name), "engine_client", None) is not ours]
    if others:
        raise EngineFailed(f"vLLM's {', '.join(others)} must ask state.*.engine_client; this version does not")


class ChatClient:
    """vLLM's ``EngineClient`` for its server: the engine's own, except for `generate`."""

    def __init__(self, client: Any, service: Service, media: ReceivedMedia | None = None) -> None:
        self._client = client
        self._service = service
        self._media = media
        self._pictures = Pictures()
        self._pace = 0.0  # tokens a second of the last slice of a predicted prompt
        self._tasks: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def is_tracing_enabled(self) -> bool:
        """Return True, so that requests keep their tracing headers, one of which carries the key of their options."""
        return True

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Do as ``AsyncLLM.generate``, for a request of the server."""
        request, state, options["trace_headers"] = self._service.pending_request(options.get("trace_headers"))
        if getattr(sampling_params, "extra_args", None):
            sampling_params = with_handle(sampling_params, "")  # a client can only have forged one
        reason, rendered = "", None
        try:
            rendered = self._pictures.read(prompt)  # for every request: a picture's data are sent only once
            if request is None and any(medium.data is not None for medium in rendered.media):
                self._spawn(asyncio.to_thread(rendered.hash_pictures))
            if request is not None and request.next_prompt is not None:
                request.next_prompt.prompt = rendered.ids
            reason = "" if request is None else request.off or _bypass_reason(sampling_params, options)
        except NotAWindow as error:
            reason = str(error)
        except Exception:  # unknown kinds of prompts of newer versions of vLLM are served, too
            _log.exception("the prompt of request %s was not understood; vLLM computes it alone", request_id)
            reason = "the prompt is of an unknown kind"
        if request is not None and state is not None and request.ahead is not None:
            return self._prefill(state, request.ahead, rendered, request_id, options)
        if request is None or state is None or rendered is None or reason:
            if request is not None:
                self._bypass(request, reason)
            return self._generate(prompt, sampling_params, request_id, options)
        return self._serve(request, state, rendered, sampling_params, request_id, options)

    async def _generate(
        self, prompt: Any, sampling: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Call the engine, and note that it has the media once it answers."""
        media = self._media if isinstance(prompt, Mapping) and prompt.get("mm_hashes") else None
        sent = None if media is None else names_sent(prompt)
        async with aclosing(self._client.generate(prompt, sampling, request_id, **options)) as outputs:
            async for output in outputs:
                if media is not None and any(part.finish_reason == "error" for part in output.outputs):
                    media.note(names_of(prompt), received=False)
                elif sent and media is not None:
                    media.note(sent, received=True)
                sent = None
                # What a shutdown cuts off (`internals.abort_all`) vLLM's routes would report as a finished answer.
                if self._service.requests.draining and any(part.finish_reason == "abort" for part in output.outputs):
                    from vllm.exceptions import RetryableRequestError

                    raise RetryableRequestError("the server is shutting down; try another one")
                yield output

    async def _prefill(
        self, state: TenantState, ahead: Ahead, rendered: RenderedPrompt | None, request_id: str, options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """Compute a predicted prompt while nothing else is under way. It ends like a request whose client has left."""
        from vllm import SamplingParams

        prediction, engine = ahead.prediction, state.engine
        assert isinstance(engine, VLLMEngine)
        block, sampling = engine.core.block_size, SamplingParams(max_tokens=1, detokenize=False)
        rendered = rendered if engine.core.has_prefix_cache else None  # without a prefix cache it would serve nothing
        ids = () if rendered is None else rendered.ids
        last = len(ids) // block * block  # the prefix cache holds whole blocks
        end = prediction.reached = prediction.reached or common_prefix(prediction.prompt, ids) // block * block
        while rendered is not None and end < last and not prediction.cancelled and not self._service.busy(apart_from=1):
            end = min(last, (end // block + max(1, ahead.slice_tokens(self._pace) // block)) * block)
            end, began, cached = rendered.boundary(end, whole_media=engine.core.whole_media), time.monotonic(), 0
            part, name = rendered.prefix(end), f"{request_id}-{end}"
            with engine.core.driver.counted(background=True):
                async with aclosing(self._generate(part, sampling, name, options)) as outputs:
                    async for output in outputs:
                        cached = output.num_cached_tokens or 0
            computed, took = end - cached, time.monotonic() - began
            self._pace = computed / took or self._pace
            prediction.reached = end
            prediction.tokens += computed
            prediction.seconds += took
        if rendered is not None:
            ahead.result = "complete" if end >= last else "interrupted"
        raise asyncio.CancelledError
        yield  # makes it a generator

    async def _serve(
        self, request: RequestOptions, state: TenantState, rendered: RenderedPrompt, sampling: Any, request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        engine = state.engine
        assert isinstance(engine, VLLMEngine)
        fidelity, reserved = request.fidelity or self._service.limits.fidelity, ""
        with suppress(Exception):  # which `_prepare` meets again
            if resolved_fidelity(fidelity, engine.spec.model, int(time.monotonic())).mode == "exact":
                reserved = rendered.reserve(engine)
        preparing = asyncio.ensure_future(self._prepare(request, state, rendered, fidelity, reserved, request_id))
        turn = None if reserved else await preparing  # vLLM computes while the window is updated
        prompt, handle, ended = rendered.engine_input, reserved, False
        if turn is not None:
            prompt, handle = turn.submitted.prompt, turn.submitted.handle
        params = with_handle(sampling, handle)
        try:
            with engine.costs.timed() as watch:
                async with aclosing(self._generate(prompt, params, request_id, options)) as outputs:
                    async for output in outputs:
                        if (turn := await preparing) is None:
                            yield output
                            continue
                        failed = any(part.finish_reason == "error" for part in output.outputs)
                        if watch.first is None and failed:
                            break
                        watch.lap()
                        if reserved and output.num_cached_tokens is not None:
                            turn.submitted.transfer.local_tokens = output.num_cached_tokens
                        self._count(request, turn, output)
                        if ended := output.finished:
                            self._finish(request, state, turn, finished=not failed)
                        yield output
            if turn is None:
                return
            turn.submitted.watch = watch
            if watch.first is not None:
                return
        finally:
            turn = preparing.result() if preparing.done() and not preparing.cancelled() else None
            preparing.cancel()
            if turn is None and reserved:
                engine.core.transport.remove(reserved)
            elif turn is not None and not ended:
                self._finish(request, state, turn, finished=False)
        _log.warning("loading KV for request %s failed; the prompt is computed instead", request_id)
        self._service.metrics.count(self._service.metrics.fallbacks, request.tenant)
        request.usage.clear()
        self._bypass(request, "its KV could not be loaded", failed=True)
        async with aclosing(self._generate(rendered.engine_input, sampling, request_id, options)) as outputs:
            async for output in outputs:
                yield output

    async def _prepare(
        self, request: RequestOptions, state: TenantState, rendered: RenderedPrompt, fidelity: Fidelity, reserved: str,
        request_id: str,
    ) -> Turn | None:  # fmt: skip
        """Prepare the turn in a worker thread; return None if that failed."""
        assert isinstance(state.engine, VLLMEngine)
        build = lru_cache(1)(partial(RenderedRequest, state.engine, rendered, reserved))  # in a worker thread, and once
        begin = partial(state.conversations.begin, build, request.name, fidelity, request.record_name)

        async def prepare() -> Turn:
            try:
                return await self._service.chat_pool.run(request.tenant, begin, True)
            except WriteBackPending as error:  # awaited here, without a worker thread that writing back may need
                await asyncio.wait(map(asyncio.wrap_future, error.pending))
            return await self._service.chat_pool.run(request.tenant, begin, False)

        preparing = asyncio.ensure_future(prepare())
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:
            if build.cache_info().currsize:
                build().abandon()
            self._spawn(self._abandon(request, state, preparing))
            raise
        except NotAWindow as error:
            self._bypass(request, str(error))
        except Exception as error:
            _log.warning("no window behind request %s (%s); vLLM computes it alone", request_id, error)
            self._bypass(request, "its window failed", failed=True)
        return None

    async def _abandon(self, request: RequestOptions, state: TenantState, preparing: asyncio.Future[Turn]) -> None:
        """End the preparation of a request whose client has disconnected."""
        try:
            turn = await preparing
        except Exception:
            _log.debug("an abandoned request could not be prepared", exc_info=True)
        else:
            self._finish(request, state, turn, finished=False)

    def _count(self, request: RequestOptions, turn: Turn, output: Any) -> None:
        """Record computed and cached tokens of a request, as vLLM's ``cached_tokens`` and as our lanes.

        vLLM counts tokens that were computed ahead of the request as cached, but they saved nothing.
        """
        if output.num_cached_tokens is None:
            return
        output.num_cached_tokens = cached = max(0, output.num_cached_tokens - turn.ahead)
        computed, exact = len(output.prompt_token_ids or ()) - cached, turn.layout.salt == ""
        request.usage.update(computed_tokens=computed, lanes=turn.lanes, edits=dict(turn.edits), exact=exact)

    def _finish(self, request: RequestOptions, state: TenantState, turn: Turn, *, finished: bool) -> None:
        """Write back the request's KV in a worker thread behind the answer, but do not wait for a client that reads slowly."""
        conversations = state.conversations
        conversations.expect_write_back(turn)
        if finished and request.usage:
            self._service.metrics.chat(request.tenant, request.usage)

        async def settle() -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(request.answered.wait(), 0.1)  # else the end of the answer would be slower
            try:
                await self._service.chat_pool.run(request.tenant, lambda: conversations.finish(turn, finished=finished))
            except Exception as error:
                _log.warning("KV of a chat was not read back (%s); it is computed again", error)
                self._service.metrics.count(self._service.metrics.fallbacks, request.tenant)
                if not turn.written_back.done():  # it was not accepted: the queue is full, or the server shuts down
                    await asyncio.to_thread(conversations.finish, turn, finished=False)
            state.shared.save(request.record_name)

        self._spawn(settle())

    def _bypass(self, request: RequestOptions, reason: str, *, failed: bool = False) -> None:
        if not request.counted:  # beam search calls the engine for every token
            self._service.metrics.chat_left_alone(request.tenant, reason, failed=failed)
        request.off, request.counted = reason, True

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _bypass_reason(sampling: Any, options: dict[str, Any]) -> str:
    """Return why vLLM would not ask the connector; "" if it does."""
    if getattr(sampling, "prompt_logprobs", None) is not None:
        return "log-probabilities of the prompt need a forward over all of it"
    if getattr(sampling, "skip_reading_prefix_cache", None):
        return "the request reads no cache"
    return "LoRA is not served with windows" if options.get("lora_request") is not None else ""
