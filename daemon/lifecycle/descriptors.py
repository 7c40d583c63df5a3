"""How many files and connections this process may have open."""

import resource
import sys

from ..http.sockets import BACKLOG

MOST_CONNECTIONS = 4096
"""Connections that may be open where descriptors do not bound them further."""

_FILES = 256  # of the disk tier, of models, of templates, of the logs
_MACOS_MOST = 10240  # OPEN_MAX: there the kernel refuses more, also under a hard limit of infinity


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one.

    Returns:
        How many descriptors this process may have now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard
    if sys.platform == "darwin" and (hard == resource.RLIM_INFINITY or hard > _MACOS_MOST):
        wanted = max(soft, _MACOS_MOST)
    if wanted != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
    return sys.maxsize if wanted == resource.RLIM_INFINITY else wanted


def most_connections(descriptors: int, wanted: int | None = None) -> int:
    """Say how many connections may be open, with room left for files.

    The kernel hands over a whole backlog of connections at once, before the first one of them
    can be counted and closed: that much is kept free too, or half of few descriptors.

    Args:
        descriptors: that this process may have.
        wanted: connections that the user allows; None for `MOST_CONNECTIONS`.
    """
    room = max(descriptors - BACKLOG - _FILES, descriptors // 2)
    return min(wanted or MOST_CONNECTIONS, room)
