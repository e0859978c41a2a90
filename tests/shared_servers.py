"""What test files share: servers with vLLM (`adapters/server/conftest.py`), an engine (`adapters/vllm/conftest.py`)."""

SERVER_OF = {
    "adapters/vllm/test_vllm.py": "engine",
    "adapters/vllm/test_vllm_elimination.py": "engine",
    "adapters/vllm/test_vllm_faults.py": "engine",
    "adapters/server/chat/test_edited_chats.py": "stock",
    "adapters/server/chat/test_lazy_chats.py": "keys",
    "adapters/server/app/test_odd_requests.py": "keys",
    "adapters/server/vllm/test_vllm_chats.py": "stock",
    "adapters/server/vllm/test_vllm_histories.py": "stock",
    "adapters/server/vllm/test_vllm_isolation.py": "keys",
    "adapters/server/vllm/test_vllm_server.py": "keys",
    "adapters/server/vllm/test_vllm_shutdown.py": "keys",
}
"""By file: an engine; our server with keys, two tenants and bounds of what is kept; or vLLM's own command with our plugin."""
