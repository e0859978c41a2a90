"""Requests of which an option or two are odd: of a wrong type, huge, negative, no number, nested, in other scripts, unknown.

    python tests/adapters/server/odd_requests.py URL KEY COUNT [SEED]

sends some to a running server and prints what came out, with the requests whose answer is the server's error.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ctxwin_server.app.endpoints import PLAIN

MESSAGE = {"role": "user", "content": "what is red?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [MESSAGE], "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "what is red?", "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "what is red?", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": [MESSAGE], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [MESSAGE]},
    "/tokenize": {"model": "tiny", "messages": [MESSAGE]},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQAQAAAAA3iMLMAAAADklEQVR4nGP4/5+BFAQA/U4f4cOgO+EAAAAASUVORK5CYII="
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
CONVERSATIONS: list[Any] = [
    [{"role": "system", "content": "s"}, MESSAGE, {"role": "assistant", "content": "a"}, MESSAGE],
    [
        MESSAGE,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        MESSAGE,
    ],
    [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "what?"}],
        }
    ],
    [
        MESSAGE,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]}],
        },
    ],
    [
        {
            "role": "user",
            "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL[22:]}}],
        }
    ],
    [{"role": "developer", "content": "d"}, {"role": "assistant", "reasoning": "r", "content": "a"}, MESSAGE],
]
SENSIBLE: dict[str, list[Any]] = {
    "messages": CONVERSATIONS,
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
    "structured_outputs": [
        {"json": SCHEMA},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
        {
            "structural_tag": json.dumps(
                {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
            )
        },
    ],
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, {"format": {"type": "text"}}],
    "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}, {"effort": "low"}],
    "tools": [
        [{"type": "function", "function": FUNCTION}],
        [{"type": "function", **FUNCTION}],
        [{"name": "f", "input_schema": SCHEMA}],
    ],
    "tool_choice": [
        "auto",
        "required",
        "none",
        {"type": "function", "function": {"name": "f"}},
        {"type": "any"},
        {"type": "tool", "name": "f"},
    ],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "stop": ["a", ["a", "b"]],
    "logprobs": [True, 1, 0],
    "top_logprobs": [1, 5],
    "prompt_logprobs": [0, 1],
    "n": [1, 2],
    "seed": [1],
    "echo": [True],
    "logit_bias": [{"1": 5}],
    "chat_template_kwargs": [{"enable_thinking": True}],
    "documents": [[{"title": "a", "text": "b"}]],
    "prompt": ["a", ["a", "b"], [1, 2], [[1, 2], [3]]],
    "system": ["s", [{"type": "text", "text": "s"}]],
    "input": [
        "a",
        [{"role": "user", "content": "a"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    ],
    "reasoning": [{"effort": "low"}],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
    "metadata": [{"user_id": "u"}],
    "stop_token_ids": [[1]],
    "allowed_token_ids": [[1, 2]],
    "bad_words": [["a"]],
    "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}],
}
CONTENTS: list[Any] = [
    "a",
    "",
    [],
    [{"type": "text", "text": "a"}],
    [{"text": "a"}],
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}],
    [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],
    [{"type": "tool_result", "tool_use_id": "x", "content": "a"}],
    [{"type": "tool_use", "id": "x", "name": "f", "input": {}}],
    [{"type": "thinking", "thinking": "a", "signature": ""}],
    [{"type": "refusal", "refusal": "a"}],
    None,
    [None],
    [[]],
]
STRINGS = [
    "",
    " ",
    "a",
    "auto",
    "none",
    "required",
    "-1",
    "1e400",
    "NaN",
    "null",
    "\x00",
    "é́🙂‏",
    "𝔘" * 40,
    "{{ x }}",
    "a" * 5000,
    "[" * 300,
    "data:,",
    "<|im_end|>",
]
NUMBERS: list[Any] = [
    0,
    1,
    -1,
    2,
    3,
    0.5,
    -0.0,
    1e-320,
    1e308,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
    10**30,
    1e30,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    False,
]


@dataclass
class Oddities:
    """Draws requests; the same ones for the same seed."""

    chance: random.Random

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON, and Python's notion of it, can say."""
        draw, kind = self.chance, self.chance.random()
        if kind < 0.3:
            return draw.choice(NUMBERS)
        if kind < 0.55:
            return draw.choice(STRINGS)
        if kind < 0.62:
            return None
        if kind < 0.67:
            return self.nested(draw.choice([3, 20, 70, 150]))
        if depth > 3:
            return {}
        if kind < 0.83:
            return [self.value(depth + 1) for _ in range(draw.choice([0, 1, 1, 2, 5]))]
        return {self.name(): self.value(depth + 1) for _ in range(draw.choice([0, 1, 1, 2, 4]))}

    def nested(self, levels: int) -> Any:
        made: Any = self.chance.choice(["x", 0, None])
        for _ in range(levels):
            made = [made] if self.chance.random() < 0.5 else {self.name(): made}
        return made

    def name(self) -> str:
        known = [
            *SENSIBLE,
            "type",
            "name",
            "content",
            "role",
            "text",
            "function",
            "format",
            "schema",
            "id",
            "$ref",
            "$defs",
            "url",
        ]
        return self.chance.choice([*known, *STRINGS])

    def mutated(self, value: Any, depth: int = 0) -> Any:
        """``value`` with one place in it changed."""
        draw = self.chance
        if draw.random() < 0.3 or depth > 6 or not isinstance(value, dict | list) or not value:
            return self.value()
        if isinstance(value, list):
            at = draw.randrange(len(value))
            if draw.random() < 0.2:
                return [*value, *value[at : at + 1], self.value()]
            return [self.mutated(item, depth + 1) if i == at else item for i, item in enumerate(value)]
        name, kind = draw.choice(list(value)), draw.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != name}
        if kind < 0.3:
            return {**value, self.name(): self.value()}
        return {**value, name: self.mutated(value[name], depth + 1)}

    def request(self) -> tuple[str, dict[str, Any]]:
        """A path and a body, one to three of whose options are drawn, half of them odd."""
        draw = self.chance
        path = draw.choice(list(BODIES))
        fields = sorted(PLAIN[path].fields) if path in PLAIN else ["tokens", "model"]
        body = json.loads(json.dumps(BODIES[path]))
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            name = draw.choice([*fields, *fields, self.name(), "context_management", "messages"])
            if name == "messages" and "messages" in body and draw.random() < 0.5:
                given: Any = [
                    {"role": draw.choice(["user", "assistant", "system", "tool"]), "content": draw.choice(CONTENTS)}
                ]
                given = draw.choice([given, [MESSAGE, *given], [*given, MESSAGE]])
            else:
                given = draw.choice(SENSIBLE.get(name) or [body.get(name)])
            if draw.random() < 0.75:
                given = self.mutated(given)
            body[name] = given
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n"):
            given = body.get(name)  # a long answer is allowed, and takes its time
            if isinstance(given, int | float) and 8 < given < 1 << 40:
                body[name] = 8
        return path, body


@dataclass
class Outcome:
    """What a server said: statuses, and the requests that it failed on."""

    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[tuple[str, str, str]] = field(default_factory=list)

    def note(self, path: str, body: str, status: int, said: bytes) -> None:
        self.statuses[status] += 1
        # An answer that has begun as a stream says so in an event.
        broke = status == 200 and any(
            mark in said for mark in (b'"code":500', b'"code": 500', b"InternalServerError", b"server_error")
        )
        if status >= 500 or status == 0 or broke:
            self.failed.append((path, body[:3000], f"{status} {said[:300].decode('utf-8', 'replace')}"))


def odd_requests(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Paths and bodies."""
    oddities = Oddities(random.Random(seed))
    for _ in range(count):
        path, body = oddities.request()
        yield path, json.dumps(body)


def send(url: str, key: str, requests: Iterator[tuple[str, str]], clients: int = 8) -> Outcome:
    """Sends requests, a few at a time."""
    outcome = Outcome()
    host = url.removeprefix("http://")

    def one(request: tuple[str, str]) -> None:
        path, body = request
        connection = http.client.HTTPConnection(host, timeout=120)
        try:
            head = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            connection.request("POST", path, body.encode(), head)
            answer = connection.getresponse()
            outcome.note(path, body, answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            outcome.note(path, body, 0, repr(error).encode())
        finally:
            connection.close()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, requests))
    return outcome


def main() -> None:
    url, key, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    outcome = send(url, key, odd_requests(count, int(sys.argv[4]) if len(sys.argv) > 4 else 0))
    for path, body, said in outcome.failed:
        print(path, body, said, "", sep="\n")
    print(json.dumps(outcome.statuses), len(outcome.failed))


if __name__ == "__main__":
    main()
