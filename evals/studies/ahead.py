"""The first token behind a slide and a new chunk, where the slide was computed ahead while nobody asked.

An exact window that is full and slides one by one, on vLLM in this process. Each turn: a pause, a new chunk, room for it, a
question; measured are the seconds from the new chunk to the first token. Ways, each with a store and a prefix cache of its own,
in turn, so that a busy machine is busy for all of them:

- ``ahead``: `Window(prefill="idle")`, which predicts the slide and computes during the pause; ``again``: the same window without;
- ``cached``: the same window, which slides and asks before the pause: a forward over new chunk and question is left;
- ``plain``: vLLM itself with the same prompt behind the same cached prefix, without a window.

Every ``--odd`` turn another chunk than the oldest leaves: what a wrong prediction costs. Run from the root of a checkout::

    python -m evals.studies.ahead --model FOLDER --json
"""

import statistics
import time
from random import Random
from typing import Annotated, Any

import typer

from ctxwin import Chunk, Fidelity, Window, open_engine, open_store
from ctxwin_evals.console import Json, errors, new_table, progress, show

WAYS = ("ahead", "again", "cached", "plain")
SYSTEM, QUESTION, ANSWER = "You watch a log.", "What happened last?", 8


class Way:
    """One window, its turns, and what they took."""

    def __init__(self, name: str, engine: Any, size: int, chunk: int, seed: int) -> None:
        self.name, self._size, self._rng = name, chunk, Random(seed)
        self.engine = engine.view(name, open_store("memory:", max_bytes="1GB", tenant=name))
        asked = self.engine.encode_query(QUESTION).tokens
        self.reserve = asked + ANSWER
        system = self.engine.encode_system_prompt(SYSTEM).tokens
        prefill: Any = "idle" if name == "ahead" else None
        budget = system + size // chunk * chunk + self.reserve
        self.window = Window(self.engine, SYSTEM, budget, Fidelity("exact"), prefill=prefill)
        self.first_s: dict[bool, list[float]] = {False: [], True: []}
        self.computed: dict[bool, list[int]] = {False: [], True: []}
        self.missed: dict[bool, list[int]] = {False: [], True: []}
        self.window.extend([self.new_chunk() for _ in range(size // chunk)])
        self.window.ask(QUESTION, ANSWER)

    def new_chunk(self) -> Chunk:
        """Return the next chunk: its content does not matter to the time it takes."""
        return Chunk.tokens([self._rng.randrange(500, 5000) for _ in range(self._size)])

    def turn(self, think_s: float, *, odd: bool, counted: bool) -> None:
        """Run one turn; an odd one evicts the fourth chunk."""
        window, chunk = self.window, self.new_chunk()
        if self.name in ("cached", "plain"):
            window.evict(window.ids[3 if odd else 0])
            window.ask(QUESTION, 1)
        if self.name == "plain":
            self._generate(None)
        time.sleep(think_s)
        began = time.perf_counter()
        if self.name == "plain":
            self._generate(chunk)
            first = time.perf_counter() - began
            window.append(chunk)
            computed = missed = 0
        else:
            if odd and self.name != "cached":
                window.evict(window.ids[3])
            window.append(chunk)
            window.slide(reserve_tokens=self.reserve)
            usage = window.ask(QUESTION, ANSWER).usage
            first = time.perf_counter() - began - usage.total_s + usage.ttft_s
            computed, missed = usage.computed_tokens, usage.missed_tokens
        if counted:
            self.first_s[odd].append(first)
            self.computed[odd].append(computed)
            self.missed[odd].append(missed)

    def _generate(self, chunk: Chunk | None) -> None:
        """Run one token of vLLM's own behind what is placed, ``chunk`` and the question, without the window."""
        from vllm import SamplingParams

        engine = self.engine
        parts = [engine.encode_system_prompt(SYSTEM), *(engine.encode(p.chunk) for p in self.window.snapshot().placed)]
        parts += [] if chunk is None else [engine.encode(chunk)]
        ids = [i for part in (*parts, engine.encode_query(QUESTION)) for i in part.token_ids]
        driver = engine.core.driver
        with driver.counted(background=False):  # the engine may be computing ahead for another way's window
            ticket = driver.submit({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0.0), 0)
            finished = False
            while not finished:
                output = ticket.outputs.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished

    def described(self) -> dict[str, Any]:
        """The way as JSON."""
        kinds: dict[str, Any] = {}
        for odd, name in ((False, "regular"), (True, "odd")):
            if first := sorted(self.first_s[odd]):
                kinds[name] = {
                    "turns": len(first), "first_token_s": round(statistics.median(first), 3),
                    "first_token_p90_s": round(first[int(0.9 * (len(first) - 1))], 3),
                    "computed_tokens": statistics.median(self.computed[odd]),
                    "missed_tokens": statistics.median(self.missed[odd]),
                }  # fmt: skip
        counts = self.window.maintenance.prefill_counts
        ahead = (
            {}
            if counts is None
            else {name: getattr(counts, name) for name in ("tokens", "used", "missed", "hits", "misses")}
        )
        return {"way": self.name, **kinds, "ahead": ahead}


def main(
    model: Annotated[str, typer.Option(help="Folder or Hub name of a text model.")],
    dtype: Annotated[str, typer.Option(help="What is computed in.")] = "float32",
    tokens: Annotated[int, typer.Option(min=512, help="Tokens that the window holds.")] = 1536,
    chunk: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 128,
    think: Annotated[float, typer.Option(min=0, help="Seconds between an answer and the next chunk.")] = 4.0,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a way in a round; the first is not counted.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over the ways.")] = 3,
    odd: Annotated[int, typer.Option(min=0, help="One in so many turns evicts another than the oldest; 0: none.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the chunks.")] = 7,
    only: Annotated[str, typer.Option(help="Which ways.")] = ",".join(WAYS),
    as_json: Json = False,
) -> None:
    """Measure first tokens behind a slide and a new chunk, with the slide computed ahead and without."""
    with errors(), open_engine(f"vllm:{model}", dtype=dtype, max_model_len=tokens + 512) as engine:
        ways = [Way(name, engine, tokens, chunk, seed) for name in WAYS if name in only.split(",")]
        with progress("turns", rounds * turns * len(ways)) as advance:
            for _ in range(rounds):
                for way in ways:
                    for i in range(turns):
                        way.turn(think, odd=bool(odd) and i % odd == odd - 1, counted=i > 0)
                        advance(1)
        rows = [way.described() for way in ways]
        for way in ways:
            way.window.close()
            way.engine.close()
    table = new_table("", "way|turns|first token, s|p90|computed|missed", left=(0,))
    columns = "turns", "first_token_s", "first_token_p90_s", "computed_tokens", "missed_tokens"
    for row in rows:
        for kind in ("regular", "odd"):
            if kind in row:
                table.add_row(f"{row['way']}, {kind}", *(str(row[kind][column]) for column in columns))
    show({"model": model, "dtype": dtype, "think_s": think, "rows": rows}, as_json, table)


if __name__ == "__main__":
    typer.run(main)
