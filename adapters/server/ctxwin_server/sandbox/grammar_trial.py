"""Helper process that tries grammars for `ctxwin_server.sandbox.grammars`, each in a child with bounded processor time.

Run as ``python -m ctxwin_server.sandbox.grammar_trial BYTES SECONDS [VOCABULARY]``: memory and processor time of each trial, and
a file with the tokens of answers in xgrammar's serialisation. A request is one constraint as JSON
(``[kind, text]``); its answer is the processor time (``<d``), a verdict (``B``) and a text that explains it.
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from ctxwin_server.sandbox.helper import serve

ANSWER = struct.Struct("<dB")
FITS, INVALID, COSTLY = 0, 1, 2
_WALKS, _STEPS = 4, 64
"""Random answers that are tried under a constraint, and tokens of each. One answer may reach a dead end by chance, for want of a
token; under a constraint that nothing satisfies each of them does."""
_STEP_S = 0.01
"""Processor time of one token, on average: all answers of a batch wait for it."""
_LATE = {signal.SIGPROF, signal.SIGXCPU}


def main() -> None:
    """Answer requests from stdin."""
    import numpy as np
    import torch  # xgrammar's tables are torch tensors
    import xgrammar

    max_bytes, seconds = int(sys.argv[1]), float(sys.argv[2])
    tokens = (
        xgrammar.TokenizerInfo.deserialize_json(Path(sys.argv[3]).read_text(encoding="utf-8"))
        if len(sys.argv) > 3
        else xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"</s>"], stop_token_ids=[256])
    )
    blank = np.array([not token.strip() for token in tokens.decoded_vocab], bool)
    torch.set_num_threads(1)

    def answer(raw: bytes) -> bytes:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # ends this process: its signal has no handler
            try:
                verdict, why = _try(xgrammar, tokens, blank, *json.loads(raw))
                with contextlib.suppress(OSError):
                    os.write(writing, bytes([verdict]) + why[:500].encode("utf-8", "replace"))
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as source:
            output = source.read()
        _, status, used = os.wait4(child, 0)
        spent = used.ru_utime + used.ru_stime
        if os.WIFSIGNALED(status) or not output:
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _LATE
            why = f"took over {seconds:g} s of processor time" if late else f"needed more than {max_bytes >> 20} MiB"
            output = bytes([COSTLY]) + why.encode()
        return ANSWER.pack(spent, output[0]) + output[1:]

    serve(answer, max_bytes)


def _try(xgrammar: Any, tokens: Any, blank: Any, kind: str, text: str) -> tuple[int, str]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the stack trace of a crash
    try:
        compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
        matcher = xgrammar.GrammarMatcher(_compile(xgrammar, compiler, kind, text))
    except MemoryError:
        return COSTLY, "needed too much memory"
    except Exception as error:  # xgrammar raises anything on malformed input
        if "bad_alloc" in str(error):
            return COSTLY, "needed too much memory"
        # Strip the position in xgrammar's sources.
        return INVALID, re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)) or type(error).__name__
    return _walk(xgrammar, tokens, blank, matcher)


def _compile(xgrammar: Any, compiler: Any, kind: str, text: str) -> Any:
    """Compile a constraint as vLLM does."""
    if kind == "json":
        return compiler.compile_json_schema(text)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        lark = not any("::=" in re.sub(r"(#|//).*$", "", line) for line in text.split("\n"))
        return compiler.compile_lark(text) if lark else compiler.compile_grammar(text)
    tag = json.loads(text)
    if "structures" not in tag:
        return compiler.compile_structural_tag(text)
    items = [
        xgrammar.StructuralTagItem(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
        for one in tag["structures"]
    ]
    return compiler.compile_structural_tag(items, tag["triggers"])


def _walk(xgrammar: Any, tokens: Any, blank: Any, matcher: Any) -> tuple[int, str]:
    import numpy as np

    mask = xgrammar.allocate_token_bitmask(1, tokens.vocab_size)
    chance, spent, steps, dead = random.Random(0), 0.0, 0, 0
    for _ in range(_WALKS):
        for _ in range(_STEPS):
            began = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            spent += time.process_time() - began
            steps += 1
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: tokens.vocab_size].astype(bool)
            allowed = np.flatnonzero(bits & ~blank)  # space may stand between any two tokens of JSON
            allowed = allowed if len(allowed) else np.flatnonzero(bits)
            if not len(allowed):
                dead += 1
                break
            began = time.process_time()
            taking = matcher.accept_token(int(allowed[chance.randrange(len(allowed))])) and not matcher.is_terminated()
            spent += time.process_time() - began
            if not taking:
                break
        matcher.reset()
    if dead == _WALKS:
        return INVALID, "no answer fits it"
    if spent > steps * _STEP_S:
        return COSTLY, f"takes more than {_STEP_S:g} s of processor time for each token of an answer"
    return FITS, ""


if __name__ == "__main__":
    main()
