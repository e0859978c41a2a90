"""Windows behind vLLM's own chats, responses and messages: between vLLM's server and its engine.

vLLM's routes read the request, render the prompt, sample, stream and parse as ever. Only their call of the engine passes here:
it gets KV for the prompt through the connector. Whatever prevents that is counted and logged, and the request is then vLLM's
alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ctxwin.engines.vllm.engine import VLLMEngine
from ctxwin.engines.vllm.rendered import NotAWindow, Pictures, PromptEngine, RenderedPrompt
from ctxwin.engines.vllm.transport import PARAM
from ctxwin.serve.asked import ASKED, Asked
from ctxwin.serve.conversations import Turn
from ctxwin.serve.service import Service

Generate = Callable[..., AsyncGenerator[Any, None]]
_log = logging.getLogger("ctxwin.serve")


def put_windows_behind(client: Any, service: Service) -> None:
    """Has ``client``, the ``AsyncLLM`` of vLLM's server, serve the requests that `ASKED` names with windows."""
    client.generate = _Chats(client.generate, service).generate


class _Chats:
    def __init__(self, inner: Generate, service: Service) -> None:
        self._inner = inner
        self._service = service
        self._pictures = Pictures()
        self._tasks: set[asyncio.Task[None]] = set()

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """As ``AsyncLLM.generate``."""
        asked = ASKED.get()
        why, rendered = "", None
        try:
            rendered = self._pictures.read(prompt)  # of every request: a picture's data are sent once only
            if asked is None and any(medium.data is not None for medium in rendered.media):
                self._keep(asyncio.to_thread(_hash, rendered))
            why = "" if asked is None else asked.off or _why_not(sampling_params, options)
        except NotAWindow as error:
            why = str(error)
        except Exception:  # a prompt of a kind that vLLM did not have when this was written is served all the same
            _log.exception("the prompt of request %s was not understood; vLLM computes it alone", request_id)
            why = "the prompt is of an unknown kind"
        if asked is None or rendered is None or why:
            if asked is not None:
                self._left_alone(asked, why)
            return self._inner(prompt, sampling_params, request_id, **options)
        return self._served(asked, rendered, sampling_params, request_id, options)

    async def _served(
        self, asked: Asked, rendered: RenderedPrompt, sampling: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        turn = await self._prepared(asked, rendered, sampling, request_id, options)
        if turn is None:
            async with aclosing(self._inner(rendered.engine_input, sampling, request_id, **options)) as outputs:
                async for output in outputs:
                    yield output
            return
        given = sampling.clone()
        given.extra_args = {**(sampling.extra_args or {}), "kv_transfer_params": {PARAM: turn.handed.handle}}
        begun = ended = False
        try:
            async with aclosing(self._inner(turn.handed.prompt, given, request_id, **options)) as outputs:
                async for output in outputs:
                    if not begun and any(part.finish_reason == "error" for part in output.outputs):
                        break
                    begun = True
                    self._count(asked, turn, output)
                    if output.finished:
                        ended = True
                        self._finish(asked, turn, finished=True)
                    yield output
            if begun:
                return
        finally:
            if not ended:
                self._finish(asked, turn, finished=False)
        _log.warning("loading KV for request %s failed; the prompt is computed instead", request_id)
        self._service.metrics.fallback(asked.tenant)
        asked.usage.clear()
        async with aclosing(self._inner(rendered.engine_input, sampling, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    async def _prepared(
        self, asked: Asked, rendered: RenderedPrompt, sampling: Any, request_id: str, options: dict[str, Any]
    ) -> Turn | None:
        """The turn, prepared in a worker thread; None where that failed."""
        space = self._service.space(asked.tenant)
        fidelity = asked.fidelity or self._service.limits.fidelity

        def work() -> Turn:
            assert isinstance(space.engine, VLLMEngine)
            return space.conversations.prepare(PromptEngine(space.engine, rendered), asked.name, fidelity)

        preparing = asyncio.ensure_future(self._service.run_chat(asked.tenant, work))
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:
            self._keep(self._abandon(asked, preparing, rendered, sampling, request_id, options))
            raise
        except NotAWindow as error:
            self._left_alone(asked, str(error))
        except Exception as error:
            _log.warning("no window behind request %s (%s); vLLM computes it alone", request_id, error)
            self._left_alone(asked, "the window failed", failed=True)
        return None

    async def _abandon(
        self,
        asked: Asked,
        preparing: asyncio.Future[Turn],
        rendered: RenderedPrompt,
        sampling: Any,
        name: str,
        options: Any,
    ) -> None:
        """Ends what a client left that was still being prepared.

        vLLM's renderer remembers that the pictures' data have been sent, so they are sent.
        """
        try:
            turn = await preparing
        except Exception:
            _log.debug("an abandoned request could not be prepared", exc_info=True)
        else:
            self._finish(asked, turn, finished=False)
        if any(medium.data is not None for medium in rendered.media):
            shortest = sampling.clone()
            shortest.max_tokens, shortest.min_tokens, shortest.n = 1, 0, 1
            async for _ in self._inner(rendered.engine_input, shortest, name, **options):
                pass

    def _count(self, asked: Asked, turn: Turn, output: Any) -> None:
        """What this request computed and found, as vLLM's own ``cached_tokens`` and as our lanes.

        What was computed ahead of it is found by vLLM like anything else, but it was no saving.
        """
        if output.num_cached_tokens is None:
            return
        output.num_cached_tokens = cached = max(0, output.num_cached_tokens - turn.ahead)
        asked.usage.update(
            computed_tokens=len(output.prompt_token_ids or ()) - cached,
            lanes=turn.lanes,
            edits=dict(turn.edits),
            exact=turn.laid.salt == "",
        )

    def _finish(self, asked: Asked, turn: Turn, *, finished: bool) -> None:
        """Reads back, in a worker thread, what a request has computed; its answer does not wait for it."""
        conversations = self._service.space(asked.tenant).conversations
        conversations.answered(turn)
        if finished and asked.usage:
            self._service.metrics.chat(asked.tenant, asked.usage)

        async def settle() -> None:
            try:
                await self._service.run_chat(asked.tenant, lambda: conversations.finish(turn, finished=finished))
            except Exception as error:
                _log.warning("KV of a chat was not read back (%s); it is computed again", error)

        self._keep(settle())

    def _left_alone(self, asked: Asked, why: str, *, failed: bool = False) -> None:
        asked.off = why
        self._service.metrics.chat_left_alone(asked.tenant, failed=failed)

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _hash(rendered: RenderedPrompt) -> None:
    """Learns the contents of a plain request's pictures, which lets go of their data."""
    for medium in rendered.media:
        medium.picture.content()


def _why_not(sampling: Any, options: dict[str, Any]) -> str:
    """Why vLLM would not ask the connector; "" where it does."""
    if getattr(sampling, "prompt_logprobs", None) is not None:
        return "log-probabilities of the prompt need a forward over all of it"
    if getattr(sampling, "skip_reading_prefix_cache", None):
        return "the request reads no cache"
    return "LoRA is not served with windows" if options.get("lora_request") is not None else ""
