"""Text to token ids: many threads at once, and nothing that cannot fit is tokenised."""

import copy
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ctxwin.errors import BudgetExceeded

_SLACK = 4
"""How much shorter a normaliser may make a text."""
_BYTES_A_TOKEN = 16
"""Of a text with more bytes than this for each token that fits, the beginning is tried first."""


class Tokens:
    """A tokenizer as the encoder uses it; thread-safe.

    A tokenizer keeps a call's options in itself, so of two concurrent calls one may read special tokens where its text only
    spells them out. Here each mode has a copy of its own that nobody changes, and no call waits for another. Only a
    tokenizer without a Rust backend takes turns.

    Args:
        tokenizer: of transformers.
        max_tokens: what fits the engine; None for no bound.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._turn = threading.Lock()
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._copies: dict[bool, Any] = {}
        for special in (True, False) if backend is not None else ():
            tokenizer_copy: Any = copy.deepcopy(backend)
            self._copies[special] = tokenizer_copy
            tokenizer_copy.encode_special_tokens = not special
            tokenizer_copy.no_truncation()
            tokenizer_copy.no_padding()
        self._lines: dict[int, bool] = {}
        self._longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def content(self, text: str) -> list[int]:
        """Ids of content: special tokens spelled out in it stay text. Raises BudgetExceeded, see `check`."""
        return self._ids(text, special=False)

    def document(self, text: str) -> list[int]:
        """Ids of content that will be cut into chunks: of any length, so the caller must bound its size."""
        return self._encoded(text, special=False) if text else []

    def template(self, text: str) -> list[int]:
        """Ids of a piece of a template: special tokens count. Raises BudgetExceeded, see `check`."""
        return self._ids(text, special=True)

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        with self._turn:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that no text is made of."""
        return frozenset(self._tokenizer.all_special_ids)

    def ends_line(self, token: int) -> bool:
        """Return True if the text of an id ends a line."""
        if token not in self._lines:
            self._lines[token] = self.text([token]).endswith("\n")
        return self._lines[token]

    def check(self, text: str) -> None:
        """Raises BudgetExceeded where ``text`` cannot fit the engine, whatever its tokens are.

        Its bytes over the longest token's are a lower bound of its tokens; where that is not enough, its beginning is
        tokenised. Cost: milliseconds for what the bytes tell, and never more than 16 bytes for each token that fits.
        """
        if self._max_tokens is None or len(text) <= self._max_tokens:
            return
        size = len(text) if text.isascii() else len(text.encode())
        least = size // (_SLACK * self._longest)
        few = _BYTES_A_TOKEN * self._max_tokens
        if least <= self._max_tokens and size > few:
            # What stands at the cut may be other tokens in the whole text; twice as many leaves room for that.
            least = len(self._encoded(text[:few], special=False)) // 2
        self.check_count(least, f"a text of {size:,} bytes")

    def check_count(self, tokens: int, what: str) -> None:
        """Raises BudgetExceeded where ``tokens`` are more than the engine takes."""
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise BudgetExceeded(
                f"{what} must fit the engine's {self._max_tokens:,} tokens, got at least {tokens:,}; split or shorten it",
                needed=tokens,
                budget=self._max_tokens,
            )

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if not text:
            return []
        self.check(text)
        ids = self._encoded(text, special=special)
        self.check_count(len(ids), f"a text of {len(text):,} characters")
        return ids

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        if self._copies:  # a batch lets other threads run meanwhile
            return list(self._copies[special].encode_batch([text], add_special_tokens=False)[0].ids)
        with self._turn:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        return [int(i) for i in encoded["input_ids"]]
