"""Puts `operator_oracle` on the path of the tests beside it; lets transformers import beside a CPU build of torch."""

import sys
from pathlib import Path

from ctxwin.engines._torchvision import install_hook

sys.path.insert(0, str(Path(__file__).parent))
install_hook()
