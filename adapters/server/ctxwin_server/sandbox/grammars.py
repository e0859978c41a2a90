"""Cost bounds for constraints on answers: JSON schemas, regular expressions, grammars, structural tags.

vLLM reads a constraint on its event loop and compiles it alongside its forwards, however long that takes. Here each one is tried
first, in a process that can be killed, one per tenant at a time.
"""

import asyncio
import importlib.util
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from ctxwin.errors import EngineFailed
from ctxwin.hashing import digest
from ctxwin.store.lru import LRUCache
from ctxwin_server.process.fair import FairPool
from ctxwin_server.sandbox.grammar_trial import ANSWER, COSTLY, INVALID
from ctxwin_server.sandbox.helper import DONE, Helper, OutOfBounds, Scratch

Constraint = tuple[str, str]
"""``json``, ``regex``, ``grammar`` or ``structural_tag``, and its text."""
_MOST_TEXT = 256 << 10
_MOST_CONSTRAINTS = 16
_REST = 4.0
"""Wait of a tenant before its next trial, in multiples of the last one's processor time: the engine pays that time again."""
_WALL_S = 60.0
_KEPT = 4096
_log = logging.getLogger("ctxwin.serve")


class GrammarRefused(ValueError):
    """A constraint that cannot be compiled, or not within bounds."""


class Grammars:
    """Tries constraints, and caches the verdicts.

    Args:
        seconds, most_bytes: processor time and memory of one trial.
        vocabulary: returns the tokens of answers in xgrammar's serialisation; None where they are unknown.
        compiles: whether xgrammar will compile the constraints, so that those it cannot compile are refused.
        shared: whether there are several tenants.
    """

    def __init__(
        self,
        seconds: float = 2.0,
        most_bytes: int = 1 << 30,
        vocabulary: Callable[[], str | None] | None = None,
        *,
        compiles: bool = True,
        shared: bool = False,
    ) -> None:
        self._bounds = [str(most_bytes), str(seconds)]
        self._vocabulary = vocabulary
        self._compiles = compiles
        self._shared = shared
        self._turns = FairPool(1, name="grammars")
        self._helper: Helper | None = None
        self._scratch: Scratch | None = None
        self._known: LRUCache[tuple[int, str]] = LRUCache(_KEPT)
        self._lines: dict[str, asyncio.Lock] = {}
        self._rested: dict[str, float] = {}
        self._able = importlib.util.find_spec("xgrammar") is not None

    async def check(self, tenant: str, data: Any) -> None:
        """Raise GrammarRefused for a body with constraints that are too costly or invalid. On the event loop."""
        if not isinstance(data, dict) or PLACES.isdisjoint(data):
            return
        constraints = list(dict.fromkeys(constraints_in(data)))
        if len(constraints) > _MOST_CONSTRAINTS or sum(len(text) for _, text in constraints) > _MOST_TEXT:
            several = f"schemas and grammars of a request, {_MOST_CONSTRAINTS} of them,"
            what = _NAMES[constraints[0][0]] if len(constraints) == 1 else several
            raise GrammarRefused(
                f"the {what} must have at most {_MOST_TEXT} characters; leave out what the answer does not need"
            )
        for kind, text in constraints if self._able else ():
            verdict, reason = await self._verdict(tenant, kind, text)
            what = _NAMES[kind]
            if verdict == COSTLY:
                raise GrammarRefused(
                    f"the {what} must be cheap enough to compile, but {reason}; make it smaller: fewer properties, alternatives "
                    "and repetitions, or check the answer yourself"
                )
            if verdict == INVALID and self._compiles:
                raise GrammarRefused(f"the {what} must be one that an answer can follow: {reason}")

    async def _verdict(self, tenant: str, kind: str, text: str) -> tuple[int, str]:
        name = digest("constraint", tenant, kind, text)
        async with self._lines.setdefault(tenant, asyncio.Lock()):
            if (cached := self._known.get(name)) is not None:
                return cached
            if self._shared:
                await asyncio.sleep(self._rested.get(tenant, 0.0) - time.monotonic())
            ask = self._turns.submit(tenant, self._ask, json.dumps([kind, text]).encode())
            spent, verdict, why = await asyncio.wrap_future(ask)
            self._rested[tenant] = time.monotonic() + _REST * spent
            self._known.put(name, (verdict, why), 1)
            return verdict, why

    def _ask(self, raw: bytes) -> tuple[float, int, str]:
        """Return processor time, verdict and reason of one trial. Blocks."""
        if self._helper is None:
            self._helper = Helper("ctxwin_server.sandbox.grammar_trial", self._arguments(), _WALL_S)
        try:
            status, answer = self._helper.ask(raw)
        except OutOfBounds as error:
            raise EngineFailed(f"no processor was free to try a grammar: {error}; try again later") from None
        if status != DONE:
            raise EngineFailed(f"a grammar could not be tried: {answer.decode('utf-8', 'replace')}")
        spent, verdict = ANSWER.unpack_from(answer)
        return spent, verdict, answer[ANSWER.size :].decode("utf-8", "replace")

    def _arguments(self) -> list[str]:
        try:
            tokens = self._vocabulary() if self._vocabulary is not None else None
        except Exception:
            _log.warning("grammars are tried on bytes: xgrammar does not read this tokenizer", exc_info=True)
            tokens = None
        if tokens is None:
            return self._bounds
        self._scratch = Scratch()
        (self._scratch.path / "vocabulary").write_text(tokens, encoding="utf-8")
        return [*self._bounds, str(self._scratch.path / "vocabulary")]

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._helper is not None:
            self._helper.close()
        self._turns.shutdown()
        if self._scratch is not None:
            self._scratch.remove()


def constraints_in(data: dict[str, Any]) -> Iterator[Constraint]:
    """Yield the constraints in a request's body, from all fields of vLLM's APIs and ours.

    Raises GrammarRefused for values of a wrong type.
    """
    for name, read in _READERS.items():
        if data.get(name) is not None:
            yield from read(data[name])
    yield from _tools(data)


def _schema(value: Any) -> Iterator[Constraint]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise GrammarRefused(f"a JSON schema must be JSON, got {error}") from None
    if not isinstance(value, dict | bool):
        raise GrammarRefused(f"a JSON schema must be an object, got {type(value).__name__}")
    yield "json", json.dumps(value)


def _structured_outputs(value: Any) -> Iterator[Constraint]:
    if not isinstance(value, dict):
        return  # refused elsewhere
    for name in ("regex", "grammar", "structural_tag"):
        text = value.get(name)
        if isinstance(text, str):
            yield name, text
        elif text is not None:
            raise GrammarRefused(f"{name} must be a text, got {type(text).__name__}")
    if value.get("json") is not None:
        yield from _schema(value["json"])
    choices = value.get("choice")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        yield "json", json.dumps({"enum": choices})  # as many paths as the grammar that vLLM makes of them
    elif choices is not None:
        raise GrammarRefused("choice must be a list of texts, and not empty")


def _format(value: Any) -> Iterator[Constraint]:
    """Yield the constraints of ``response_format``, ``text.format`` or ``output_config.format``."""
    if not isinstance(value, dict):
        return  # refused elsewhere
    if value.get("type") == "structural_tag":
        yield "structural_tag", json.dumps(value)
        return
    named = value.get("json_schema")
    for where in (value, named):
        if isinstance(where, dict):
            for name in ("schema", "json_schema", "schema_"):
                if (schema := where.get(name)) is not None and schema is not named:
                    yield from _schema(schema)


def _format_of(value: Any) -> Iterator[Constraint]:
    if isinstance(value, dict) and value.get("format") is not None:
        yield from _format(value["format"])


def _nested_constraints(value: Any) -> Iterator[Constraint]:
    if isinstance(value, dict):
        yield from constraints_in(value)


def _tools(data: dict[str, Any]) -> Iterator[Constraint]:
    """Yield one schema for all tools that an answer has to call, or whose arguments must follow their schemas."""
    tools, choice = data.get("tools"), data.get("tool_choice")
    if not isinstance(tools, list) or choice == "none":
        return
    calls: list[Any] = []
    definitions: dict[str, Any] = {}
    strict = False
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            continue
        strict |= function.get("strict") is True or tool.get("strict") is True
        schema = function.get("parameters", function.get("input_schema"))
        if not isinstance(schema, dict):
            schema = {}
        named = schema.get("$defs")
        if isinstance(named, dict):
            definitions |= named
        parameters = {k: v for k, v in schema.items() if k != "$defs"}
        call = {"name": {"enum": [str(function.get("name"))]}, "parameters": parameters}
        calls.append({"type": "object", "properties": call, "required": list(call)})
    if calls and (strict or isinstance(choice, dict) or choice in ("required", "any")):
        yield "json", json.dumps({"anyOf": calls, **({"$defs": definitions} if definitions else {})})


_READERS: dict[str, Callable[[Any], Iterator[Constraint]]] = {
    "structured_outputs": _structured_outputs,
    "response_format": _format,
    "text": _format_of,
    "output_config": _format_of,
    "json_schema": _schema,
    "sampling_params": _nested_constraints,
    "tools": lambda _: iter(()),
}
_NAMES = {
    "json": "JSON schema", "regex": "regular expression", "grammar": "grammar", "structural_tag": "structural tag",
}  # fmt: skip
PLACES = frozenset(_READERS)
"""Fields of a body in which constraints may stand."""
