"""umbel as a service of systemd or launchd: its files there, and the programs that manage it."""

from .installer import Installation, find, install, uninstall
from .service_log import follow
from .service_status import ServiceStatus, report
from .umbel import Umbel, running_umbel

__all__ = [
    "Installation",
    "ServiceStatus",
    "Umbel",
    "find",
    "follow",
    "install",
    "report",
    "running_umbel",
    "uninstall",
]
