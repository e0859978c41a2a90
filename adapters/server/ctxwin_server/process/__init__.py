"""Threads and slots of one server, its metrics, and the parent that starts it again."""
