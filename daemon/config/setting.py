"""A setting: its names, its type and bounds, its words for help, messages and docs."""

from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    StrType,
    Type,
    UnionType,
    type_info,
)

ENV_PREFIX = "UMBEL_"
SIZE_RULE = "a size: 8GiB, 500MB, or a whole number of bytes"

Size = Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=r"^\d+ ?([KMGT]i?B)?$")]
"""A number of bytes, alone or with a unit; `parse_size` reads it."""

_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_WORDS: dict[type[Type], str] = {
    BoolType: "true or false",
    DictType: "a table of strings",
    ListType: "a list of strings",
    StrType: "a string",
}


class About(NamedTuple):
    """Stands beside a setting's type.

    Attributes:
        does: describes the setting, in a sentence.
        unit: of its value.
        unset: describes the value of a setting without a default.
        flag: its flag, if that is not its name; None if it has none.
        table: the table of the file in which it stands.
        secret: True if messages may not show its value.
        reload: True if a reload puts a new value in force; else only a restart does.
    """

    does: str
    unit: str = ""
    unset: str = ""
    flag: str | None = ""
    table: str = ""
    secret: bool = False
    reload: bool = False


class Setting(NamedTuple):
    """A setting: an attribute of `Settings`, its type with bounds, and its default."""

    name: str
    kind: Any
    default: Any
    about: About

    @property
    def flag(self) -> str | None:
        """Its flag of `umbel serve`; None if it has none."""
        if self.about.flag is None:
            return None
        return self.about.flag or f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def key(self) -> str:
        """Its key of the file, with its table."""
        return f"{self.about.table}.{self.name}" if self.about.table else self.name

    @property
    def type(self) -> Type:
        """Its type where it is set; the first one where there are several."""
        whole = type_info(self.kind)
        return whole.types[0] if isinstance(whole, UnionType) else whole

    @property
    def values(self) -> str:
        """Its possible values, in words."""
        if self.about.unit == "bytes":
            return SIZE_RULE
        counted = f" of {self.about.unit}" if self.about.unit else ""
        match self.type:
            case IntType() as number:
                return f"a whole number{counted}, {_bounds(number)}"
            case FloatType() as number:
                return f"a number{counted}, {_bounds(number)}"
            case LiteralType(values=values):
                return " or ".join(map(str, values))
            case StrType(min_length=int()):
                return "a non-empty string"
            case other:
                return _WORDS[type(other)]


def settings_of(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """Find the settings in the struct that holds their values: the fields with an `About`."""
    kinds = get_type_hints(struct, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(struct):
        kind = kinds[field.name]
        default = field.default_factory() if callable(field.default_factory) else field.default
        for note in getattr(kind, "__metadata__", ()):
            if isinstance(note, About):
                found[field.name] = Setting(field.name, kind, default, note)
    return found


def parse_size(size: int | str) -> int:
    """Read a number of bytes: `4096`, `4KiB`, `4 KB`; powers of 1024 with an i, else of 1000."""
    if isinstance(size, int):
        return size
    digits = size.rstrip("KMGTiB ")
    unit = size[len(digits) :].strip()
    base = 1024 if "i" in unit else 1000
    return int(digits) * int(base ** _UNITS[unit[:1]]) if unit else int(digits)


def size_of(size: int | str | None) -> int | None:
    """Read a number of bytes that may be unset."""
    return None if size is None else parse_size(size)


def _bounds(number: IntType | FloatType) -> str:
    if number.gt is not None:
        return f"over {number.gt:g}"
    if number.le is not None:
        return f"{number.ge} to {number.le}"
    return f"at least {number.ge:g}"
