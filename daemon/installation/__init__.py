"""umbel as a service of systemd or launchd: its files there, and the programs that manage it."""

import sys

from ..errors import ServiceError
from .launchd import Launchd
from .service import ServiceStatus, Umbel, follow_file, not_installed, report, running_umbel
from .steps import Say, describe, follow, refuse_edited
from .systemd import Systemd

__all__ = [
    "Installation",
    "ServiceStatus",
    "Umbel",
    "find",
    "follow_file",
    "install",
    "report",
    "running_umbel",
    "uninstall",
]

Installation = Launchd | Systemd
"""umbel as a service of one manager, of one user or of the system."""


def find(*, system: bool, umbel: Umbel | None = None) -> Installation:
    """Choose this system's manager of services.

    Args:
        system: the service is the system's, and not this user's.
        umbel: that the service runs; by default the umbel that runs now.

    Raises:
        ServiceError: umbel supports no manager of this system.
    """
    umbel = umbel or running_umbel()
    if sys.platform == "linux":
        return Systemd(umbel, system=system)
    if sys.platform == "darwin":
        return Launchd(umbel, system=system)
    raise ServiceError(f"umbel knows no manager of services on {sys.platform}")


def install(service: Installation, say: Say, *, force: bool, dry_run: bool) -> None:
    """Write the service's files, check them, and start it now and at every start of the system.

    Args:
        service: to install.
        say: prints a line for each step.
        force: replace edited files.
        dry_run: only print the steps.

    Raises:
        ServiceError: it cannot be installed; the message says what to change.
    """
    if not dry_run:
        service.require()
    files = service.files()
    if not force:
        refuse_edited(file.path for file in files)
    for remark in service.check(files):
        say(remark)
    (describe if dry_run else follow)(service.to_install(files), say)


def uninstall(service: Installation, say: Say, *, force: bool, dry_run: bool) -> None:
    """Stop the service, remove the files that `install` wrote, and name what stays.

    Args:
        service: to remove.
        say: prints a line for each step.
        force: remove edited files too.
        dry_run: only print the steps.

    Raises:
        ServiceError: there is nothing to remove, or it cannot be removed.
    """
    if not dry_run:
        service.require()
    paths = service.paths()
    if not paths:
        raise not_installed()
    if not force:
        refuse_edited(paths)
    (describe if dry_run else follow)(service.to_uninstall(paths), say)
    for line in service.leftovers():
        say(line)
