"""Few sizes for what grows: shapes that differ each step cost a kernel each step. Pure."""

_LEAST_POSITIONS = 64


def bucket(count: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: few shapes, at most a third of it unused."""
    size = 1
    while size < count:
        size *= 2
    return size * 3 // 4 if size >= 4 and size * 3 // 4 >= count else size  # noqa: PLR2004


def rows_for(count: int, multiple: int) -> int:
    """How many rows a batch of so many sequences has.

    Args:
        count: of the sequences.
        multiple: of rows for which products are the fastest; batches of up to half of it stay as
            small as they are.
    """
    rows = bucket(count)
    return rows if rows * 2 <= multiple else -(-rows // multiple) * multiple


def positions_for(tokens: int) -> int:
    """Positions of rows whose longest has so many tokens: 64, 96, 128, 192, 256 and so on."""
    return bucket(max(tokens, _LEAST_POSITIONS))
