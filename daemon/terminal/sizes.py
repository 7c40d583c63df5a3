"""Numbers as people read them."""

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def amount(nbytes: float) -> str:
    """Write a number of bytes: `512 B`, `3.4 MiB`."""
    if nbytes < _STEP:
        return f"{nbytes:.0f} B"
    for unit in _UNITS:
        nbytes /= _STEP
        if nbytes < _STEP or unit == _UNITS[-1]:
            break
    return f"{nbytes:.1f} {unit}"


def age(seconds: float) -> str:
    """Write how long ago something was, by its largest unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in percent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
