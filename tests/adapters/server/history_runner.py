"""Asks the requests of a `History` of one server in several ways, and compares each with vLLM alone.

Each way has a prefix-cache space and session names of its own. ``off`` is vLLM alone, the oracle; ``exact`` must give its tokens
and log-probabilities; ``profile`` is the bundled model's own way, whose answers may differ.
"""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adapters.server.histories import PATHS, Bodies, Conversation, History, Route, Step, Turn

WAYS: dict[str, dict[str, Any]] = {
    "off": {"windows": "off"},
    "exact": {"windows": "auto", "fidelity": {"mode": "exact"}},
    "profile": {"windows": "auto"},
}
CONTROLS = {"again": {"windows": "off"}, "uncached": {"windows": "off"}}
"""vLLM alone a second time, for how much its own times differ; and without a prefix cache, for its own log-probabilities."""
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer key-own"}
TOLERANCE = 5e-5
"""Most difference in log-probability between exact windows and vLLM alone.

Held against itself without a prefix cache (`CONTROLS`), vLLM in float32 on one thread gives the same to the last bit. Where a
product of fewer rows sums in another order, as on other processors, it differs from itself by some 1e-5.
"""
STALL, STALL_S = 20, 10.0
"""A request stalls that takes more than so many times as long as vLLM alone, and so many seconds more: no busy machine does."""
SLOWER, SLOWER_S, TRIES = 3, 0.05, 3
"""From where on a request counts as slower than vLLM alone, and how often in a row it has to be."""
_ANSWER, _LEFT, _SUMMARY = 4, 64, 512
"""Tokens of an answer, of one that a client leaves in its midst, and of a summary."""
_LEAVES_S = (0.0, 0.004, 0.015, 0.05)
"""How long a client waits that leaves before the answer, by `Step.keep`."""


@dataclass
class Answer:
    """One answer.

    Attributes:
        scores: of each token: its name and log-probability, then those of the most likely ones. Messages have none.
        prompt: tokens of the prompt.
        windows: the header that says whether a window stood behind it.
        lanes: what ``usage.ctxwin`` reports.
    """

    status: int
    seconds: float
    text: str = ""
    ids: list[int] = field(default_factory=list)
    scores: list[list[tuple[str, float]]] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    summary: str | None = None
    windows: str = ""
    lanes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def read_answer(route: Route, raw: bytes, *, stream: bool) -> Answer:
    """An answer from the body of a response with status 200."""
    if stream:
        lines = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: {")]
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    else:
        events = [json.loads(raw)]
    answer = Answer(200, 0.0)
    for event in events:
        if event.get("error"):
            answer.error = str(event["error"])
        _READERS[route](answer, event)
    return answer


def _scores(entries: Any) -> list[list[tuple[str, float]]]:
    return [
        [(e["token"], e["logprob"]), *((t["token"], t["logprob"]) for t in e.get("top_logprobs") or ())]
        for e in entries or ()
    ]


def _read_chat(answer: Answer, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or ():
        answer.text += (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        answer.ids += choice.get("token_ids") or []
        answer.scores += _scores((choice.get("logprobs") or {}).get("content"))
    usage = event.get("usage")
    if usage:
        answer.prompt, answer.lanes = usage["prompt_tokens"], usage.get("ctxwin") or answer.lanes
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _read_responses(answer: Answer, event: dict[str, Any]) -> None:
    response = event.get("response", event)
    if event.get("type", "response.completed") not in ("response.completed", "response.incomplete"):
        return
    for item in response.get("output") or ():
        if item.get("type") == "compaction":
            sealed = item["encrypted_content"].removeprefix("ctxwin:")
            answer.summary = base64.b64decode(sealed).decode() or None
        for part in item.get("content") or ():
            answer.text += part.get("text") or ""
            answer.scores += _scores(part.get("logprobs"))
    usage = response.get("usage") or {}
    answer.prompt, answer.lanes = usage.get("input_tokens", 0), usage.get("ctxwin") or {}
    answer.cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0


def _read_messages(answer: Answer, event: dict[str, Any]) -> None:
    delta = event.get("delta") or {}
    answer.text += delta.get("text") or ""
    for block in event.get("content") or ():
        answer.text += block.get("text") or ""
        if block["type"] == "compaction":
            answer.summary = block["content"]
    if delta.get("type") == "compaction_delta":
        answer.summary = delta["content"]
    usage = event.get("usage") or {}
    if usage.get("input_tokens") is not None:
        cached = usage.get("cache_read_input_tokens") or 0
        answer.prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
        answer.cached, answer.lanes = cached, usage.get("ctxwin") or answer.lanes


_READERS: dict[str, Callable[[Answer, dict[str, Any]], None]] = {
    "chat": _read_chat,
    "responses": _read_responses,
    "messages": _read_messages,
}


@dataclass
class Request:
    """One request of a history.

    Attributes:
        body: as a client sends it; plain: as vLLM alone has to be asked the same.
    """

    step: Step
    body: dict[str, Any]
    plain: dict[str, Any]


@dataclass
class Figures:
    """What many histories came to.

    Attributes:
        rows: way, route, milliseconds, those of vLLM alone, and whether the pictures were new to the server, of each request
            that has a prefix cache of its own. Whoever goes first with new pictures pays for them, so that times compare only
            where they are known.
        windows: by way, what the header of an answer said.
        same: by way, answers with vLLM's own text, of ``answers``.
        tokens: by way, of all prompts, and computed.
        gap: by way, the largest difference in log-probability.
        slow: requests that were slower than they may be, `TRIES` times.
    """

    histories: int = 0
    rows: list[tuple[str, str, float, float, bool]] = field(default_factory=list)
    windows: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)
    prompt: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    gap: dict[str, float] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """All of it as JSON, for `add`."""
        return vars(self)

    def add(self, data: dict[str, Any]) -> None:
        """Adds other figures."""
        self.histories += data["histories"]
        self.rows += [tuple(row) for row in data["rows"]]
        for name in ("windows", "answers", "same", "prompt", "computed"):
            getattr(self, name).update(data[name])
        self.slow += data.get("slow", ())
        for way, gap in data["gap"].items():
            self.gap[way] = max(gap, self.gap.get(way, 0.0))

    def summary(self) -> dict[str, Any]:
        """The figures as JSON, without the rows."""
        figures: dict[str, Any] = {"histories": self.histories, "windows": dict(self.windows), "slow": len(self.slow)}
        figures["ways"] = {}
        for way in sorted({row[0] for row in self.rows}):
            rows = [row for row in self.rows if row[0] == way and not row[4]]
            if not rows:
                continue
            ratios = np.array([ms / alone for _, _, ms, alone, _ in rows])
            over = [row for row in rows if row[2] > SLOWER * row[3] + 1e3 * SLOWER_S]
            new = [row[2] for row in self.rows if row[0] == way and row[4]]
            worst = max(rows, key=lambda row: row[2] - SLOWER * row[3])
            figures["ways"][way] = {
                "requests": self.answers[way],
                "compared": len(rows),
                "median": round(float(np.median(ratios)), 3),
                "p99": round(float(np.quantile(ratios, 0.99)), 3),
                "worst": round(float(ratios.max()), 2),
                "slowest_ms": round(max(row[2] for row in rows), 1),
                "above": len(over),
                "worst_above_ms": [round(worst[2], 1), round(worst[3], 1)],
                "new_pictures_ms": round(float(np.median(new)), 1) if new else None,
                "same": [self.same[way], self.answers[way]],
                "computed": [self.computed[way], self.prompt[way]],
                "gap": self.gap.get(way, 0.0),
            }
        return figures


class Runner:
    """Runs histories on one server.

    Args:
        url: of the server.
        controls: further ways to ask vLLM alone, of `CONTROLS`.
    """

    _numbers = itertools.count(1)  # of all runners: a second one must not find what the first has left

    def __init__(self, url: str, controls: tuple[str, ...] = ()) -> None:
        self._host = url.removeprefix("http://")
        self._ways = {**WAYS, **{name: CONTROLS[name] for name in controls}}
        self._slowest = 0.1
        self.figures = Figures()

    def time(self, history: History) -> None:
        """`run`, and once more each time that a request took longer than it may: what is slow by chance is not so again.

        Counted in `Figures.slow` are requests that were slow `TRIES` times. Only histories of known pictures are timed.
        """
        slow = self.run(history)
        if history.fresh or history.shared:
            return
        for _ in range(TRIES - 1):
            slow = slow and slow & Runner(f"http://{self._host}").run(history)
        for way, index in slow:
            self.figures.slow.append(f"{way}, request {index} of {history}")

    def run(self, history: History) -> set[tuple[str, int]]:
        """Asks everything in every way; returns the ways and numbers of requests that took longer than they may.

        AssertionError for the first request that is not served as vLLM alone serves it.
        """
        number = next(self._numbers)
        bodies = Bodies(history.route, history.blocks, number if history.fresh else 0)
        order = [*WAYS][history.first :] + [*WAYS][: history.first] + [way for way in self._ways if way not in WAYS]
        requests: list[Request] = []
        answers: dict[str, list[Answer | None]] = {}
        for way in order:
            client = _Client(self, way, history, number, bodies)
            first = not requests
            conversations = [Conversation(f"Run {number}. You watch a camera."), Conversation("")]
            other = conversations[0].system if history.twins else f"Run {number}. You read a screen."
            conversations[1] = Conversation(other)
            answers[way] = []
            for index, step in enumerate(history.steps):
                if first:
                    requests.append(_request(bodies, conversations[step.track].asking(step, index), step))
                answer = client.ask(requests[index], index)
                answers[way].append(answer)
                if first:
                    conversation = conversations[step.track].asking(step, index)
                    if answer is not None and answer.status == 200:
                        reply = Turn("assistant", text=answer.text or "-", summary=answer.summary)
                        conversation = conversation.extended(reply)
                    conversations[step.track] = conversation
        self.figures.histories += 1
        for index, request in enumerate(requests):
            try:
                self._compare(history, index, request, {way: answers[way][index] for way in order})
            except AssertionError as error:
                error.add_note(repr(history))
                raise
        return {
            (way, index)
            for way in order
            for index, (answer, alone) in enumerate(zip(answers[way], answers["off"], strict=True))
            if answer is not None and alone is not None and answer.seconds > SLOWER * alone.seconds + SLOWER_S
        }

    def _compare(self, history: History, index: int, request: Request, answers: dict[str, Answer | None]) -> None:
        oracle = answers["off"]
        if oracle is None:
            return
        assert oracle.status < 500, f"request {index}: vLLM alone answered {oracle.status}: {oracle.error}"
        for way, answer in answers.items():
            assert answer is not None
            where = f"request {index}, {way}: "
            assert answer.status == oracle.status, f"{where}{answer.status} instead of {oracle.status}: {answer.error}"
            assert answer.error == oracle.error, where + answer.error
            allowed = STALL * oracle.seconds + STALL_S
            assert answer.seconds <= allowed, f"{where}{answer.seconds:.2f} s; vLLM alone {oracle.seconds:.3f} s"
            if oracle.status != 200:
                continue
            self._count(history, way, answer, oracle)
            if way == "profile" and request.step.manages == "compact":
                continue  # its summary may be another one, and so its prompt
            assert answer.prompt == oracle.prompt, f"{where}{answer.prompt} tokens instead of {oracle.prompt}"
            if answer.lanes:
                assert sum(answer.lanes["lanes"].values()) == answer.prompt, f"{where}{answer.lanes} of {answer.prompt}"
                assert 0 <= answer.lanes["computed_tokens"] <= answer.prompt, f"{where}{answer.lanes}"
            if way != "profile":
                assert answer.summary == oracle.summary, f"{where}{answer.summary!r} instead of {oracle.summary!r}"
                self._compare_tokens(where, way, answer, oracle)

    def _count(self, history: History, way: str, answer: Answer, oracle: Answer) -> None:
        figures = self.figures
        figures.windows[f"{way}: {answer.windows or 'nothing'}"] += 1
        figures.answers[way] += 1
        figures.same[way] += answer.text == oracle.text
        figures.prompt[way] += answer.prompt
        figures.computed[way] += answer.lanes.get("computed_tokens", answer.prompt - answer.cached)
        if not history.shared:
            times = round(1e3 * answer.seconds, 2), round(1e3 * oracle.seconds, 2)
            figures.rows.append((way, history.route, *times, history.fresh))

    def _compare_tokens(self, where: str, way: str, answer: Answer, oracle: Answer) -> None:
        """Tokens and log-probabilities, up to a token that vLLM itself may choose otherwise: a tie within `TOLERANCE`."""
        for place, (mine, theirs) in enumerate(zip(answer.scores, oracle.scores, strict=False)):
            oracles = dict(theirs[1:])
            gaps = [abs(score - oracles[token]) for token, score in mine[1:] if token in oracles]
            gap = max([abs(mine[0][1] - theirs[0][1]), *gaps])
            self.figures.gap[way] = max(self.figures.gap.get(way, 0.0), gap)
            assert gap <= TOLERANCE, f"{where}token {place}: {mine} instead of {theirs}"
            if mine[0][0] != theirs[0][0]:
                runner_up = theirs[2][1] if len(theirs) > 2 else -np.inf
                assert theirs[0][1] - runner_up <= TOLERANCE, f"{where}token {place}: {mine} instead of {theirs}"
                return
        assert (answer.ids, answer.text) == (oracle.ids, oracle.text), where + f"{answer.text!r} for {oracle.text!r}"

    def guard(self) -> float:
        """Seconds after which a request is given up as stalled."""
        return STALL * self._slowest + STALL_S

    def exchange(self, route: Route, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """One request and its whole answer; one of status 0 where it stalled."""
        raw = json.dumps(body).encode()
        begin = time.perf_counter()
        connection = http.client.HTTPConnection(self._host, timeout=self.guard())
        try:
            connection.request("POST", PATHS[route], raw, {**HEADERS, **headers})
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            return Answer(0, time.perf_counter() - begin, error="it stalled")
        finally:
            connection.close()
        seconds = time.perf_counter() - begin
        if response.status == 200:
            answer = read_answer(route, content, stream=body["stream"])
        else:
            answer = Answer(response.status, 0.0, error=content[:500].decode(errors="replace"))
        answer.seconds, answer.windows = seconds, response.headers.get("x-ctxwin-windows", "")
        if body["ctxwin"] == {"windows": "off"}:
            self._slowest = max(self._slowest, seconds)
        return answer

    def leave(self, route: Route, body: dict[str, Any], headers: dict[str, str], seconds: float | None) -> None:
        """One request that its client gives up: after so many seconds, or, for None, behind the first event."""
        connection = http.client.HTTPConnection(self._host, timeout=self.guard())
        try:
            connection.request("POST", PATHS[route], json.dumps(body).encode(), {**HEADERS, **headers})
            if seconds is None:
                connection.getresponse().readline()
            else:
                time.sleep(seconds)
        finally:
            connection.close()


class _Client:
    """One history in one way to ask."""

    def __init__(self, runner: Runner, name: str, history: History, number: int, bodies: Bodies) -> None:
        self._runner, self._name, self._history, self._bodies = runner, name, history, bodies
        self._space = f"{number}-{name}"
        self._headers = {"x-session-id": self._space} if history.named else {}

    def ask(self, request: Request, index: int) -> Answer | None:
        """The answer; None where the client has left."""
        runner, route, step = self._runner, self._history.route, request.step
        alone = WAYS["off"] == (WAYS | CONTROLS)[self._name]
        body = self._complete(request.plain if alone else request.body, index)
        if step.leaves:
            waits = None if step.leaves == "stream" else _LEAVES_S[step.keep % len(_LEAVES_S)]
            runner.leave(route, body, self._headers, waits)
            return None
        if not alone or step.manages != "compact" or route == "chat":
            return runner.exchange(route, body, self._headers)
        summarised = runner.exchange(route, self._bodies.summarising(body, _SUMMARY), self._headers)
        summary = summarised.text.strip() or None
        if summarised.status != 200 or summary is None:
            return runner.exchange(route, body, self._headers)
        answer = runner.exchange(route, self._bodies.summarised(body, summary), self._headers)
        answer.summary, answer.seconds = summary, answer.seconds + summarised.seconds
        return answer

    def _complete(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        space = f"{self._space}-{index}" if self._name == "uncached" else self._space
        salt = {} if self._history.shared and self._name in WAYS else {"cache_salt": space}
        return {**body, **salt, "ctxwin": (WAYS | CONTROLS)[self._name]}


def _request(bodies: Bodies, conversation: Conversation, step: Step) -> Request:
    leaves = step.leaves == "stream"
    options: dict[str, Any] = {"most": _LEFT if leaves else _ANSWER, "stream": leaves or step.streamed}
    managed = step.manages in ("results", "pictures")
    plain = conversation.cleared(step.manages, step.keep) if managed else conversation
    body = bodies.request(conversation, **options) | bodies.management(step)
    return Request(step, body, bodies.request(plain, **options))
