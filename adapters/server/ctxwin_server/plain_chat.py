"""A plain chat before it reaches vLLM: the steps that change its body, each at most once and in this order.

Edits that the request or the server's policy asks for, volatile parts that are served late, drops that are followed later, and a
summary in place of earlier turns. Each is a module of its own; the next prompt is predicted from what they leave.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from ctxwin.profiles import resolve
from ctxwin_server import compaction
from ctxwin_server.compaction import CompactEdit, Compaction, read_summary, request_for, resume, take_compaction
from ctxwin_server.context_management import Count, manage
from ctxwin_server.endpoints import CHAT
from ctxwin_server.lazy_drops import Bounds, turns_field
from ctxwin_server.request_options import EDIT_FIELDS, RequestOptions, read_options
from ctxwin_server.service import Service, TenantState
from ctxwin_server.volatile import Late, put

SubRequest = Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]
"""``body`` -> status and JSON of the response to a further request to the same route."""
_SUMMARY_TOKENS = 1024
_log = logging.getLogger("ctxwin.serve")
T = TypeVar("T")


class EarlyResponse(Exception):
    """Raised with the response to a request that needs no route."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def apply_edits(data: dict[str, Any], count: Count) -> bool:
    """Apply the edits of an equal request before its tokens are counted; return whether the body changed."""
    resumed = resume(compaction.MESSAGES, data)
    take_compaction(compaction.MESSAGES, data)  # a compaction does not change the counted tokens
    managed = manage(data, None, count)
    return resumed or managed is not None


class PlainChat:
    """One request to a route of chats.

    Args:
        data: its body, which is changed in place.
        sub_request: sends a further request before it.
        follows: its prompt is what it holds: nothing is served late or kept, and nothing predicted from it.

    Attributes:
        options: of the request and its report, once read; None where nothing of ours applies to it.
    """

    def __init__(
        self,
        service: Service,
        tenant_state: TenantState,
        path: str,
        data: dict[str, Any],
        sub_request: SubRequest,
        *,
        follows: bool,
    ) -> None:
        self.options: RequestOptions | None = None
        self._service, self._tenant_state, self._path, self._data = service, tenant_state, path, data
        self._tenant, self._count = tenant_state.tenant, tenant_state.count
        self._sub_request, self._follows = sub_request, follows

    async def rewrite(self, headers: Headers, windows: str) -> bool:
        """Read its options, and take all steps; ``windows``: mode of a request that names none.

        Returns whether the body changed. Raises EarlyResponse where it is answered with a summary alone.
        """
        data, path = self._data, self._path
        own = {"ctxwin": data["ctxwin"]} if "ctxwin" in data else {}
        resumed = path != CHAT and await self._run(resume, path, data)
        is_managed = any(data.get(field) is not None for field in EDIT_FIELDS)
        options = read_options(path, headers, data, self._tenant, windows, self._service.prompts)
        if options is None:
            return bool(own) or resumed
        self.options = options
        compact, applied, late, room = None, None, Late(), None
        if not data.keys().isdisjoint(EDIT_FIELDS) or self._service.policy is not None:
            compact = take_compaction(path, data)
            applied = await self._run(manage, data, self._service.policy, self._count)
            if applied is not None:
                options.reports["context_management"] = {"applied_edits": applied}
        if options.prompt.volatile and not self._follows:
            late = await self._take_volatile(options)
        turns = data.get(turns_field(data)) if options.prompt.prefill else None  # as sent
        if is_managed or options.prompt.lazy_drops is None:  # an explicit wish: nothing of what it drops is held back
            self._tenant_state.lazy_drops.forget(options.name)
        else:
            room = await self._keep_drops(options, options.prompt.lazy_drops)
        if compact is not None:
            await self._compact(options, compact, own)
        elif options.prompt.prefill and not self._follows:
            await self._foresee(options, turns, room)
        if late.parts:  # behind what lazy drops compare, and a summary replaces
            put(data, late.text, as_system=self._late_as_system)
            self._service.metrics.count_rewrite(self._tenant, "late", late.tokens)
        return bool(own or resumed or options.rewrites) or applied is not None or compact is not None

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await self._service.run_briefly(self._tenant, work, *args)

    @property
    def _late_as_system(self) -> bool:
        return self._service.late_system and self._data.get("chat_template") is None

    async def _take_volatile(self, options: RequestOptions) -> Late:
        """Take out what is volatile."""
        late = await self._run(self._tenant_state.volatile.take, self._data, options.name, self._count)
        options.rewrites["late"] = late.report(as_system=self._late_as_system)
        return late

    async def _keep_drops(self, options: RequestOptions, bounds: Bounds) -> int:
        """Put back what the client dropped, within the bounds; return how many more pictures may be dropped until it follows."""
        if self._follows:
            bounds = Bounds(0, 0, 0)
        context = self._tenant_state.engine.spec.max_tokens
        kept = await self._run(
            self._tenant_state.lazy_drops.serve, self._data, options.name, bounds, self._count, context
        )
        options.rewrites["kept"] = kept.report()
        if kept.parts or kept.followed:
            result = "kept" if kept.parts else "followed"
            self._service.metrics.count_rewrite(self._tenant, result, kept.tokens, kept.pictures)
        return bounds.pictures - kept.pictures if kept.turns < bounds.turns else 0

    async def _foresee(self, options: RequestOptions, turns: Any, room: int | None) -> None:
        """Hold the request against its prediction, and note what is to be computed ahead of the next one.

        Nothing is, where a window behind the chat reuses KV: its prompt does not find what vLLM's prefix cache holds.
        """
        service = self._service
        fidelity = options.fidelity or service.limits.fidelity
        if fidelity.mode == "auto":
            fidelity = resolve(fidelity, self._tenant_state.engine.spec.model)
        if not options.off and fidelity.mode != "exact":
            return
        foresight = await self._run(self._tenant_state.histories.follow, self._data, turns, options.name, room)
        if foresight.ended is not None:
            service.metrics.count_prefilled(self._tenant, foresight.ended.tokens, used=foresight.hit)
            if foresight.hit:
                service.chat_prefill.refund(self._tenant, foresight.ended)
                options.prefilled = foresight.ended.tokens
        if foresight.next is not None and foresight.next.body:
            options.next_prompt = foresight.next

    async def _compact(self, options: RequestOptions, compact: CompactEdit, own: dict[str, Any]) -> None:
        """Replace the turns of the body by their summary once they exceed the threshold; ``own``: its field of ours."""
        data = self._data
        names = ("system", "instructions", "tools", "messages", "input")
        tokens = await self._run(self._count, [data.get(name) for name in names])
        if tokens <= compact.threshold:
            return
        summary_tokens = max(1, min(_SUMMARY_TOKENS, self._tenant_state.engine.spec.max_tokens // 8))
        status, answer = await self._sub_request(request_for(self._path, data, compact, summary_tokens) | own)
        if status != 200:
            _log.warning("a conversation was not compacted: its summary got status %d", status)
        summary, usage = read_summary(self._path, answer) if status == 200 else (None, {})
        options.compaction = outcome = Compaction(self._path, summary, usage)
        if summary is not None:
            compaction.replace_turns(self._path, data, summary)
        if compact.pause_after_compaction:
            model = data.get("model") or self._service.models[0]
            if data.get("stream"):
                events = b"".join(map(compaction.encode_event, outcome.paused_events(model)))
                raise EarlyResponse(Response(events, media_type="text/event-stream"))
            raise EarlyResponse(JSONResponse(outcome.paused_answer(model)))
