"""Prometheus metrics of the server, in the registry that vLLM's ``/metrics`` shows.

Counters of prometheus_client, not a collector of our own, so that they also count where ``PROMETHEUS_MULTIPROC_DIR`` is
set. The ``tenant`` label is there only where tenants are configured.
"""

import threading
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ctxwin.audit.auditor import Counts as AuditCounts
from ctxwin.engines.base import Engine
from ctxwin.store.base import Store, StoreStats
from ctxwin.store.tiered import TieredStore
from ctxwin.window.events import Event

M = TypeVar("M", Counter, Gauge, Histogram)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one server.

    Args:
        by_tenant: label every metric with its tenant.
        registry: where they are registered; the default one is what vLLM exposes.
    """

    def __init__(self, *, by_tenant: bool = False, registry: CollectorRegistry = REGISTRY) -> None:
        self._by_tenant = by_tenant
        self._registry = registry
        self._made: list[Any] = []
        self._seen: dict[tuple[Any, ...], float] = {}
        self._media: Counts[str] = Counts()  # images and videos of answered prompts, by tenant
        self._lock = threading.Lock()
        counter = partial(self._make, Counter)
        # One process serves; figures of dead ones are dropped.
        gauge = partial(self._make, Gauge, multiprocess_mode="livemostrecent")
        histogram = partial(self._make, Histogram, buckets=_SECONDS)
        self.asks = counter("asks", "Questions answered by windows")
        self.edits = counter("window_operations", "Window operations that took effect", "op")
        self.lane_tokens = counter("prompt_tokens", "Tokens of headers and chunks in answered prompts, by lane", "lane")
        self.computed = counter("computed_tokens", "Prompt tokens that went through a forward, patch forming included")
        self.prefilled = counter(
            "prefilled_tokens",
            "Tokens computed ahead of asks and chats while the engine was idle: used by the answer, or missed",
            "result",
        )
        self.cached = counter("prefix_cached_tokens", "Prompt tokens that the engine's own prefix cache served")
        self.answered = counter("answer_tokens", "Tokens of answers")
        self.forwards = counter("forwards", "Prefill forwards of answered prompts")
        self.loads = counter("loads", "Answers for which stored KV was brought into the engine's cache")
        self.loaded = counter("loaded_bytes", "KV bytes brought into the engine's cache")
        self.misses = counter("misses", "Stored KV that was expected but gone, and was recomputed")
        self.fallbacks = counter("fallbacks", "Loads and reads of KV that failed inside the engine and were recomputed")
        self.encodes = counter("vision_encodes", "Runs of the vision tower for windows and uploads")
        self.encodes_saved = counter(
            "vision_encodes_saved", "Images and videos in answered prompts beyond the runs of the vision tower"
        )
        self.patches = counter("patches_formed", "Low-rank patches formed and stored")
        self.audits = counter("audits", "Answers that were held against a re-prefill in the background")
        self.audits_lost = counter("audits_lost", "Audited answers that lost the value every exact reference gives")
        self.audits_undecided = counter("audits_undecided", "Audited answers about whose value exact answers disagree")
        self.audit_texts = counter("audit_texts", "Audited answers without a value, which are held against the floor")
        self.audit_excess = counter("audit_excess_nats", "Nats a token beyond the floor, summed over these")
        self.audit_fallbacks = counter("audit_fallbacks", "Chunks that fell back to exact after an audit")
        self.audit_trials = counter("audit_trials", "Comparisons of strategies that are not promoted")
        self.audit_tokens = counter("audit_tokens", "Prompt tokens that audits ran through a forward")
        self.audit_seconds = counter("audit_seconds", "Seconds that audits took, while nobody waited")
        self.audits_stopped = counter("audits_stopped", "Audits that gave way to a request")
        self.audits_dropped = counter("audits_dropped", "Answers that were due to be audited and were not")
        self.promoted = gauge("strategy_promoted", "1 for the strategies that audits have promoted", "strategy")
        self.stopped = gauge(
            "strategy_stopped", "1 for the strategies whose trials stopped, as they would cost too much", "strategy"
        )
        self.patches_served = counter("patches_served", "Patches that an answer was served with, each counted once")
        self.patches_dropped = counter("patches_dropped", "Patches removed for their bytes that had never served")
        self.store_reads = counter("store_reads", "Reads of the store by tier, the fastest first", "tier", "result")
        self.store_evictions = counter("store_evictions", "Values a full store has dropped", "tier")
        self.store_corrupt = counter("store_corrupt", "Stored values that failed their checks", "tier")
        self.store_bytes = gauge("store_bytes", "Bytes held", "tier")
        self.store_items = gauge("store_items", "Values held", "tier")
        self.open = gauge("windows_open", "Open windows")
        self.window_records = counter("window_records", "Versions of windows: reopened here, or fenced_off", "result")
        self.waiting = gauge("requests_waiting", "Requests to windows and chunks that wait for their turn")
        self.chats = counter("chats", "Plain chats by what is behind: window, none, or a window that failed", "behind")
        self.alone = counter("chats_alone", "Plain chats with windows that vLLM computed alone, by reason", "reason")
        self.chat_records = counter(
            "chat_records",
            "Records of plain chats in the store: written, refused or failed there, taken_up by this server, fenced_off",
            "result",
        )
        self.rewrites = counter(
            "rewrites",
            "Plain chats with dropped parts still in their prompts (kept) or no longer (followed), or with volatile parts of "
            "the system prompt in front of the question (late)",
            "result",
        )
        self.rewrite_tokens = counter("rewrite_tokens", "Tokens of these parts in the prompts", "result")
        self.prefills = counter(
            "prefills",
            "Next prompts of plain chats: complete, interrupted by a request (to be continued), or refused",
            "result",
        )
        self.kept_pictures = counter("kept_pictures", "Dropped pictures that were still in a plain chat's prompt")
        self.live_frames = counter("live_frames", "Frames pushed to live streams: placed, dropped or failed", "result")
        self.memory = gauge("memory_bytes", "Memory of the server's processes")
        self.memory_limit = gauge("memory_limit_bytes", "Memory from which no new work is taken")
        self.memory_refused = counter("memory_refused", "Requests that were refused because memory was short")
        self.errors = counter("errors", "Requests to windows and chunks that were refused or failed", "code")
        self.ttft = histogram("ttft_seconds", "Seconds to the first token of an answer")
        self.seconds = histogram("answer_seconds", "Seconds to the last token of an answer")

    def close(self) -> None:
        """Unregister the metrics."""
        for metric in self._made:
            self._registry.unregister(metric)
        self._made.clear()

    def with_labels(self, metric: Any, tenant: str, *values: str) -> Any:
        """Return ``metric`` for one tenant and these values of its labels."""
        labels = (*((tenant,) if self._by_tenant else ()), *values)
        return metric.labels(*labels) if labels else metric

    def count(self, metric: Counter, tenant: str, *values: str, by: float = 1) -> None:
        """Count ``by`` more of ``metric`` for one tenant and these values of its labels."""
        self.with_labels(metric, tenant, *values).inc(by)

    def observe(self, tenant: str, event: Event) -> None:
        """Count one operation of a window; an observer of windows."""
        self.count(self.edits, tenant, event.op)
        if event.op == "audit":
            self.count(self.audit_fallbacks, tenant, by=len(event.ids))
        if event.op != "ask" or event.answer is None:
            return
        usage = event.answer.usage
        self.count(self.asks, tenant)
        for lane, tokens in usage.reused_tokens.items():
            self.count(self.lane_tokens, tenant, lane, by=tokens)
        with self._lock:
            self._media[tenant] += sum(len(p.chunk.media) for p in event.state.placed)
        counted = {
            self.computed: usage.computed_tokens,
            self.cached: usage.cached_tokens,
            self.answered: usage.answer_tokens,
            self.forwards: usage.forwards,
            self.loads: usage.bytes_loaded > 0,
            self.loaded: usage.bytes_loaded,
            self.misses: usage.misses,
            self.fallbacks: usage.fallbacks,
        }
        for metric, value in counted.items():
            self.count(metric, tenant, by=value)
        self.count(self.prefilled, tenant, "used", by=usage.prefilled_tokens)
        self.count(self.prefilled, tenant, "missed", by=usage.missed_tokens)
        self.with_labels(self.ttft, tenant).observe(usage.ttft_s)
        self.with_labels(self.seconds, tenant).observe(usage.total_s)

    def chat(self, tenant: str, usage: Mapping[str, Any]) -> None:
        """Count a plain chat that was served with a window; ``usage`` is that of its answer."""
        self.count(self.chats, tenant, "window")
        for lane, tokens in usage["lanes"].items():
            self.count(self.lane_tokens, tenant, lane, by=tokens)
        self.count(self.computed, tenant, by=usage["computed_tokens"])

    def chat_left_alone(self, tenant: str, why: str, *, failed: bool) -> None:
        """Count a plain chat that was served without its window, and the reason ``why``."""
        self.count(self.alone, tenant, why.partition(", got")[0])
        self.count(self.chats, tenant, "failed" if failed else "none")

    def count_rewrite(self, tenant: str, result: str, tokens: int, pictures: int = 0) -> None:
        """Count a plain chat whose prompt is not what was sent; ``pictures`` were kept."""
        self.count(self.rewrites, tenant, result)
        self.count(self.rewrite_tokens, tenant, result, by=tokens)
        self.count(self.kept_pictures, tenant, by=pictures)

    def read(self, tenant: str, engine: Engine, windows: int, waiting: int, records: Mapping[str, int]) -> None:
        """Update metrics from counters kept elsewhere; called before the metrics are shown."""
        repo, encodes = engine.repo, engine.counters.vision_encodes
        with self._lock:
            self._rise(self.patches, repo.counters.patches, tenant)
            self._rise(self.patches_served, repo.counters.patches_served, tenant)
            self._rise(self.patches_dropped, repo.counters.patches_dropped, tenant)
            self._rise(self.encodes, encodes, tenant)
            self._rise(self.encodes_saved, max(0, self._media[tenant] - encodes), tenant)
            self.with_labels(self.open, tenant).set(windows)
            self.with_labels(self.waiting, tenant).set(waiting)
            for result, total in records.items():
                self._rise(self.window_records, total, tenant, result)
            for tier, stats in _tiers(repo.store):
                self._rise(self.store_reads, stats.hits, tenant, tier, "hit")
                self._rise(self.store_reads, stats.misses, tenant, tier, "miss")
                self._rise(self.store_evictions, stats.evictions, tenant, tier)
                self._rise(self.store_corrupt, stats.corrupt, tenant, tier)
                self.with_labels(self.store_bytes, tenant, tier).set(stats.bytes)
                self.with_labels(self.store_items, tenant, tier).set(stats.items)

    def read_memory(self, used: int, limit: int, refused: int) -> None:
        """Update the metrics of the server's memory."""
        self.with_labels(self.memory, "").set(used)
        self.with_labels(self.memory_limit, "").set(limit)
        with self._lock:
            self._rise(self.memory_refused, refused, "")

    def read_audits(self, tenant: str, counts: AuditCounts, standing: Mapping[str, tuple[bool, bool]]) -> None:
        """Update the metrics of audits; ``standing``: for each strategy whether it is promoted, and whether stopped."""
        totals = {
            self.audits: counts.audits,
            self.audits_lost: counts.lost,
            self.audits_undecided: counts.undecided,
            self.audit_texts: counts.texts,
            self.audit_excess: counts.excess,
            self.audit_trials: counts.trials,
            self.audit_tokens: counts.tokens,
            self.audit_seconds: counts.seconds,
            self.audits_stopped: counts.stopped,
            self.audits_dropped: counts.dropped + counts.gone,
        }
        with self._lock:
            for metric, total in totals.items():
                self._rise(metric, total, tenant)
            for strategy, (is_promoted, is_stopped) in standing.items():
                self.with_labels(self.promoted, tenant, strategy).set(is_promoted)
                self.with_labels(self.stopped, tenant, strategy).set(is_stopped)

    def _rise(self, metric: Any, total: float, tenant: str, *values: str) -> None:
        key = (id(metric), tenant, *values)
        self.count(metric, tenant, *values, by=max(0.0, total - self._seen.get(key, 0.0)))
        self._seen[key] = max(total, self._seen.get(key, 0.0))

    def _make(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
        names = (*(("tenant",) if self._by_tenant else ()), *labels)
        metric = kind(f"ctxwin_{name}", text, names, registry=self._registry, **options)
        self._made.append(metric)
        return metric


def _tiers(store: Store) -> Iterator[tuple[str, StoreStats]]:
    tiers = store.tiers if isinstance(store, TieredStore) else (store,)
    for depth, tier in enumerate(tiers):
        yield f"{depth}-{type(tier).__name__.removesuffix('Store').lower()}", tier.stats()
