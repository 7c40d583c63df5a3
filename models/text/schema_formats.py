"""The formats of texts and numbers to which an answer can be held."""

_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Formats as patterns, where the grammar's compiler lets a 30th of February pass."""

COMPILED = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Those that the compiler knows."""

RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63) + 1, 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**63 - 1),
}
"""Formats of integers that OpenAPI adds; no bound that the compiler takes is wider."""

FREE = frozenset({"binary", "directory-path", "double", "file-path", "float", "password", "path"})
"""What says nothing of a value: OpenAPI's numbers, and what pydantic says of texts."""

NAMES = tuple(sorted({*PATTERNS, *COMPILED, *RANGES, *FREE}))
