"""`python -m ctxwin` is the command line."""

from ctxwin.cli.main import app

if __name__ == "__main__":
    app(prog_name="ctxwin")
