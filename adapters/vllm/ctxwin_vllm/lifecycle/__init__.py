"""vLLM's processes from their start to their end."""
