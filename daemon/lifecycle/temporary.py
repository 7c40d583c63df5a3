"""The process of a temporary daemon: it ends with its parent, and leaves nothing behind.

`python -m umbel.daemon.lifecycle.temporary FOLDER MODEL` serves MODEL on `FOLDER/u.sock` with the
default settings and without a disk; `private.py` starts it. Standard input is a pipe whose other
end the parent alone has open. The kernel closes that end when the parent ends, however it ends, on
every system; so the end of standard input is taken for a SIGTERM, in whatever state the daemon is.
The folder is made here, and removed here, as the parent may be gone.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from .signals import end_process, leave_at_once

SOCKET = "u.sock"
"""The socket's name in the folder."""


def main() -> None:
    """Serve until the parent has ended, or a signal comes."""
    folder, model = sys.argv[1:]
    leave_at_once(0)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # These take seconds, in which the parent may end.
    from ..config import load  # noqa: PLC0415
    from ..errors import StartError  # noqa: PLC0415
    from ..observability import logs  # noqa: PLC0415
    from . import server  # noqa: PLC0415

    status = 0
    flags = {"model": model, "socket": str(Path(folder, SOCKET)), "no_disk": True}
    try:
        settings = load(flags, file=Path(os.devnull), environment={})
        logs.configure(settings.log_format)
        server.serve(settings, temporary=True)
    except StartError as error:
        sys.stderr.write(f"umbel: {error}\n")
        status = 1
    end_process(status)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
