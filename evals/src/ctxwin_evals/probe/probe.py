"""The probe: stages in order, each within its share of the time, and what they found as one JSON-able object."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np

from ctxwin import __version__
from ctxwin.engines.base import Engine
from ctxwin.fidelity import Fidelity
from ctxwin.kv.patch import Layers, Layout
from ctxwin.profiles import Profile, model_digest
from ctxwin_evals.arms import BASES, Arm, parse_arm
from ctxwin_evals.arms.base import Served
from ctxwin_evals.decoder import Decoder, Reader
from ctxwin_evals.group import Group
from ctxwin_evals.items import Item, grouped
from ctxwin_evals.measure import BATCH, Measurer, by_shape
from ctxwin_evals.patching import Patcher, fitted, parse_variant
from ctxwin_evals.probe import structure, verdict
from ctxwin_evals.probe.contexts import PLACED, Kind, Source
from ctxwin_evals.probe.cost import SIZES, costs
from ctxwin_evals.probe.depth import DEPTHS, shortest_ranges
from ctxwin_evals.probe.reading import Competence, competence, readings
from ctxwin_evals.probe.verdict import Judgement, Limits, Setting, Summary, summary
from ctxwin_evals.run import model_name
from ctxwin_evals.samples import Sample
from ctxwin_evals.serving import ServedMeasurer
from ctxwin_evals.stats import effective_count

Asked = TypeVar("Asked", Item, Sample)
FORMAT = 2
RANKS = (1, 2, 4, 8, 16, 32, 64)
LADDER = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64)
"""Ranks that may end up in a profile."""
SERVED = ("joint", "quantized")
"""The layouts that windows serve, each of all layers, of `DEPTHS`, and of those that are searched; a profile names the last."""
OTHERS = ("per_layer", "per_layer+deep", "balanced", "output", "shared", "shared+deep")
"""Ways to compress that are compared with them, as `ctxwin_evals.patching.parse_variant` reads them."""
TURNED = (0, 1, PLACED - 1)
"""How many of the preceding chunks are replaced between an eviction and the recall."""
_PROVED = 0.85
"""Share of the time by which a setting must be proved."""
_TOKENS = 8192
"""Most context tokens that share a forward."""
BLIND, SURVIVOR, STEPWISE, ORACLE = (parse_arm(name) for name in ("blind", "survivor", "stepwise", "oracle"))


@dataclass(frozen=True)
class Swapped(Arm, form="swapped", source="exact forward", settings=("window",)):
    """A re-prefill in which a stranger of the same size stands at one place: shows which answers depend on that chunk."""

    place: int

    def serve(self, group: Group) -> list[Served | None]:
        orders = []
        for item in group.items:
            stranger = len(item.placed) + self.place
            orders.append([stranger if i == self.place else frame for i, frame in enumerate(item.placed)])
        return [Served(row) for row in group.prefilled(orders)]


class Lately(
    Arm, form="lately", source="exact forward; Kamera, section 5, 'Sliding-window survival'", settings=("slide",)
):
    """A re-prefill of all that the survivors of a slide may know: what the window has shown lately."""

    def serve(self, group: Group) -> list[Served | None]:
        orders = [item.before[-2 * len(item.placed) :] for item in group.items]
        begin = group.layout([*orders[0], orders[0][0]])[-1].start
        return [Served(row, begin=begin) for row in group.prefilled(orders)]


@dataclass(frozen=True)
class Sizes:
    """How much is measured, time permitting.

    Attributes:
        reading: contexts that show whether the model reads its context.
        looks: numbers of contexts after which a loss may be called one; only the last may show that there is none.
        choosing, proving: contexts on which ways to compress are compared, and fresh ones for the chosen settings.
        fitting: contexts that a shared basis is fitted on.
        survivors: windows that slide once, which decide whether survivors may be kept.
        streams, slides: windows that slide further, and how far.
        moving: contexts for orders and recalls.
        layouts: whether all ways to compress are compared, or only those that windows serve.
        chunks: sizes of chunks that are timed, in tokens.
    """

    reading: int = 48
    looks: tuple[int, ...] = (64, 160, 400)
    choosing: int = 24
    proving: int = 240
    fitting: int = 16
    survivors: int = 80
    streams: int = 16
    slides: int = 8
    moving: int = 24
    layouts: bool = True
    chunks: tuple[int, ...] = SIZES


class Probe:
    """One probe of one model.

    Args:
        engine: the model. A transformers engine is read inside, in batches; any other is asked by the engine contract alone,
            without the mask oracle and ways to compress that need the model's weights.
        sources: of contexts; the first one whose questions the model answers from its context is used.
        limits: what counts as safe.
        sizes: how much is measured.
        seconds: time after which stages are cut short; each makes at least one batch.
        progress: called with the stage, the amount done and the total.
    """

    def __init__(
        self,
        engine: Engine,
        sources: Sequence[Source],
        limits: Limits | None = None,
        sizes: Sizes | None = None,
        seconds: float = 240.0,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        if not sources:
            raise ValueError("a probe needs at least one source of contexts, got none")
        if seconds <= 0:
            raise ValueError(f"seconds must be > 0, got {seconds}")
        self.engine, self.sources = engine, tuple(sources)
        self.limits, self.sizes = limits or Limits(), sizes or Sizes()
        self.seconds, self.progress = seconds, progress
        self._inside = hasattr(engine, "text_model")
        self.decoder: Any = Decoder(engine) if self._inside else Reader(engine)  # type: ignore[arg-type]
        self.served: Setting | None = None
        self._begun = time.monotonic()
        self._use(self.sources[0])

    def run(self) -> dict[str, Any]:
        """Run all stages. For one source, and with enough time, the outcome depends on the sizes alone."""
        reading: dict[str, list[Competence]] = {}
        for number, source in enumerate(self.sources, 1):
            self._use(source)
            competences = reading[source.kind] = self._read(0.1 * number)
            if any(c.kind != "one" and c.reads for c in competences):
                break
        result = self._about() | {"reading": {name: [asdict(c) for c in rows] for name, rows in reading.items()}}
        effect, judgement = self._effect(competences)
        arms = {name: self._by_kind(of_arm(effect, name)) for name in ("stepwise", "oracle", "blind")}
        measured = {name: kinds for name, kinds in arms.items() if kinds}
        result["arms"] = {k: {name: kinds[k] for name, kinds in measured.items()} for k in arms["blind"]}
        items = self.source.items(min(8, self.sizes.choosing))
        groups = (self.measurer.group(batch) for batch in self._batches("what the loss looks like", items, 0.5))
        result["deficit"] = structure.shape(groups, self.decoder.spec)
        if judgement.evidence is not None:
            ranges = self._ranges(judgement.evidence) if judgement.finding == "binds" else []
            result |= self._compression(judgement.evidence, ranges)
            if judgement.finding == "binds":
                reads = [c.kind for c in competences if c.reads]
                result["proving"] = self._prove(judgement.evidence, reads, result["curve"])
            result |= {"survivors": self._survivors()} | self._moves()
        result["cost"] = costs(self.engine, self.source.system_prompt, *self._setting, self._chunk_sizes())
        blind = result["arms"].get(judgement.evidence or "cross", {}).get("blind")
        survivors = result.get("survivors", [])
        result["fidelity"] = self._fidelity(judgement, survivors)
        reasons = list(judgement.reasons)
        if "survivors" in result["fidelity"]:
            reasons.append(verdict.survivors_sentence(survivors, result["fidelity"]["survivors"]))
        sentence = verdict.sentence(judgement, self.served, blind)
        result["verdict"] = {"finding": judgement.finding, "evidence": judgement.evidence, "sentence": sentence}
        result["verdict"] |= {"reasons": reasons, "limits": asdict(self.limits)}
        result["served"] = self.served and {k: getattr(self.served, k) for k in ("rank", "layers", "layout", "share")}
        result["seconds"] = round(time.monotonic() - self._begun, 1)
        return result

    @property
    def _setting(self) -> tuple[int, Layers, Layout]:
        """Rank, layers and layout of the patches that moves and costs are measured with."""
        return (self.served.rank, self.served.layers, self.served.layout) if self.served else (16, "all", "quantized")

    def _use(self, source: Source) -> None:
        self.source = source

        def groups() -> Iterator[Group]:
            items = source.items(self.sizes.fitting, "fitting")
            for batch in by_shape(items, self._size(items)):
                yield plain.group(batch)

        plain = self._measurer(Patcher(self.decoder.spec))
        self.measurer = self._measurer(fitted(self.decoder, ("joint", "all", "none"), groups))

    def _measurer(self, patcher: Patcher) -> Measurer:
        measurer_class = Measurer if self._inside else ServedMeasurer
        return measurer_class(self.decoder, patcher, self.source.system_prompt, along=True)

    def _size(self, items: Sequence[Item]) -> int:
        """How many contexts share a forward: no more than memory allows."""
        return max(1, min(BATCH, _TOKENS // self.measurer.group(items[:1]).context_tokens)) if items else 1

    def _batches(self, stage: str, items: Sequence[Item], until: float) -> Iterator[list[Item]]:
        """Items that share forwards, in order; ends when a share of the time is used up, after one batch at least."""
        size, rows, done = self._size(items), list(grouped(items, lambda item: item.context).values()), 0
        self.progress(stage, 0, len(rows))  # its first batch may take minutes
        for at in range(0, len(rows), BATCH):
            for batch in by_shape([item for row in rows[at : at + BATCH] for item in row], size):
                yield batch
                done += len({item.context for item in batch})
                if self._late(stage, done, len(rows), until):
                    return

    def _chunk_sizes(self) -> Iterator[int]:
        """Yield the chunk sizes whose costs are measured, while there is time, after one at least."""
        stage, sizes = "what computing and loading cost", self.sizes.chunks
        self.progress(stage, 0, len(sizes))
        for done, size in enumerate(sizes, 1):
            yield size
            if self._late(stage, done, len(sizes), until=1.0):
                return

    def _late(self, stage: str, done: int, total: int, until: float) -> bool:
        """Report progress; return True if the share of the time is used up."""
        self.progress(stage, done, total)
        return time.monotonic() - self._begun > until * self.seconds

    def _samples(
        self, stage: str, items: Sequence[Item], arms: Sequence[Arm], until: float, **options: Arm | None
    ) -> list[Sample]:
        """Return samples of arms; ``base`` and ``control`` are those of `Measurer.samples`."""
        samples: list[Sample] = []
        for batch in self._batches(stage, items, until):
            samples += self.measurer.samples(batch, arms, **options)  # type: ignore[arg-type]
        for sample in samples:
            if sample.unscored is not None:  # its empty answer would pass for the re-prefill's
                raise ValueError(f"a model must answer what it is probed with, got {sample.arm}: {sample.unscored}")
        return samples

    def _by_kind(self, samples: Sequence[Sample]) -> dict[Kind, Summary]:
        by_kind: dict[Kind, list[Sample]] = grouped(samples, lambda sample: sample.meta["kind"])
        return {kind: figures for kind, some in by_kind.items() if (figures := summary(some, self.source))}

    def _read(self, until: float) -> list[Competence]:
        """Test if answers depend on the chunks they are about. Cost: a re-prefill a placed chunk and one more."""
        items = self.source.items(self.sizes.reading, "reading", strangers=True)
        arms = [Swapped(f"swapped:{place}", place) for place in range(PLACED)]
        answers = readings(self._samples("does it read its context", items, arms, until), self.source)
        kinds: tuple[Kind, ...] = ("cross", "one", "yours")
        return [c for kind in kinds if (c := competence(answers, kind)) is not None]

    def _effect(self, competences: Sequence[Competence]) -> tuple[list[Sample], Judgement]:
        """Blind reuse, the mask oracle and the noise floor, in growing numbers until there is a verdict."""
        samples: list[Sample] = []
        stage, control = "what blind reuse changes", ORACLE if self._inside else None
        arms = [STEPWISE, BLIND] if control is None else [STEPWISE, control, BLIND]
        # Where the model does not read, what blind reuse changes decides nothing; a few figures are enough.
        looks = self.sizes.looks if any(c.kind != "one" and c.reads for c in competences) else self.sizes.looks[:1]
        items = self.source.items(looks[-1], "moving")
        each, at = len(items) // looks[-1], 0
        for look in looks:
            samples += self._samples(stage, items[at * each : look * each], arms, 0.45, control=control)
            at, blind = look, of_arm(samples, "blind")
            over = len(blind) < look * each or look == looks[-1]
            noise = self._by_kind(of_arm(samples, "stepwise"))
            judgement = verdict.judge(competences, self._by_kind(blind), noise, self.limits, last=over)
            if over or judgement.finding == "binds":
                break
        return samples, judgement

    def _ranges(self, evidence: Kind) -> list[str]:
        """Return `depth.shortest_ranges` by answers on the choosing split, under uncompressed deficits of these layers."""
        items = _of_kind(self.source.items(self.sizes.choosing), (evidence,))

        def enough(ranges: Sequence[str]) -> list[bool]:
            arms = [parse_arm(spelling("full", name)) for name in ranges]
            samples = self._samples("which layers patches need", items, [BLIND, *arms], 0.55, base=BLIND)
            figures = [summary(of_arm(samples, arm.name), self.source) for arm in arms]
            return [row is not None and verdict.enough(row, self.limits) for row in figures]

        return shortest_ranges(self.decoder.spec.layers, enough)

    def _compression(self, evidence: Kind, ranges: Sequence[str] = ()) -> dict[str, Any]:
        """Every way to compress at every rank on the choosing split: bytes at equal fidelity, and the functional rank."""
        depths = dict.fromkeys((*DEPTHS, *ranges))
        served = [way for layout in SERVED for way in (layout, *(f"{layout}+{depth}" for depth in depths))]
        ways = served + [way for way in OTHERS if self.sizes.layouts and self._allows(way)]
        arms = {(way, rank): parse_arm(spelling(rank, way)) for way in ways for rank in RANKS}
        self.measurer.patcher.floor = RANKS[-1]
        items = _of_kind(self.source.items(self.sizes.choosing), (evidence,))
        samples = self._samples("ways to compress", items, [BLIND, *arms.values()], 0.65, base=BLIND)
        curve = []
        for (way, rank), arm in arms.items():
            figures = summary(of_arm(samples, arm.name), self.source)
            assert figures is not None
            keep = {k: figures[k] for k in ("n", "flips", "flips_ci95", "kl", "eta", "eta_ci95", "share")}
            basis = self.measurer.patcher.variant(way).basis_bytes(rank)
            curve.append({"way": way, "rank": rank, **keep, "basis_bytes": basis})
        ranks = {}
        blind = of_arm(samples, "blind")
        for way in ("joint", "per_layer"):
            if way in ways:
                kls = [[s.answer_kl for s in of_arm(samples, spelling(rank, way))] for rank in RANKS]
                ranks[way] = structure.functional_rank(
                    RANKS, np.array(kls), np.array([s.answer_kl for s in blind]), [s.cluster for s in blind]
                )
        return {"curve": curve, "cheapest": verdict.cheapest(curve, self.limits), "functional_rank": ranks}

    def _allows(self, way: str) -> bool:
        """True if model and contexts allow a way: an output weight needs the model and per-head values, a basis contexts."""
        if "output" in way and (self.decoder.spec.family == "mla" or not self._inside):
            return False
        return self.source.fits or not way.startswith("shared")

    def _prove(self, evidence: Kind, reads: Sequence[Kind], curve: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The ways that windows serve and `verdict.candidates` names, each on contexts of its own, until one is safe."""
        settings: list[Setting] = []
        for number, way in enumerate(verdict.candidates(curve, self.limits, ("quantized", LADDER[-1]))):
            some = self._try(evidence, reads, *way, number * self.sizes.proving)
            self.served = verdict.with_margin(verdict.smallest_safe(some), some)
            settings += some
            if self.served is not None or time.monotonic() - self._begun > _PROVED * self.seconds:
                break
        return [asdict(s) for s in settings]

    def _try(self, evidence: Kind, reads: Sequence[Kind], way: str, rank: int, first: int) -> list[Setting]:
        """One way on fresh contexts, the ``first`` on, at ranks from the one that was enough upwards.

        Answers to questions of kinds that the model does not read (others than ``reads``) decide nothing: any rounding changes
        them.
        """
        layout, layers, _ = parse_variant(way) or ("joint", "all", "none")
        at = next((i for i, r in enumerate(LADDER) if r >= rank), len(LADDER) - 1)
        # What was enough on a few contexts may not be on more of them: then a larger one is shown safe.
        rungs = LADDER[max(0, at - 1) :]
        arms = [parse_arm(spelling(r, way)) for r in rungs]
        self.measurer.patcher.floor = rungs[-1]
        items = self.source.items(self.sizes.proving, "proving", first=first)
        samples = self._samples("a setting on fresh contexts", items, [STEPWISE, BLIND, *arms], _PROVED, base=BLIND)
        noise = self._by_kind(of_arm(samples, "stepwise"))[evidence]["flips"]
        # How alike the answers of a cluster are is not seen where none changes: it is taken from where some do.
        counted = [of_arm(_of_kind(samples, [evidence]), arm.name) for arm in [BLIND, *arms]]
        changed = [([float(s.answer != s.reference) for s in some], [s.cluster for s in some]) for some in counted]
        effective = min(filter(None, (effective_count(*one) for one in changed)), default=None)
        settings = []
        for arm, r in zip(arms, rungs, strict=True):
            some = of_arm(samples, arm.name)
            of_evidence, every = (
                summary(_of_kind(some, kinds), self.source, effective) for kinds in ([evidence], [evidence, *reads])
            )
            assert of_evidence is not None and every is not None
            settings.append(verdict.proven(r, layers, layout, of_evidence, every, noise, self.limits))
        return settings

    def _survivors(self) -> list[dict[str, Any]]:
        """Windows slide one chunk at a time: what stays is only rotated, and the new chunk is computed after it.

        Survivors are also measured with removal patches of the setting that was found safe.
        """
        rank, layers, layout = self._setting
        removal, patched = parse_arm(f"removal:{rank}"), dict[int, list[Sample]]()
        measurer = self._measurer(Patcher(self.decoder.spec, layout, layers, floor=rank))
        once = [self.source.stream(i, 1) for i in range(self.sizes.survivors)]
        further = [self.source.stream(i, self.sizes.slides) for i in range(self.sizes.streams)]
        pairs: dict[int, list[tuple[Sample, Sample]]] = {}
        for slides in range(1, self.sizes.slides + 1):
            items = self.source.slid(once if slides == 1 else further, slides)
            stage, until = f"survivors after {slides} slide{'s' * (slides > 1)}", 0.9 if slides == 1 else 0.95
            for batch in self._batches(stage, items, until):
                group = measurer.group(batch)
                window = list(measurer.samples(batch, [SURVIVOR, removal], base=SURVIVOR, group=group))
                stream = measurer.samples(batch, [SURVIVOR], reference=Lately("lately"), group=group)
                pairs.setdefault(slides, []).extend(zip(of_arm(window, SURVIVOR.name), stream, strict=True))
                patched.setdefault(slides, []).extend(of_arm(window, removal.name))
        return [row | {"removal": summary(patched[row["slides"]], self.source)} for row in verdict.survival(pairs)]

    def _moves(self) -> dict[str, Any]:
        """Orders and recalls of the last chunk, at the setting that was found safe (Kamera, section 5, appendices B, D)."""
        rank, layers, layout = self._setting
        measurer = self._measurer(Patcher(self.decoder.spec, layout, layers, floor=rank))

        def measure(items: Sequence[Item], names: Sequence[str], base: Arm, stage: str) -> dict[str, list[Sample]]:
            arms = [parse_arm(f"{name}:{rank}") for name in names]
            batches = self._batches(stage, items, 1.0)
            scored = [s for batch in batches for s in measurer.samples(batch, arms, base=base) if s.unscored is None]
            return {name: of_arm(scored, arm.name) for name, arm in zip(names, arms, strict=True)}

        kinds: tuple[Kind, ...] = ("cross", "yours")
        items = _of_kind(self.source.items(self.sizes.moving), kinds)
        about = [item for item in items if not item.meta["needs"] or PLACED - 1 in item.meta["needs"]]
        orders = measure(about, ("patched", "transfer", "orbit"), BLIND, "orders")
        moved = [s.extra["moved"] for s in orders["orbit"]]
        recalls = []
        back = _of_kind(self.source.items(self.sizes.moving, strangers=True), kinds)
        for turned in TURNED:
            returned = [recalled(item, turned) for item in back]
            by_name = measure(returned, ("stale", "update"), BASES["recall"], "recalls")
            stale, fresh = (summary(samples, self.source) for samples in by_name.values())
            recalls.append({"replaced": turned / (PLACED - 1), "stale": stale, "fresh": fresh})
        exact, transfer, orbit = (summary(samples, self.source) for samples in orders.values())
        reorder = {"rank": rank, "exact": exact, "transfer": transfer, "orbit": orbit}
        return {"reorder": reorder | {"moved": sum(moved) / len(moved) if moved else None}, "recall": recalls}

    def _fidelity(self, judgement: Judgement, survivors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the fidelity that `auto` shall use with this model: `exact` unless another was shown to be safe."""
        if judgement.finding == "chains":
            return {"mode": "blind"}
        if judgement.finding != "binds" or self.served is None:
            return {"mode": "exact"}
        # Shares in whole percents upwards, so that the rank that was proven is not lost to rounding.
        share = min(1.0, float(np.ceil(round(100 * self.served.share, 6)) / 100))
        patches = {"bytes_share": share, "layers": self.served.layers, "advanced": {"layout": self.served.layout}}
        return {"mode": "patched", "survivors": verdict.survivor_mode(survivors, self.limits), **patches}

    def _about(self) -> dict[str, Any]:
        source = self.source
        group = self.measurer.group(source.items(1)[:1])
        return about(self.engine) | {
            "source": {name: getattr(source, name) for name in ("about", "system_prompt", "max_tokens")}
            | {"name": source.kind, "notes": list(source.notes)}
            | {"chunks": len(group.places), "chunk_tokens": [p.tokens for p in group.places]},
            "sizes": asdict(self.sizes),
        }


def about(engine: Engine) -> dict[str, Any]:
    """Return the model and the machine of a probe."""
    spec = engine.spec
    return {"format": FORMAT, "ctxwin": __version__, "model": model_name(spec.model)} | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": {name: getattr(spec.kv, name) for name in ("family", "layers", "dtype")}
        | {"name": spec.name, "machine": platform.processor() or platform.machine()},
    }


def as_profile(result: Mapping[str, Any], model: str) -> Profile:
    """The profile that windows follow, with the figures that the verdict rests on.

    Args:
        result: of `Probe.run`.
        model: folder or Hub name of the model.
    """
    verdict = result["verdict"]
    arms = result.get("arms", {}).get(verdict["evidence"], {})
    keep = ("n", "clusters", "flips", "flips_ci95", "kl", "kl_ci95", "right")
    blind, noise = ({k: arms[name][k] for k in keep} if name in arms else None for name in ("blind", "stepwise"))
    survivors = result.get("survivors", [])
    names = ("source", "engine", "served", "strategies", "floor", "owed", "trials")
    measured = {name: result[name] for name in names if name in result}
    measured |= {"limits": verdict["limits"], "reasons": verdict["reasons"], "blind": blind, "noise": noise}
    figures = ("rank", "layers", "layout", "share", "safe")
    measured |= {
        "settings": [{k: s[k] for k in figures} for s in result.get("proving", [])],
        "functional_rank": result.get("functional_rank", {}),
        "survivors_by_slides": {str(s["slides"]): s[f"other_than_{s['stricter']}"] for s in survivors},
    }
    return Profile(
        weights=model_digest(model),
        verdict=verdict["sentence"],
        finding=verdict["finding"],
        fidelity=Fidelity.model_validate(result["fidelity"]),
        measured=measured,
        n=blind["n"] if blind else max((row["units"] for row in result.get("strategies", [])), default=0),
        **{name: result[name] for name in ("model", "date", "ctxwin")},
    )


def recalled(item: Item, turned: int) -> Item:
    """The item whose last chunk was evicted, and returns after ``turned`` preceding chunks were replaced by strangers."""
    last = len(item.placed) - 1
    front = tuple(last + 1 + i if i < turned else i for i in range(last))
    return replace(item, before=item.placed, placed=(*front, last), asked=last)


def spelling(rank: int | str, way: str) -> str:
    """The arm of a rank and a way to compress."""
    return f"patched:{rank}@{way}"


def of_arm(samples: Sequence[Sample], name: str) -> list[Sample]:
    """Samples of one arm."""
    return [sample for sample in samples if sample.arm == name]


def _of_kind(samples: Sequence[Asked], kinds: Sequence[Kind]) -> list[Asked]:
    return [one for one in samples if one.meta["kind"] in kinds]
