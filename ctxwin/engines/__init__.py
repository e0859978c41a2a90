"""Engines: what computes KV and answers. `base` is the contract, `hf` implements it; so does the distribution `ctxwin_vllm`."""
