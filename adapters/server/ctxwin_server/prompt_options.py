"""How the prompt of a plain chat may differ from its request, and if the next one is computed ahead of its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ctxwin_server.lazy_drops import Bounds

_SWITCHES = {"volatile": "late", "prefill": "idle"}
"""What switches an option on; ``off`` switches it off."""


@dataclass(frozen=True)
class PromptOptions:
    """Options of one prompt.

    Attributes:
        lazy_drops: how much of what the client drops may stay in it; None is nothing.
        volatile: whether what changes in the system prompt may be served late.
        prefill: whether the next prompt may be computed while the engine idles.
    """

    lazy_drops: Bounds | None = None
    volatile: bool = False
    prefill: bool = False

    def replace(self, texts: Mapping[str, str]) -> PromptOptions:
        """Return these options with those in ``texts``, by name, instead. Raises ValueError."""
        drops = texts.get("lazy_drops")
        switches = {name: _parse(name, texts[name]) for name in _SWITCHES if name in texts}
        fields = vars(self) | switches | ({} if drops is None else {"lazy_drops": Bounds.parse(drops)})
        return PromptOptions(**fields)

    def __bool__(self) -> bool:
        return self.lazy_drops is not None or self.volatile or self.prefill


AS_SENT = PromptOptions()
"""Nothing differs, and nothing is computed ahead."""


def _parse(name: str, text: str) -> bool:
    if text not in (_SWITCHES[name], "off"):
        raise ValueError(f"{name} must be {_SWITCHES[name]} or off, got {text[:80]!r}")
    return text != "off"
