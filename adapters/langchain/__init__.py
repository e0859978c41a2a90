"""LangChain: a chat model over windows, and middleware that keeps an agent's context within bounds."""
