"""What is refused in the same words, whoever manages services."""

from ..errors import ServiceError


def not_installed() -> ServiceError:
    """There is no such service."""
    return ServiceError("umbel is not installed as a service here; try --system, or --user")


def not_root() -> ServiceError:
    """The system's service is asked for by a user."""
    return ServiceError("the system's services are root's: use sudo, or --user")
