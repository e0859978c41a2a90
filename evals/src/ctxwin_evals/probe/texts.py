"""Text judged as audits judge it (`ctxwin_evals.probe.passages`): files of a folder, or Python's reference, in passages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from ctxwin.audit import Options
from ctxwin.chunk import Chunk
from ctxwin.hashing import digest
from ctxwin_evals.probe import FOLDER
from ctxwin_evals.probe.contexts import seed_of
from ctxwin_evals.probe.folder import TEXTS, files_of, readable, spread
from ctxwin_evals.probe.passages import NEXT, PLACED, Passage, PassageReplays, Unit, judge
from ctxwin_evals.probe.probe import about
from ctxwin_evals.samples import FORMAT, Sample, open_samples

if TYPE_CHECKING:
    from ctxwin.engines.encoding.encoder import EncodingEngine
    from ctxwin.progress import OnProgress

BLOCK, CHARACTERS, SYSTEM_PROMPT = 64, 200_000, "You read a manual."
"""Tokens of a chunk, most characters that are read of a file, and the system prompt."""
_TASK, _UNIT = "probe/texts", TypeAdapter(Unit)
_PYTHON = "texts that every machine has, and that a model may know by heart: yours say more"


def probe_texts(
    engine: EncodingEngine, folder: Path | None, questions: list[str], max_tokens: int, options: Options,
    seconds: float, progress: OnProgress = lambda *_: None, output: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the verdict on an engine's text, and what it rests on; as `Probe.run`.

    Each measurement is kept in ``output``, by default in a folder of these settings below `FOLDER`, and not repeated when the
    probe runs again. Raises ValueError for a folder of other settings, or one that another process writes.
    """
    passages, notes = read_passages(engine, folder, questions)
    cases = [digest([chunk.id for chunk in p.chunks], list(p.following), p.question) for p in passages]
    limits = {name: getattr(options, name) for name in ("budget", "excess_budget", "level")}
    config = {name: value for name, value in about(engine).items() if name != "date"}
    config |= {"format": FORMAT, "weights": engine.spec.identity, "limits": limits, "max_tokens": max_tokens}
    config |= {"passages": digest(cases)}
    replays = PassageReplays(engine, passages, SYSTEM_PROMPT, max_tokens)

    def measure(index: int, strategies: Sequence[str], exactness: bool) -> Unit:
        arm = ",".join(strategies)
        if not samples.has(_TASK, arm, index):
            begun = time.monotonic()
            meta = _UNIT.dump_python(replays.measure(index, strategies, exactness), mode="json")
            row: dict[str, Any] = {"extra": {"seconds": time.monotonic() - begun}, "question": passages[index].question}
            row |= {"task": _TASK, "arm": arm, "index": index, "meta": meta, "target": None, "case": cases[index]}
            row |= {"doc_id": str(index), "cluster": str(index), "frames": PLACED, "placed": PLACED * BLOCK}
            samples.add([Sample(tokens=PLACED * BLOCK + 1 + NEXT, **row)])
        return _UNIT.validate_python(samples.rows[_TASK, arm, index].meta)

    with open_samples(output or Path(FOLDER) / digest(config)[:12], config) as samples:
        result = judge(measure, len(passages), options, seconds, progress).describe()
        taken = sum(row.extra["seconds"] for row in samples.rows.values())
    name = "Python's reference" if folder is None else f"texts of folder {folder.name}"
    source = {"about": f"{name}, in blocks of {BLOCK} tokens", "name": "texts", "notes": notes, "chunks": PLACED}
    source |= {"system_prompt": SYSTEM_PROMPT, "max_tokens": max_tokens, "chunk_tokens": [BLOCK] * PLACED}
    return about(engine) | result | {"source": source, "seconds": round(taken, 1)}


def read_passages(
    engine: EncodingEngine, folder: Path | None, questions: list[str], block: int = BLOCK
) -> tuple[list[Passage], list[str]]:
    """Read files of a folder, by default Python's reference, as passages, with what a reader must know of them."""
    if folder is None:
        from pydoc_data.topics import topics

        texts, notes = [topics[name] for name in sorted(topics)], [_PYTHON]
    else:
        paths, notes = spread(files_of(folder, TEXTS, "text files"))
        texts = list(readable(paths, _read, notes).values())
        notes.append(f"at most the first {CHARACTERS:,} characters of a file")
    ids = [token for text in texts for token in engine.encoder.tokens.document(text)]
    end, size, passages = (PLACED + 1) * block, (PLACED + 1) * block + 1 + NEXT, list[Passage]()
    for number, row in enumerate(np.random.default_rng(seed_of("texts")).permutation(len(ids) // size)):
        part = ids[row * size : (row + 1) * size]
        chunks = tuple(Chunk.tokens(part[at : at + block]) for at in range(0, end, block))
        passages.append(Passage(chunks, tuple(part[end:]), questions[number % len(questions)] if questions else ""))
    return passages, notes


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.read(CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"a text file must be readable UTF-8, got {str(path)!r}: {error}; convert it") from error
