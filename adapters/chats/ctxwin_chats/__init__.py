"""Edits of chats before a model sees them: pure functions and records over the bodies of chat, responses and messages requests.

Modules:
    options: what a chat names for its window and its prompt.
    context_management, compaction: the edits of Anthropic's and OpenAI's APIs: old results cleared, a summary for old turns.
    lazy_drops, volatile, prediction: what keeps a prefix cache useful while clients edit their histories.
    prefill: predicted requests, sent while the engine idles.
    continuation, records: how a request continues the history before it; what conversations were served last.
    shared_records: the same in a store, for other servers and the next process.
    typed_tools, template_arguments: what chat templates know of tools and variables.
    bodies: the base of all schemas, and media as data.
"""
