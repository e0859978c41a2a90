"""Processes that read what clients send and may be killed: pictures, files, grammars."""
