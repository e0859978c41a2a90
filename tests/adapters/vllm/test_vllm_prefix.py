"""vLLM's prefix cache under windows: what is found again, what is shared with plain requests, and what never is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from adapters.vllm.layouts import distance
from adapters.vllm.prefixes import (
    BLOCK,
    CLOSE,
    HEADER,
    QUERY,
    ask,
    frame,
    logprobs_of,
    plain,
    plain_request,
    prompt_of,
    whole_blocks,
    window_on,
    words,
)
from ctxwin import Chunk, Fidelity, Window, open_engine
from ctxwin.baselines import POLICIES
from ctxwin.demo.run import Options, prepare, run
from ctxwin.engines.cost import Fit
from ctxwin_server.chat.conversations import Conversations
from ctxwin_vllm.transport import PARAM


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with open_engine("tiny:vllm", dtype="float32") as opened:
        yield opened


@pytest.fixture
def view(engine: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with a store of its own on the same vLLM, whose cache is empty; of no tenant, as plain requests are."""
    engine._core.driver.reset_prefix_cache()
    with engine.view("") as made:
        yield made


class TestWindows:
    @pytest.mark.parametrize("gpu", [False, True])
    def test_an_append_loads_or_computes_less_than_a_block(
        self, view: Any, gpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Exact windows: what was asked before is in the cache, but for its last partial block."""
        monkeypatch.setattr(view._core, "min_load", BLOCK if gpu else 0)
        token, query = view.spec.kv.token_bytes, view.encode_query(QUERY).tokens
        with window_on(view, [frame(i) for i in range(4)]) as window:
            ask(window)
            for i in range(4, 12):
                window.append(frame(i) if i % 2 else words(i))
                for new in (window.chunks[-1].tokens + query, query):
                    usage = ask(window).usage
                    uncached = usage.prompt_tokens - usage.cached_tokens
                    loaded = (
                        0 if gpu else max(0, uncached - new)
                    )  # a question that was asked before may be cached in part
                    assert loaded < BLOCK and uncached < new + BLOCK
                    assert (usage.bytes_loaded, usage.computed_tokens) == (token * loaded, uncached - loaded)

    def test_the_demos_moves_cost_no_more_than_those_of_the_best_user_of_a_prefix_cache(
        self, view: Any, tmp_path: Path
    ) -> None:
        options = Options(out=tmp_path, frames=12, fidelity=Fidelity("exact"))
        summary = run(view, options, prepare(options))["summary"]
        assert summary["asks"] > 15 and summary["agreement"] == 1.0
        assert summary["computed_tokens"] <= 1.05 * min(summary[f"computed_tokens_{policy}"] for policy in POLICIES)

    def test_kv_that_the_next_slide_makes_useless_is_not_read_back(self, view: Any) -> None:
        """From the second slide on; the prefix cache serves the same prompt again, and then it is stored."""
        stored: list[str] = []
        put = view.repo.put_span

        def put_span(key: str, *rest: Any) -> Any:
            stored.append(key)
            return put(key, *rest)

        def turn(window: Window) -> Any:
            stored.clear()
            plan, answer = window.plan(QUERY), ask(window)
            window.core.check()
            right = logprobs_of(plain(view, plain_request(view, window)))
            assert distance(answer.first_token_logprobs, right[0]) < CLOSE
            assert answer.usage.computed_tokens == plan.computed_tokens
            return answer.usage

        with (
            window_on(view, [frame(i) for i in range(6)]) as window,
            mock.patch.object(view.repo, "put_span", put_span),
        ):
            turn(window)
            for i in range(6, 10):
                window.slide(1)
                window.append(frame(i) if i % 2 else words(i))
                turn(window)
                assert len(stored) == (6 if i == 6 else 0)
            assert turn(window).computed_tokens < BLOCK and len(stored) == 6
            view._core.driver.reset_prefix_cache()
            assert turn(window).bytes_loaded and not stored
            window.slide(1)  # the first of its kind again
            turn(window)
            assert len(stored) == 5

    def test_an_append_behind_survivors_reloads_less_than_a_block(self, view: Any) -> None:
        """Approximate windows: a last block that is not whole is loaded, and nothing is computed again."""
        with window_on(view, [frame(i) for i in range(6)], "patched") as window:
            ask(window)
            window.slide(2)
            survivors = sum(chunk.tokens for chunk in window.chunks)
            slid = ask(window).usage
            token = view.spec.kv.token_bytes
            # The system prompt's whole blocks are those of the first ask.
            assert slid.bytes_loaded == token * (window.tokens - whole_blocks(window.tokens - survivors))
            assert slid.cached_tokens == whole_blocks(window.tokens - survivors)
            window.append(frame(6))
            assert ask(window).usage.bytes_loaded < BLOCK * token
            window.append(words(7))
            assert ask(window).usage.bytes_loaded < BLOCK * token
            for i in range(8, 12):
                window.append(words(i))
                usage = ask(window).usage
                assert usage.bytes_loaded < BLOCK * token
                assert usage.computed_tokens == window.chunks[-1].tokens + view.encode_query(QUERY).tokens

    def test_a_fork_adds_no_block(self, view: Any) -> None:
        pool = view._core.driver.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        taken: list[int] = []
        take = pool.get_new_blocks

        def counted(count: int) -> Any:
            taken.append(count)
            return take(count)

        for mode, edit in (("exact", None), ("patched", "slide")):
            with window_on(view, [frame(i) for i in range(6)], mode) as window:
                ask(window)
                if edit:
                    window.slide(1)
                    ask(window)
                    window.append(words(1))
                ask(window)
                cached, free = len(pool.cached_block_hash_to_block), pool.get_num_free_blocks()
                with window.fork() as branch, mock.patch.object(pool, "get_new_blocks", counted):
                    usage = ask(branch).usage
                # What is not in the cache is the last, partial block with the query: nothing of the window is stored twice.
                whole = whole_blocks(window.tokens)
                loaded = usage.bytes_loaded // view.spec.kv.token_bytes
                assert loaded <= window.tokens - whole
                assert usage.cached_tokens >= whole
                assert usage.cached_tokens + usage.computed_tokens + loaded == usage.prompt_tokens
                assert sum(taken) <= -(-(usage.prompt_tokens + 4) // BLOCK) - whole // BLOCK
                taken.clear()
                assert (len(pool.cached_block_hash_to_block), pool.get_num_free_blocks()) == (cached, free)

    def test_an_edit_reloads_nothing_in_front_of_it(self, view: Any) -> None:
        """What is exact in front of the first approximation stays in the blocks it is in."""
        with window_on(view, [frame(i) for i in range(10)], "patched") as window:
            ask(window)
            ids = window.ids
            for edit in (
                lambda: window.evict(ids[5]),
                lambda: window.recall(ids[5], at=7),
                lambda: window.reorder([*window.ids[:6], *reversed(window.ids[6:])]),
                lambda: window.toggle(ids[8], conditioned=False),
                lambda: window.insert(6, words(1)),
                lambda: window.evict(window.ids[7]),
            ):
                edit()
                entries = window.chunks
                first = next((entry.offset for entry in entries if not entry.exact), window.tokens)
                held = next((entry.offset for entry in entries if entry.compute), window.tokens)
                usage = ask(window).usage
                assert usage.cached_tokens >= whole_blocks(min(first, held))
                assert usage.bytes_loaded <= view.spec.kv.token_bytes * (window.tokens - whole_blocks(min(first, held)))

    def test_an_edit_undone_comes_back_to_its_blocks(self, view: Any) -> None:
        with window_on(view, [frame(i) for i in range(8)], "patched") as window:
            ask(window)
            ids = window.ids
            window.slide(1)
            slid = ask(window)
            window.toggle(ids[4], conditioned=False)
            off = ask(window)
            window.toggle(ids[4], conditioned=True)
            back = ask(window)
            assert back.usage.bytes_loaded < BLOCK * view.spec.kv.token_bytes
            assert back.first_token_logprobs == slid.first_token_logprobs != off.first_token_logprobs

    @pytest.mark.parametrize(
        "kind", [lambda i: Chunk.text(f"{i} " + "red blue circle square color number " * 25), frame]
    )
    def test_exact_kv_behind_an_approximation_has_blocks_of_its_own(self, view: Any, kind: Any) -> None:
        """KV of one chunk behind one patch: computed behind that patch, and later exact, from an exact window's span."""
        fidelity = Fidelity("patched", rank=2)
        chunks = [kind(i) for i in range(3)]

        def patched() -> Window:
            made = Window(view, HEADER, fidelity=fidelity)
            made.extend(chunks[:2])
            ask(made)
            assert made.maintenance.compress() > 0
            return made

        with patched() as window:
            window.append(chunks[2])
            ask(window)  # leaves KV of the last chunk, computed behind the patch, in vLLM's blocks
            with window_on(view, chunks) as exact:
                ask(exact)
            patched().close()  # the exact KV of the second chunk is gone again
            assert [entry.exact for entry in window.plan().entries] == [True, False, True]
            served = ask(window)
            view._core.driver.reset_prefix_cache()
            assert distance(served.first_token_logprobs, ask(window).first_token_logprobs) < CLOSE


class TestWithPlainRequests:
    @pytest.mark.parametrize("kind", [frame, words])
    def test_an_exact_window_serves_plain_requests(self, view: Any, kind: Any) -> None:
        with window_on(view, [kind(i) for i in range(5)]) as window:
            ours = ask(window)
            out = plain(view, plain_request(view, window))
            assert len(out.prompt_token_ids) == ours.usage.prompt_tokens
            assert out.num_cached_tokens == whole_blocks(ours.usage.prompt_tokens - 1) > window.tokens // 2
            assert distance(ours.first_token_logprobs, logprobs_of(out)[0]) < CLOSE
            assert list(out.outputs[0].token_ids)[: len(ours.token_ids)] == list(ours.token_ids)

    @pytest.mark.parametrize("kind", [frame, words])
    def test_plain_requests_serve_an_exact_window(self, view: Any, kind: Any) -> None:
        with window_on(view, [kind(i) for i in range(5)]) as window:
            out = plain(view, plain_request(view, window))
            assert out.num_cached_tokens == 0
            ours = ask(window)
            assert (
                ours.usage.cached_tokens == whole_blocks(ours.usage.prompt_tokens - 1) and ours.usage.bytes_loaded == 0
            )
            assert distance(ours.first_token_logprobs, logprobs_of(out)[0]) < CLOSE

    def test_spans_loaded_into_the_exact_space_serve_plain_requests(self, view: Any) -> None:
        with window_on(view, [frame(i) for i in range(5)]) as window:
            ours = ask(window)
            view._core.driver.reset_prefix_cache()
            loaded = ask(window)
            assert loaded.usage.bytes_loaded == view.spec.kv.token_bytes * window.tokens
            out = plain(view, plain_request(view, window))
            assert out.num_cached_tokens == whole_blocks(loaded.usage.prompt_tokens - 1)
            assert distance(ours.first_token_logprobs, logprobs_of(out)[0]) < CLOSE

    def test_nobody_outside_can_name_a_windows_picture(self, view: Any) -> None:
        """Another picture under the name that follows from the content, in the very place of the window's."""
        with window_on(view, [frame(i) for i in range(4)]) as window:
            prompt = plain_request(view, window)
            _, media = prompt_of(view, window)
            embeds = prompt["multi_modal_data"]["image"]["image_embeds"]
            prompt["multi_modal_data"]["image"]["image_embeds"] = embeds.flip(0)
            prompt["multi_modal_uuids"] = {"image": [span.key.rpartition("/")[2] for span in media]}
            plain(view, prompt)
            served = ask(window)
            with view.view("another") as other, window_on(other, [frame(i) for i in range(4)]) as alone:
                assert distance(served.first_token_logprobs, ask(alone).first_token_logprobs) < CLOSE

    def test_what_is_exact_in_front_of_an_approximation_is_shared_and_the_rest_is_not(self, view: Any) -> None:
        with window_on(view, [frame(i) for i in range(9)], "patched") as window:
            ask(window)
            window.evict(window.ids[4])
            window.append(frame(9))
            approximate = ask(window)
            begins = next(chunk.offset for chunk in window.chunks if not chunk.exact)
            # With a store of its own: what it computes must not become this window's.
            with view.view("") as other, window_on(other, [frame(i) for i in range(10) if i != 4]) as exact:
                out = plain(view, plain_request(other, exact))
                # No block that an approximation reaches into, and every block in front of those.
                assert out.num_cached_tokens == whole_blocks(begins) > 0
                right = ask(exact)
                assert distance(right.first_token_logprobs, logprobs_of(out)[0]) < CLOSE
                assert distance(right.first_token_logprobs, approximate.first_token_logprobs) > 100 * CLOSE
                again = plain(view, plain_request(other, exact))
                assert again.num_cached_tokens == whole_blocks(len(again.prompt_token_ids) - 1)
                assert distance(right.first_token_logprobs, logprobs_of(again)[0]) < CLOSE
            assert ask(window).first_token_logprobs == approximate.first_token_logprobs

    def test_an_approximate_text_without_a_picture_keeps_the_window_apart(self, view: Any) -> None:
        with window_on(view, [words(i) for i in range(5)], "patched") as window:
            ask(window)
            window.evict(window.ids[1])
            approximate = ask(window)
            assert approximate.usage.cached_tokens == 0 and approximate.usage.bytes_loaded > 0
            with window_on(view, [window.chunk(i) for i in window.ids]) as exact:
                out = plain(view, plain_request(view, exact))
                assert out.num_cached_tokens == whole_blocks(window.chunks[1].offset)
                assert distance(ask(exact).first_token_logprobs, logprobs_of(out)[0]) < CLOSE

    def test_an_approximation_whose_reason_has_gone_stays_out(self, view: Any) -> None:
        """KV that was computed behind a patch, while what the patch stood for is exact by now: its provenance is that of
        the exact KV, and it must not be found under the exact tokens."""
        chunks = [frame(i) for i in range(7)]
        with window_on(view, chunks[:5], "patched") as window:
            ask(window)
            assert window.maintenance.compress() > 0  # all but the first are patched
            window.extend(chunks[5:])  # computed behind patches
            ask(window)
            with window_on(view, chunks[:5]) as other:
                ask(other)  # whoever needs them exact computes them again
            lanes = {chunk.lane for chunk in window.chunks}
            assert lanes == {"resident"} and [chunk.exact for chunk in window.chunks] == [True] * 5 + [False] * 2
            view._core.driver.reset_prefix_cache()
            approximate = ask(window)
            assert approximate.usage.bytes_loaded > 0
            with window_on(view, chunks, "exact") as exact:
                out = plain(view, plain_request(view, exact))
                assert out.num_cached_tokens <= whole_blocks(window.chunks[5].offset)
                right = ask(exact)
                assert distance(right.first_token_logprobs, logprobs_of(out)[0]) < CLOSE
                assert distance(right.first_token_logprobs, approximate.first_token_logprobs) > CLOSE


def test_plain_requests_in_the_same_steps_as_windows(view: Any) -> None:
    """Batched with loads, captures and other prompts: the same to float32's rounding."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from ctxwin_vllm.requests import _next

    driver = view._core.driver
    with window_on(view, [words(i) for i in range(20, 24)]) as window:
        prompt = plain_request(view, window)
    alone = plain(view, prompt)
    driver.reset_prefix_cache()
    windows = [window_on(view, [frame(i + j) for j in range(4)], "patched") for i in range(6)]

    def work(window: Window) -> None:
        ask(window)
        window.slide(1)
        ask(window)
        window.insert(1, words(1))
        ask(window)

    parameters = SamplingParams(
        max_tokens=4, temperature=0, logprobs=-1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    answers = []
    with ThreadPoolExecutor(len(windows)) as pool:
        asks = [pool.submit(work, window) for window in windows]
        while not all(a.done() for a in asks):
            rendered = view._core.inputs.prompt(prompt["prompt_token_ids"], [], view.embed, "")
            ticket = driver.submit(rendered.prompt, parameters, 0)
            while not (output := _next(driver, ticket.outputs, None)).finished:
                pass
            answers.append(output)
        for done in asks:
            done.result()
    assert len(answers) > 3
    right = logprobs_of(alone)
    for output in answers:
        assert list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)
        assert max(distance(p, q) for p, q in zip(right, logprobs_of(output), strict=True)) < CLOSE
    for window in windows:
        window.close()


class TestChats:
    """Exact windows behind plain chats, as a server has them."""

    @staticmethod
    def turn(view: Any, conversations: Any, window: Window, salt: str = "") -> tuple[Any, Any]:
        """One request for what ``window`` holds, and vLLM's output; its KV is written back."""
        from vllm import SamplingParams

        from ctxwin_vllm.rendered import Pictures, RenderedRequest
        from ctxwin_vllm.requests import _next

        core, (ids, media) = view.core, prompt_of(view, window)
        rendered = Pictures().read(core.inputs.prompt(ids, media, view.embed, salt or view.plain_salt).prompt)
        turn = conversations.prepare(RenderedRequest(view, rendered), "", Fidelity("exact"))
        handle = {"kv_transfer_params": {PARAM: turn.submitted.handle}}
        parameters = SamplingParams(max_tokens=4, temperature=0, logprobs=-1, detokenize=False, extra_args=handle)
        ticket = core.driver.submit(turn.submitted.prompt, parameters, 0)
        while not (output := _next(core.driver, ticket.outputs, None)).finished:
            pass
        conversations.finish(turn, finished=True)
        return turn, output

    def assert_as_alone(self, view: Any, window: Window, output: Any) -> None:
        alone = plain(view, plain_request(view, window, cache_salt="alone"))
        assert alone.outputs[0].token_ids[0] == output.outputs[0].token_ids[0]
        assert distance(logprobs_of(output)[0], logprobs_of(alone)[0]) < CLOSE

    @pytest.mark.parametrize("token_ms", [0.0, 10.0])
    def test_a_growing_chat_reads_and_loads_less_than_a_block_beside_the_prefix_cache(
        self, view: Any, token_ms: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It computes that where it takes less time: a load in the background takes a step of vLLM's."""
        monkeypatch.setattr(view.costs, "engine", Fit((0.0, token_ms, 0.0, 0.0, 0.0, 0.0)))
        view.core.prefixes.clear()
        loaded, conversations = 0, Conversations(4, 600.0)
        with window_on(view, [frame(i) for i in range(3)]) as window:
            for i in range(3, 8):
                reads, records = view.repo.counters.hits["span"], len(list(view.store.list()))
                turn, output = self.turn(view, conversations, window)
                transfer, loads = turn.submitted.transfer, turn.submitted.transfer.loads
                assert len(list(view.store.list())) > records, "what is new is stored: the prefix cache may drop it"
                assert len(loads) <= view.repo.counters.hits["span"] - reads <= 1 and transfer.loaded_tokens < BLOCK
                assert whole_blocks(transfer.expected_hit) <= transfer.local_tokens
                loaded += transfer.loaded_tokens
                assert (transfer.expected_hit > 0) == (i > 3) and output.num_cached_tokens >= transfer.local_tokens
                self.assert_as_alone(view, window, output)
                window.append(frame(i) if i % 2 else words(i))
        assert bool(loaded) == bool(token_ms)

    def test_what_vllm_has_dropped_meanwhile_is_computed_and_then_loaded(self, view: Any) -> None:
        conversations = Conversations(4, 600.0)
        with window_on(view, [frame(i) for i in range(3)]) as window:
            self.turn(view, conversations, window)
            window.append(words(4))
            assert view.core.driver.call(view.core.driver.engine.reset_prefix_cache)
            turn, output = self.turn(view, conversations, window)
            assert turn.submitted.transfer.expected_hit > 0 and not output.num_cached_tokens
            self.assert_as_alone(view, window, output)
            assert view.core.driver.reset_prefix_cache()
            turn, output = self.turn(view, conversations, window)
            assert turn.submitted.transfer.expected_hit == 0 and output.num_cached_tokens >= turn.lanes["resident"]
            self.assert_as_alone(view, window, output)

    def test_no_other_tenant_or_salt_is_taken_to_be_in_the_prefix_cache(self, engine: Any) -> None:
        engine.core.driver.reset_prefix_cache()
        conversations = {name: Conversations(4, 600.0) for name in "ab"}
        with engine.view("a") as a, engine.view("b") as b:
            views = {"a": a, "b": b}
            earlier = set[tuple[str, str]]()
            for name, salt in (("a", ""), ("b", ""), ("a", "own"), ("b", "own"), ("a", ""), ("a", "own"), ("b", "own")):
                with window_on(views[name], [words(i) for i in range(5)]) as window:
                    turn, output = self.turn(views[name], conversations[name], window, salt and f"{name}-{salt}")
                assert (turn.submitted.transfer.expected_hit > 0) == ((name, salt) in earlier)
                assert bool(output.num_cached_tokens) == ((name, salt) in earlier)
                earlier.add((name, salt))


class TestTenants:
    def test_no_tenant_finds_what_another_has_computed(self, engine: Any) -> None:
        engine._core.driver.reset_prefix_cache()
        chunks = [frame(i) for i in range(5)]
        with engine.view("a") as a, engine.view("b") as b, engine.view("") as nobody:
            sides = [window_on(view, chunks) for view in (a, b, nobody)]
            first = [ask(window) for window in sides]
            assert [answer.usage.cached_tokens for answer in first] == [0, 0, 0]
            assert [answer.usage.bytes_loaded for answer in first] == [0, 0, 0]
            assert a.plain_salt and b.plain_salt and a.plain_salt != b.plain_salt and not nobody.plain_salt
            # Plain requests of a tenant carry its salt, and only then they share its blocks; its pictures have names
            # of the tenant's, so those of text alone are compared.
            texts = [words(i) for i in range(5)]
            for view in (a, b, nobody):
                with window_on(view, texts) as window:
                    assert ask(window).usage.cached_tokens <= whole_blocks(window.chunks[0].offset)
                    prompt = plain_request(view, window)
                    whole = whole_blocks(len(prompt["prompt_token_ids"]) - 1)
                    salts = {view.plain_salt or None: whole, "somebody": 0}
                    for salt, expected in salts.items():
                        assert plain(view, {**prompt, "cache_salt": salt}).num_cached_tokens == expected
                    engine._core.driver.reset_prefix_cache()
            for window in sides:
                window.close()

    def test_tenants_share_no_block(self, engine: Any) -> None:
        """By the blocks themselves: those that stand behind each request of two tenants and of a plain user."""
        engine._core.driver.reset_prefix_cache()
        scheduler = engine._core.driver.llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.kv_cache_manager
        found: dict[str, set[Any]] = {"a": set(), "b": set(), "plain": set()}
        owner = ""
        finished = type(scheduler)._free_request

        def seen(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            (ids,) = manager.get_block_ids(request.request_id)
            hashes = {manager.block_pool.blocks[i].block_hash for i in ids}
            found[owner] |= {h for h in hashes if h is not None}
            return finished(self, request, *args, **kwargs)

        chunks = [frame(i) for i in range(5)]
        with mock.patch.object(type(scheduler), "_free_request", seen), engine.view("a") as a, engine.view("b") as b:
            for name, view in (("a", a), ("b", b)):
                owner = name
                with window_on(view, chunks, "patched") as window:
                    ask(window)
                    window.slide(1)
                    ask(window)
            owner = "plain"
            with window_on(a, chunks) as window:
                plain(engine, plain_request(a, window))
        assert all(len(names) > 3 for names in found.values())
        assert not found["a"] & found["b"] and not (found["a"] | found["b"]) & found["plain"]
