"""`python -m ctxwin` is the command line, and so is `ctxwin`."""

import sys

from ctxwin.cli.stopping import stop_imports


def main() -> None:
    """Run the command line with this process's arguments."""
    stop_imports(sys.argv)
    from ctxwin.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
