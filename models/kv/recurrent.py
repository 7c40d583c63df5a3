"""Recurrent layers of several sequences: the model's argument in the place of one cache."""

from abc import ABC, abstractmethod

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from .ring_buffer import resized


class RecurrentRows(ArraysCache, ABC):  # type: ignore[misc]
    """One recurrent layer of several sequences; answers what mlx-lm asks of an `ArraysCache`.

    It is one by name only: some models write their state into no other class.
    """

    lengths: mx.array | None = None
    left_padding = None

    def __init__(self) -> None:  # mlx-lm's would make slots of its own
        pass

    @abstractmethod
    def __getitem__(self, slot: int) -> mx.array | None:
        """The rows' states of one slot, `[rows, ...]`; None before their first token."""

    @abstractmethod
    def __setitem__(self, slot: int, value: mx.array) -> None:
        """Replace them."""

    @abstractmethod
    def empty(self) -> bool:
        """True if no row has seen a token."""

    def make_mask(self, tokens: int) -> mx.array | None:
        """Return no mask: all rows have all tokens of a call."""
        del tokens
        return None

    def advance(self, tokens: int) -> None:
        """Do nothing: recurrent state does not count tokens."""
        del tokens


class BatchedRecurrentLayer(RecurrentRows):
    """Rows whose states are the rows of one array, which the model replaces."""

    def __init__(self, slots: int) -> None:
        self._slots: list[mx.array | None] = [None] * slots

    def __getitem__(self, slot: int) -> mx.array | None:
        return self._slots[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self._slots[slot] = value

    def empty(self) -> bool:
        """See `RecurrentRows`."""
        return self._slots[0] is None

    def arrays(self) -> list[mx.array]:
        """The states, to evaluate."""
        return [array for array in self._slots if array is not None]

    def clear(self) -> None:
        """Drop all rows."""
        self._slots = [None] * len(self._slots)

    def resize(self, rows: int) -> None:
        """Change the number of rows; those beyond are dropped."""
        self._slots = [None if array is None else resized(array, rows) for array in self._slots]

    def put(self, row: int, rows: int, state: ArraysCache) -> None:
        """Write a row. One that has seen no token starts, as in mlx-lm, from zeros."""
        for slot, value in enumerate(state.cache):
            held = self._slots[slot]
            if held is None and value is None:
                continue
            if held is None:
                held = mx.zeros((rows, *value.shape[1:]), value.dtype)
            held[row : row + 1] = 0 if value is None else value
            self._slots[slot] = held

    def take(self, row: int) -> ArraysCache:
        """Copy a row."""
        state = ArraysCache(len(self._slots))
        state.cache = [
            None if array is None else mx.contiguous(array[row : row + 1]) for array in self._slots
        ]
        return state
