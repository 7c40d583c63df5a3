"""`python -m umbel` is the `umbel` command."""

from .daemon.cli import main

if __name__ == "__main__":
    main()
