"""Elastic Cache's own claims: perplexity, ROUGE-L, latency and KV bytes over KV budgets."""
