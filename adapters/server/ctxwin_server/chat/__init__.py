"""Windows of plain chats, chunks that chats name, and prompts that are computed ahead."""
