"""Numbers of bytes, as people write them."""

from typing import Annotated

from msgspec import Meta

Size = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=r"^\d+ ?([KMGT]i?B)?$")]
"""A number of bytes, alone or with a unit; `parse_size` reads it."""

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: int | str) -> int:
    """Read a number of bytes: `4096`, `4KiB`, `4 KB`; powers of 1024 with an i, else of 1000."""
    if isinstance(size, int):
        return size
    digits = size.rstrip("KMGTiB ")
    unit = size[len(digits) :].strip()
    base = 1024 if "i" in unit else 1000
    return int(digits) * int(base ** _UNITS[unit[:1]]) if unit else int(digits)
