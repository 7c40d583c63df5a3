"""The machine that models are chosen for: this one, or one that somebody plans for."""

import enum
from typing import NamedTuple, Self

import msgspec

from ..config.setting import Size, parse_size
from ..errors import FlagError


class Device(enum.StrEnum):
    """What computes."""

    MAC = "mac"
    GPU = "gpu"
    CPU = "cpu"


class Planned(NamedTuple):
    """What was asked for.

    Attributes:
        memory: bytes; None for what this machine has.
        device: None for what computes here.
    """

    memory: int | None = None
    device: Device | None = None

    @classmethod
    def of(cls, memory: str | None, device: Device | None) -> Self:
        """Read what was given.

        Raises:
            FlagError: it is no size, or a device without one.
        """
        if memory is None:
            if device is not None:
                raise FlagError("--device needs --memory: how much has that machine?")
            return cls()
        try:
            nbytes = parse_size(msgspec.convert(memory, Size))
        except msgspec.ValidationError as error:
            raise FlagError(f"--memory is {memory!r}; it must be a size: 64GiB, 64GB") from error
        return cls(nbytes, device)
