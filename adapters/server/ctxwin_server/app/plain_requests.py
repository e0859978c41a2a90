"""Requests that the OpenAI server's own routes answer, before they reach them: checks, changes of their bodies, isolation.

A plain chat is changed in steps, each at most once and in this order: edits that the request or the server's policy asks for,
volatile parts that are served late, drops that are followed later, and a summary in place of earlier turns. Each is a module of
its own; the next prompt is predicted from what they leave.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from ctxwin.hashing import digest
from ctxwin.profiles import resolve
from ctxwin_chats import compaction
from ctxwin_chats.compaction import CompactEdit, Compaction, read_summary, request_for, resume, take_compaction
from ctxwin_chats.context_management import Count, manage
from ctxwin_chats.continuation import turns_field
from ctxwin_chats.lazy_drops import Bounds, Kept
from ctxwin_chats.options import EDIT_FIELDS, ROUTES, read_options
from ctxwin_chats.prefill import Ahead
from ctxwin_chats.typed_tools import describe_tools
from ctxwin_client.errors import NotAllowed, TooLarge
from ctxwin_server.app import endpoints
from ctxwin_server.app.accounts import BodyReader, Malformed, encode_body, parse_json, replace_body
from ctxwin_server.app.endpoints import CHAT, COUNT, PLAIN, names_chunks
from ctxwin_server.app.error_shape import elsewhere
from ctxwin_server.app.isolation import bind, check_options, check_scores, plain_salt
from ctxwin_server.app.request_options import REQUEST_OPTIONS, RequestOptions
from ctxwin_server.app.service import TENANT, Service
from ctxwin_server.chat.expansion import expand
from ctxwin_server.sandbox.grammars import PLACES

SubRequest = Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]
"""``body`` -> status and JSON of the response to a further request to the same route."""
FOLLOW = "ctxwin.follow"
"""Key of an ASGI scope whose request is served as it came."""
AHEAD = "ctxwin.ahead"
"""Key of an ASGI scope with an `Ahead`: a prompt is computed that its client has not sent yet."""
_SUMMARY_TOKENS, _BRIEF_BYTES, _BRIEF_COMMAS = 1024, 256 << 10, 2048  # parsed before a thread wakes up
_log = logging.getLogger("ctxwin.serve")
T = TypeVar("T")


class EarlyResponse(Exception):
    """Raised with the response to a request that needs no route."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


async def route(
    service: Service, scope: Scope, receive: Receive, path: str, stack: AsyncExitStack, sub_request: SubRequest
) -> Receive:
    """Return the ``receive`` of the route that is called next.

    Args:
        stack: gets the callbacks that release resources when the request has ended.
        sub_request: sends a further request before this one.
    """
    tenant: str | None = scope[TENANT]
    quota = service.quotas.get(tenant or "", (None, None))[0]
    body = BodyReader(service.limits.max_upload_bytes, service.body_bytes, tenant or "", receive, quota)
    stack.callback(body.give_back)
    headers = Headers(scope=scope)
    if endpoints.is_ours(path):
        body.check_announced(headers.get("content-length", ""))
        return body.receive
    if tenant:
        if scope["type"] == "websocket":
            raise NotAllowed("no WebSocket is served to tenants")
        if elsewhere(path):
            raise EarlyResponse(JSONResponse({"detail": "Not Found"}, 404))  # which gets its hint on its way
        endpoints.check_endpoint(scope["method"], path)
        scope["headers"] = endpoints.allowed_headers(scope["headers"])
    if tenant is None or scope.get("method") != "POST":
        return receive
    is_bound = bool(service.authentication.keys.tenants) and path in PLAIN
    if not is_bound and "form" in headers.get("content-type", "").lower():
        return receive  # of vLLM's own routes for files, which tenants do not reach
    body.check_announced(headers.get("content-length", ""))
    request = PlainRequest(service, tenant, path, await body.read(), sub_request, is_bound=is_bound)
    await request.rewrite(headers, follows=FOLLOW in scope, ahead=scope.get(AHEAD))
    if (options := request.options) is not None:
        scope[REQUEST_OPTIONS] = options
        if any(rewrite["parts"] for rewrite in options.rewrites.values()):
            _, options.resend = replace_body(scope, receive, request.raw)
    raw = await request.encode()
    if is_bound and PLAIN[path].generates and AHEAD not in scope:
        await stack.enter_async_context(service.pool.slot(tenant))
    replaced, receive = replace_body(scope, receive, raw)
    if raw is not request.raw:
        scope["headers"] = replaced
    await stack.enter_async_context(service.quarantine.running_async(request.name))
    return receive


def apply_edits(data: dict[str, Any], count: Count) -> tuple[bool, int]:
    """Apply the edits of an equal request before a count; return whether the body changed, and the tokens cleared."""
    resumed = resume(compaction.MESSAGES, data)
    take_compaction(compaction.MESSAGES, data)  # a compaction does not change the counted tokens
    managed = manage(data, None, count)
    cleared = sum(edit["cleared_input_tokens"] for edit in managed or ())
    return resumed or managed is not None, cleared


class PlainRequest:
    """One request that the OpenAI server answers.

    Args:
        raw: its body as it came; an attribute, too.
        sub_request: sends a further request before it.
        is_bound: it is bound to its tenant.

    Attributes:
        name: what it is called in quarantine, once parsed.
        options: of a chat and its report, once read; None where nothing of ours applies to it.
    """

    def __init__(
        self, service: Service, tenant: str, path: str, raw: bytes, sub_request: SubRequest, *, is_bound: bool
    ) -> None:
        self.raw, self.name = raw, ""
        self.options: RequestOptions | None = None
        self._service, self._tenant_state = service, service.tenant_state(tenant)
        self._tenant, self._path, self._sub_request, self._is_bound = tenant, path, sub_request, is_bound
        self._data: Any = None
        self._changed = self._follows = False
        self._cleared_tokens = 0  # by the edits of a count

    async def rewrite(self, headers: Headers, *, follows: bool, ahead: Ahead | None) -> None:
        """Parse, check and change the body.

        Args:
            headers: as the client sent them.
            follows: its prompt is what it holds: nothing is served late or kept, and nothing predicted from it.
            ahead: what it computes, where it is a predicted prompt.

        Raises EarlyResponse where it is answered with a summary alone.
        """
        self._follows = follows
        is_brief = len(self.raw) <= _BRIEF_BYTES and self.raw.count(b",") <= _BRIEF_COMMAS
        self._data = self._parse() if is_brief else await self._run(self._parse)
        if isinstance(self._data, dict) and not PLACES.isdisjoint(self._data):
            await self._service.grammars.check(self._tenant, self._data)
        takes_long = self._path in (compaction.MESSAGES, COUNT) or names_chunks(self._data)
        is_expanded = await self._run(self._adapt) if takes_long else self._adapt()
        if self._cleared_tokens:
            await self._count()
        windows = self._service.chat_defaults.windows
        if not windows or self._path not in ROUTES or not isinstance(self._data, dict):
            return
        if ahead is not None:
            self.options = RequestOptions(tenant=self._tenant, off="it is computed ahead", ahead=ahead)
        else:
            self._changed |= await self._rewrite_chat(headers, "auto" if is_expanded else windows)

    def _parse(self) -> Any:
        """Return the body as JSON within the server's limits; None where it is not JSON, which the server itself reports."""
        limits = self._service.limits
        try:
            data = parse_json(limits, self.raw, self._tenant_state.max_text if self._tenant else None)
        except (TooLarge, Malformed):
            raise
        except ValueError:
            data = None
        self.name = digest("plain", self._tenant, self._path, self.raw)
        check_scores(data, limits.max_logprobs)
        check_options(data)
        return data

    def _adapt(self) -> bool:
        """Replace in the body what the server itself does not know; return whether it named chunks."""
        data, path, tenant_state = self._data, self._path, self._tenant_state
        if not isinstance(data, dict):
            return False
        if "chat_template_kwargs" in data:
            self._service.template_arguments.check(data)
        is_expanded = path == CHAT and names_chunks(data)
        if is_expanded:
            expand(data, tenant_state.uploads, tenant_state.max_text)
        endpoints.check_stored(path, data, self._tenant)
        self._changed = is_expanded
        if path in (compaction.MESSAGES, COUNT):
            self._changed |= describe_tools(data)
        if path == COUNT:
            changed, self._cleared_tokens = apply_edits(data, tenant_state.count)
            self._changed |= changed
        return is_expanded

    async def _count(self) -> None:
        """Answer a count with what its edits clear beside it, which the server takes to be nothing.

        Raises EarlyResponse where the body can be counted.
        """
        status, answer = await self._sub_request(self._data)
        if status == 200:
            tokens = answer["input_tokens"] + self._cleared_tokens
            raise EarlyResponse(JSONResponse({**answer, "context_management": {"original_input_tokens": tokens}}))

    async def encode(self) -> bytes:
        """Return the body for the server: bound to its tenant if there are tenants."""
        if not self._is_bound:
            return await self._run(partial(encode_body, self._data)) if self._changed else self.raw
        if not isinstance(self._data, dict):
            raise ValueError("the body must be a JSON object")
        state, media = self._tenant_state, self._service
        return await self._run(partial(
            bind, self._path, self._data, self._tenant, plain_salt(state.engine), state.uploads.allowance(),
            fetch=media.fetches_media, video_size=media.video_headers.size,
        ))  # fmt: skip

    async def _rewrite_chat(self, headers: Headers, windows: str) -> bool:
        """Read a chat's options, and take all steps; return whether the body changed.

        ``windows``: mode of a request that names none.
        """
        data, path, defaults = self._data, self._path, self._service.chat_defaults
        extension = {"ctxwin": data["ctxwin"]} if "ctxwin" in data else {}
        resumed = path != CHAT and await self._run(resume, path, data)
        is_managed = any(data.get(field) is not None for field in EDIT_FIELDS)
        chat = read_options(path, headers, data, windows, defaults.prompts)
        if chat is None:
            return bool(extension) or resumed
        self.options = options = RequestOptions(**vars(chat), tenant=self._tenant)
        if self._tenant_state.shared.has_store and (not options.off or options.prompt):
            options.record_name = await self._tenant_state.shared.open(options.name, data)
        compact, applied, late, room = None, None, None, None
        if not data.keys().isdisjoint(EDIT_FIELDS) or defaults.policy is not None:
            compact = take_compaction(path, data)
            applied = await self._run(manage, data, defaults.policy, self._tenant_state.count)
            if applied is not None:
                options.reports["context_management"] = {"applied_edits": applied}
        if options.prompt.volatile and not self._follows:
            take = partial(self._tenant_state.volatile.take, record_name=options.record_name)
            late = await self._run(take, data, options.name, self._tenant_state.count)
        turns = data.get(turns_field(data)) if options.prompt.prefill else None  # as sent
        if is_managed or options.prompt.lazy_drops is None:  # an explicit wish: nothing of what it drops is held back
            if options.name:
                self._tenant_state.lazy_drops.forget(options.name)
            if options.prompt.lazy_drops is not None:
                options.rewrites["kept"] = Kept().report()
        else:
            room = await self._keep_drops(options, options.prompt.lazy_drops)
        if compact is not None:
            await self._compact(options, compact, extension)
        elif options.prompt.prefill and not self._follows:
            await self._foresee(options, turns, room)
        if late is not None:  # behind what lazy drops compare, and a summary replaces
            as_system = defaults.late_system and data.get("chat_template") is None
            appends = options.prompt.volatile == "append"
            place = partial(self._tenant_state.volatile.place, as_system=as_system, appends=appends)
            late = await self._run(place, data, late, self._tenant_state.count)
            options.rewrites["late"] = late.report(as_system=as_system)
            if late.parts:
                self._service.metrics.count_rewrite(self._tenant, "late", late.tokens)
        return bool(extension or resumed or options.rewrites) or applied is not None or compact is not None

    async def _run(self, work: Callable[..., T], *args: Any) -> T:
        return await self._service.brief_pool.run(self._tenant, work, *args)

    async def _keep_drops(self, options: RequestOptions, bounds: Bounds) -> int:
        """Put back what the client dropped, within the bounds; return how many more pictures may be dropped until it follows."""
        if self._follows:
            bounds = Bounds(0, 0, 0)
        context = self._tenant_state.engine.spec.max_tokens
        drops = await self._run(
            self._tenant_state.lazy_drops.serve, self._data, options.name, bounds, self._tenant_state.count, context
        )
        options.rewrites["kept"] = drops.report()
        if drops.parts or drops.followed:
            result = "kept" if drops.parts else "followed"
            self._service.metrics.count_rewrite(self._tenant, result, drops.tokens, drops.pictures)
        return bounds.pictures - drops.pictures if drops.turns < bounds.turns else 0

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
        follow = partial(self._tenant_state.histories.follow, record_name=options.record_name)
        foresight = await self._run(follow, self._data, turns, options.name, room)
        if foresight.current is not None:
            result, tokens = "used" if foresight.hit else "missed", foresight.current.tokens
            service.metrics.count(service.metrics.prefilled, self._tenant, result, by=tokens)
            if foresight.hit:
                service.chat_prefill.refund(self._tenant, foresight.current)
                options.prefilled = foresight.current.tokens
        if foresight.next is not None and foresight.next.body:
            options.next_prompt = foresight.next

    async def _compact(self, options: RequestOptions, compact: CompactEdit, extension: dict[str, Any]) -> None:
        """Replace the turns of the body by their summary once they exceed the threshold; ``extension``: its field of ours."""
        data = self._data
        names = ("system", "instructions", "tools", "messages", "input")
        tokens = await self._run(self._tenant_state.count, [data.get(name) for name in names])
        if tokens <= compact.threshold:
            return
        summary_tokens = max(1, min(_SUMMARY_TOKENS, self._tenant_state.engine.spec.max_tokens // 8))
        status, answer = await self._sub_request(request_for(self._path, data, compact, summary_tokens) | extension)
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
