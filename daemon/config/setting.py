"""What is known of a setting: its names, what it does, what it may be, what holds without it."""

from typing import Any, NamedTuple, get_type_hints

import msgspec
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
_WORDS: dict[type[Type], str] = {
    BoolType: "true or false",
    DictType: "a table of strings",
    ListType: "a list of strings",
    StrType: "a string",
}


class About(NamedTuple):
    """What is written beside a setting's type, for help, messages and docs.

    Attributes:
        does: what the setting does.
        unit: what its value counts or names.
        unset: what holds where no value is given, if there is no default.
        flag: its flag, if that is not its name; None if it has none.
        table: the table of the file in which it stands.
        secret: whether messages may not show its value.
        reload: whether a reload puts a new value in force; else a restart does.
    """

    does: str
    unit: str = ""
    unset: str = ""
    flag: str | None = ""
    table: str = ""
    secret: bool = False
    reload: bool = False


class Setting(NamedTuple):
    """A setting, as everything that speaks of it knows it.

    Attributes:
        name: the attribute of `Settings`.
        kind: its type, with bounds.
        default: its value where none is given.
        about: what is written beside its type.
    """

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
        """Its key of the file, behind its table if it stands in one."""
        return f"{self.about.table}.{self.name}" if self.about.table else self.name

    @property
    def type(self) -> Type:
        """Its type where it is set; the first one where there are several."""
        whole = type_info(self.kind)
        return whole.types[0] if isinstance(whole, UnionType) else whole

    @property
    def values(self) -> str:
        """What it may be, in words."""
        if self.about.unit == "bytes":
            return "a size: 8GiB, 500MB, or a whole number of bytes"
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
    """Find all settings in the struct that holds their values, in its order.

    What nothing is written beside is none: it has tables of its own in the file.
    """
    kinds = get_type_hints(struct, include_extras=True)
    return {
        field.name: Setting(
            field.name,
            kinds[field.name],
            field.default_factory() if callable(field.default_factory) else field.default,
            _about(kinds[field.name]),
        )
        for field in msgspec.structs.fields(struct)
        if hasattr(kinds[field.name], "__metadata__")
    }


def _about(kind: Any) -> About:
    (about,) = (note for note in kind.__metadata__ if isinstance(note, About))
    return about


def _bounds(number: IntType | FloatType) -> str:
    if number.gt is not None:
        return f"over {number.gt:g}"
    if number.le is not None:
        return f"{number.ge} to {number.le}"
    return f"at least {number.ge:g}"
