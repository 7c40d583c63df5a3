"""What each tenant keeps of memory and disk, whatever others want, and what it may have. Pure."""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class TenantBounds(NamedTuple):
    """Bytes of a tenant's stored state, over all models.

    Attributes:
        floor: up to so many nothing is taken from it while others have more than theirs, neither
            from its state in memory nor from its files.
        ceiling: over so many in memory it is evicted from before all others; None: it has none.
        disk: over so many in files it is forgotten from before all others; None: it has none.
    """

    floor: int = 0
    ceiling: int | None = None
    disk: int | None = None


Bounds = Callable[[str], TenantBounds]
"""Says what bounds a tenant has."""


def unbounded(_tenant: str) -> TenantBounds:
    """Bound nobody."""
    return TenantBounds()


class Share(NamedTuple):
    """Of memory or of the disk: bytes that a tenant keeps, and over which it goes first."""

    floor: int
    most: int | None


def stages(shares: Mapping[str, Share], room: int) -> list[dict[str, int]]:
    """Say down to which bytes tenants are taken from, one stage after another.

    First those go that have more than they may; then what is over the floors; then, as a request
    that runs needs room more than one that may come, the floors.

    Args:
        shares: of each tenant that has something.
        room: bytes that all may keep together. Floors that are more are scaled down to it.

    Returns:
        For each stage the bytes that tenants keep in it. Nothing is taken from one that is not
        named.
    """
    wanted = sum(share.floor for share in shares.values())
    scale = min(1.0, max(0, room) / wanted) if wanted else 0.0
    floors = {tenant: int(share.floor * scale) for tenant, share in shares.items()}
    most = {
        tenant: max(share.most, floors[tenant])
        for tenant, share in shares.items()
        if share.most is not None
    }
    found = [most] if most else []
    found.append(floors)
    if any(floors.values()):
        found.append(dict.fromkeys(floors, 0))
    return found
