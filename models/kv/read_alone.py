"""What rows of a call of prompts copy of what each reads alone. Pure."""

from collections.abc import Sequence

_SPARE = 64
"""Tokens of padding a row that are less than the launches of a row's own products."""


def room_for(alone: Sequence[int]) -> int:
    """How many tokens rows have room for, of those that each reads alone.

    All rows are as long as the longest. So who reads far more than others reads it where it lies:
    at most about as much is padding as is copied.

    Args:
        alone: tokens that each row reads alone.

    Returns:
        The most of these that a row copies. Who has more copies none of them.
    """
    limit = 2 * sum(alone) // len(alone) + _SPARE
    return max(tokens for tokens in alone if tokens <= limit)
