"""The layers that a model's patches need (Kamera, appendix C.3)."""

from collections.abc import Callable, Sequence

DEPTHS = ("deep", "25-100", "75-100")
"""Ranges that every probe tries: a longer one may take a smaller rank, and leaves out less."""
ENDS = 7
"""Most ends of a range that are compared in a round."""


def shortest_ranges(layers: int, enough: Callable[[Sequence[str]], list[bool]]) -> list[str]:
    """Return two ranges of layers that are enough: the shortest up to the last layer, and the shortest with that first one.

    What layers lose does not tell, since it matters only where it is read.

    Args:
        layers: of the model.
        enough: tells of each range, as `ctxwin_evals.patching.parse_depth` reads them, if patches of it restore enough.

    Returns:
        The ranges, each once; none where all layers are needed. Cost: at most four rounds of `ENDS` ranges for 64 layers.
    """

    def most(count: int, keep: Callable[[int], str]) -> int:
        """The largest number of layers below ``count`` that can be left out."""
        low, high = 0, count
        while high - low > 1:
            tried = sorted({low + max(1, (high - low) * i // (ENDS + 1)) for i in range(1, ENDS + 1)})
            failed = [*enough([keep(number) for number in tried]), False].index(False)
            low, high = [low, *tried][failed], [*tried, high][failed]
        return low

    first = most(layers, lambda number: name_range(number, layers, layers))
    end = layers - most(layers - first, lambda number: name_range(first, layers - number, layers))
    ranges = dict.fromkeys(name_range(first, last, layers) for last in (layers, end))
    return [name for name in ranges if name != "0-100"]


def name_range(first: int, end: int, layers: int) -> str:
    """The layers from ``first`` up to ``end``, of ``layers``, in percents of the depth."""
    begin = -(-100 * first // layers)
    return f"{begin}-{max(begin + 1, 100 * end // layers)}"
