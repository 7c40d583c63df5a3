"""A request as far as its place in the order goes, and the order's constants."""

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Priority(enum.IntEnum):
    """Which requests go first where several have credit."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A request, as far as its place in the order goes.

    Attributes:
        id: unique among all that wait or run.
        tenant: whom it is charged to.
        conversation: within which it keeps its place; a name of this tenant.
        priority: before whom it goes.
        parallel: how many requests of its conversation may run when it starts, itself included.
    """

    id: str
    tenant: str
    conversation: str
    priority: Priority = Priority.INTERACTIVE
    parallel: int = 1


class Candidate(NamedTuple):
    """A request that may start now.

    Attributes:
        entry: the request.
        due: it is its tenant's oldest, and was passed over as often as it may be.
    """

    entry: Entry
    due: bool = False


class Policy(NamedTuple):
    """The order's constants.

    Attributes:
        quantum: tokens per weight by which tenants' deficits are refilled. More of it finds longer
            prefixes, less of it keeps tenants closer together.
        conversation_quantum: the same within a tenant.
        patience: one of so many requests that a tenant starts is its oldest; at least 1.
        looks: the most requests whose cached prefix a decision asks for.
    """

    quantum: float = 4096
    conversation_quantum: float = 32768
    patience: int = 16
    looks: int = 32
