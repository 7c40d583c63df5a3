"""Installing umbel as a service, and removing it, whoever manages services here."""

import sys
from pathlib import Path
from typing import Protocol

from ..errors import ServiceError
from .launchd import Launchd
from .refusals import not_installed
from .service_file import ServiceFile, refuse_edited
from .service_status import ServiceStatus
from .step import Say, Step, describe, follow
from .systemd import Systemd
from .umbel import Umbel, running_umbel


class Installation(Protocol):
    """umbel as a service of one manager, of one user or of the system."""

    def require(self) -> None:
        """Refuse where its manager does not run, or does not obey this user.

        Raises:
            ServiceError: it says which of both.
        """

    def files(self) -> list[ServiceFile]:
        """Make its files for this machine.

        Raises:
            ServiceError: the service could not run this umbel.
        """

    def check(self, files: list[ServiceFile]) -> list[str]:
        """Have the files looked at before they are written.

        Returns:
            What is to be told of them.

        Raises:
            ServiceError: they are of no use here.
        """

    def paths(self) -> list[Path]:
        """List the files that an installation may have written and that are there."""

    def to_install(self, files: list[ServiceFile]) -> list[Step]:
        """Say how the service begins."""

    def to_uninstall(self, paths: list[Path]) -> list[Step]:
        """Say how it ends."""

    def leftovers(self) -> list[str]:
        """Say what then stays on disk, a sentence each."""

    def status(self) -> ServiceStatus:
        """Ask the manager how it is.

        Raises:
            ServiceError: it is not installed.
        """

    def follow_log(self) -> int:
        """Show the log's end, and what comes, until interrupted; return the exit status."""


def find(*, system: bool, umbel: Umbel | None = None) -> Installation:
    """Find what manages services on this kind of machine.

    Args:
        system: the service is the system's, and not this user's.
        umbel: what the service runs; by default the umbel that runs now.

    Raises:
        ServiceError: umbel knows no such thing.
    """
    umbel = umbel or running_umbel()
    if sys.platform == "linux":
        return Systemd(umbel, system=system)
    if sys.platform == "darwin":
        return Launchd(umbel, system=system)
    raise ServiceError(f"umbel knows no manager of services on {sys.platform}")


def install(service: Installation, say: Say, *, force: bool, dry_run: bool) -> None:
    """Write the service's files, check them, and start it now and at every start from now on.

    Args:
        service: what to install.
        say: hears of each step.
        force: files that somebody has changed are replaced.
        dry_run: nothing is done; `say` hears what would be.

    Raises:
        ServiceError: it cannot be installed; the message says what to change.
    """
    if not dry_run:
        service.require()
    files = service.files()
    if not force:
        refuse_edited([file.path for file in files])
    for remark in service.check(files):
        say(remark)
    (describe if dry_run else follow)(service.to_install(files), say)


def uninstall(service: Installation, say: Say, *, force: bool, dry_run: bool) -> None:
    """Stop the service, and remove the files that `install` wrote.

    Args:
        service: what to remove.
        say: hears of each step, and of what stays.
        force: files that somebody has changed are removed too.
        dry_run: nothing is done; `say` hears what would be.

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
