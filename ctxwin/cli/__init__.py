"""The command line: `ctxwin`, also `python -m ctxwin`. `ctxwin.cli.main:app` is the entry point."""
