"""End of a daemon's process, without the teardown of the libraries that it loaded."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Run Python's exit handlers, flush standard output and error, and leave the process.

    The destructors of C++ libraries do not run. MLX's threads and its CUDA context are still there
    when they would, and one of seven stops of an 8B model on CUDA ended in a segmentation fault
    after the daemon had closed all that it owns.

    Args:
        status: of the process's exit.
    """
    atexit._run_exitfuncs()  # noqa: SLF001  (no public function runs them without the teardown)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or a pipe that nothing reads
            stream.flush()
    os._exit(status)
