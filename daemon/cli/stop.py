"""`umbel stop`: ends the daemon that holds the lock of a socket, in order."""

import os
import signal
import time
from pathlib import Path

from ..errors import ClientError
from ..http.sockets import lock_holder

_POLL = 0.1  # seconds
_SAVES = 90.0  # seconds that a daemon takes to stop, after the grace of its requests


def stop(path: Path, grace: float) -> int:
    """Send SIGTERM to the daemon on a socket, and wait until it has ended.

    The lock beside the socket names the daemon. A daemon whose socket belongs to systemd or launchd
    has no lock. It is not asked: a connection would start it where it is down.

    Args:
        path: of the socket.
        grace: seconds that running requests may take to finish.

    Returns:
        The daemon's process id.

    Raises:
        ClientError: no daemon of this user's holds the lock, or it does not end in time.
    """
    try:
        pid = lock_holder(path)
        if pid is None:
            raise ClientError(_none_runs(path))
        os.kill(pid, signal.SIGTERM)
    except PermissionError as error:
        raise ClientError(f"the daemon on {path} is another user's") from error
    except ProcessLookupError as error:  # it ended just now
        raise ClientError(_none_runs(path)) from error
    end = time.monotonic() + grace + _SAVES
    while lock_holder(path) == pid:
        if time.monotonic() > end:
            raise ClientError(
                f"the daemon on {path} (pid {pid}) still runs after {grace + _SAVES:g} seconds"
            )
        time.sleep(_POLL)
    return pid


def _none_runs(path: Path) -> str:
    if not path.exists():
        return f"no daemon runs on {path}; name another --socket"
    return (
        f"no daemon holds {path}; if it is a service's socket, the next client would start that "
        "daemon again: umbel service status says how it is, and umbel service uninstall, or "
        "`systemctl --user stop umbel.socket umbel.service`, keeps it down"
    )
