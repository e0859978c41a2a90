"""Engines: what computes KV and answers. `base` is the contract, `hf` and `vllm` implement it."""
