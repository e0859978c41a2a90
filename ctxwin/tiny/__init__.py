"""The bundled model: its weights and the generated world it was trained on. Its trainer is `tools/train_tiny`.

Importing this package imports neither torch nor transformers.
"""

from pathlib import Path


def checkpoint_dir() -> Path:
    """Folder of the bundled weights, in transformers layout (loads in transformers and in vLLM)."""
    return Path(__file__).resolve().parent / "weights"


__all__ = ["checkpoint_dir"]
