"""Chunks and files as JSON and forms, and the limits of a server."""
