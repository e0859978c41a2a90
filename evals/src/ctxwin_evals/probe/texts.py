"""Text judged as audits judge it (`ctxwin.audit.passages`): files of a folder, or Python's reference, in passages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ctxwin.audit import Options
from ctxwin.audit.passages import NEXT, PLACED, Passage, PassageReplays, judge
from ctxwin.chunk import Chunk
from ctxwin_evals.probe.contexts import seed_of
from ctxwin_evals.probe.folder import TEXTS, files_of, spread
from ctxwin_evals.probe.probe import about

if TYPE_CHECKING:
    from ctxwin.engines.encoding.encoder import EncodingEngine
    from ctxwin_evals.console import OnProgress

BLOCK, CHARACTERS, SYSTEM_PROMPT = 64, 200_000, "You read a manual."
"""Tokens of a chunk, most characters that are read of a file, and the system prompt."""
_PYTHON = "texts that every machine has, and that a model may know by heart: yours say more"


def probe_texts(
    engine: EncodingEngine, folder: Path | None, questions: list[str], max_tokens: int, options: Options,
    seconds: float, progress: OnProgress = lambda *_: None,
) -> dict[str, Any]:  # fmt: skip
    """Return the verdict on an engine's text, and what it rests on; as `Probe.run`."""
    begun, (passages, notes) = time.monotonic(), read_passages(engine, folder, questions)
    replays = PassageReplays(engine, passages, SYSTEM_PROMPT, max_tokens)
    result = judge(replays.measure, len(passages), options, seconds, progress).describe()
    name = "Python's reference" if folder is None else f"texts of folder {folder.name}"
    source = {"about": f"{name}, in blocks of {BLOCK} tokens", "name": "texts", "notes": notes, "chunks": PLACED}
    source |= {"system_prompt": SYSTEM_PROMPT, "max_tokens": max_tokens, "chunk_tokens": [BLOCK] * PLACED}
    return about(engine) | result | {"source": source, "seconds": round(time.monotonic() - begun, 1)}


def read_passages(
    engine: EncodingEngine, folder: Path | None, questions: list[str], block: int = BLOCK
) -> tuple[list[Passage], list[str]]:
    """Read files of a folder, by default Python's reference, as passages, with what a reader must know of them."""
    if folder is None:
        from pydoc_data.topics import topics

        texts, notes = [topics[name] for name in sorted(topics)], [_PYTHON]
    else:
        (paths, notes), texts = spread(files_of(folder, TEXTS, "text files")), []
        for path in paths:
            with path.open(encoding="utf-8", errors="replace") as file:
                texts.append(file.read(CHARACTERS))
        notes.append(f"at most the first {CHARACTERS:,} characters of a file")
    ids = [token for text in texts for token in engine.encoder.tokens.document(text)]
    end, size, passages = (PLACED + 1) * block, (PLACED + 1) * block + 1 + NEXT, list[Passage]()
    for number, row in enumerate(np.random.default_rng(seed_of("texts")).permutation(len(ids) // size)):
        part = ids[row * size : (row + 1) * size]
        chunks = tuple(Chunk.tokens(part[at : at + block]) for at in range(0, end, block))
        passages.append(Passage(chunks, tuple(part[end:]), questions[number % len(questions)] if questions else ""))
    return passages, notes
