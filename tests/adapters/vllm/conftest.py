"""Lets transformers and vLLM import beside a CPU build of torch."""

from ctxwin.engines.torchvision_repair import repair

repair()
