"""vLLM's OpenAI server with windows beside its own endpoints: what ``ctxwin serve`` runs."""
