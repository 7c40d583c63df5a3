"""`python -m umbel` is the `umbel` command."""

import io
import os
import signal
import sys

from .daemon.lifecycle.signals import (
    end_process,
    has_terminal,
    hear_interrupts_always,
    leave_at_once,
)

_STANDARD_ERROR = 2


def main() -> None:
    """Run the command line; errors are one sentence on standard error and exit status 1."""
    # The imports below take seconds. A daemon that is stopped in them has stopped in order.
    serves = sys.argv[1:2] == ["serve"]
    if serves:
        keep = () if has_terminal() else (signal.SIGHUP,)
        leave_at_once(0, keep=keep, word="stopped" if os.isatty(2) else "")
        hear_interrupts_always()
    else:
        leave_at_once(None)
    _open_closed_streams(refuse=not serves)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may have few characters
    from .daemon.cli import app  # noqa: PLC0415  (after the signal handlers)

    try:
        app()
    except SystemExit as ended:
        if serves:
            end_process(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
        raise


def _open_closed_streams(*, refuse: bool) -> None:
    """Open /dev/null for each standard stream that is closed: the next file would get its number.

    Args:
        refuse: end with status 1 where standard output is closed, before anything is done whose
            answer would be lost.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(opened)
    if sys.stdout is None and refuse:
        os.write(_STANDARD_ERROR, b"umbel: standard output is closed\n")
        sys.exit(1)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(_STANDARD_ERROR, "w")


if __name__ == "__main__":
    main()
