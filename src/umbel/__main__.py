"""`python -m umbel` is the `umbel` command."""

import io
import os
import signal
import sys

from .daemon.early_signals import has_terminal, hear_interrupts_always, leave_at_once
from .daemon.process_end import end_process


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may have few characters
    from .daemon.cli import app  # noqa: PLC0415  (as above)

    try:
        app()
    except SystemExit as ended:
        if serves:
            end_process(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
        raise


if __name__ == "__main__":
    main()
