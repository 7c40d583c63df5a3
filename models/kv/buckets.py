"""Few sizes for what grows: shapes that differ each step cost a kernel each step. Pure."""

_LEAST_POSITIONS = 64
_LEAST_STEP = 32


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


def prompt_tokens(longest: int, rows: int, multiple: int) -> int:
    """How many tokens each row of a call of prompts has, padding included.

    Args:
        longest: tokens of the longest.
        rows: of the call. One has no padding.
        multiple: to which several are padded.
    """
    return longest if rows == 1 else -(-longest // multiple) * multiple


def positions_for(tokens: int, sizes: int) -> int:
    """How many positions a buffer has whose longest row has so many tokens.

    Args:
        tokens: of that row.
        sizes: in how many steps positions double, each of 32 at least. With two they are 64, 96,
            128, 192, 256, … What is over is read along in each step.
    """
    tokens = max(tokens, _LEAST_POSITIONS)
    step = max(_LEAST_STEP, (1 << tokens.bit_length() - 1) // sizes)
    return -(-tokens // step) * step


def padded_to(tokens: int) -> int:
    """To how many tokens the rows' own prefixes are padded, if the longest has so many."""
    return bucket(max(tokens, _LEAST_POSITIONS)) if tokens else 0
