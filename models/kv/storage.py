"""Where spans lie: the arrays of consecutive tokens, of which several spans can be views.

What a trie cuts stays where it is, and both parts are views of one storage. So cutting copies
nothing, and what reads neighbours of one storage reads them as one piece. When a view is closed,
what stays of its storage is copied, so that the bytes of what went are free.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

import mlx.core as mx

from .token_layer import Tensors

Places = tuple[tuple[tuple[int, int], ...], ...]
"""For each layer, for each of its tensors: the packed array, and the row in it."""


class View(Protocol):
    """Some consecutive tokens of a storage.

    Attributes:
        start: the first of them, counted from the storage's first.
        stop: one after the last.
    """

    @property
    def start(self) -> int: ...  # noqa: D102  (described above)
    @property
    def stop(self) -> int: ...  # noqa: D102  (described above)

    def move(self, storage: "Storage", start: int) -> None:
        """Have the same tokens in another storage from now on."""
        ...


class Storage:
    """The state of consecutive tokens, all layers, in a few arrays. Not written to.

    `layer`, `arrays` and `free` alone touch the arrays. It knows its views weakly: they hold it.

    Attributes:
        length: how many tokens.
        places: where each layer's tensors are.

    Args:
        arrays: `[rows, heads, tokens, size]` each, evaluated, each with a buffer of its own.
        places: as above.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places) -> None:
        self._arrays = list(arrays)
        self._layers: dict[tuple[int, int, int], Tensors] = {}
        self._views: WeakSet[View] = WeakSet()
        self._first: int | None = None  # where the first view starts, where that is known
        self.length = int(arrays[0].shape[-2])
        self.places = places

    # -- the arrays --------------------------------------------------------------------

    def layer(self, index: int, start: int, stop: int) -> Tensors:
        """One layer's tensors of some tokens, `[1, heads, tokens, size]` each, without a copy.

        The same object at every call, until the storage is viewed otherwise: who reads together
        knows by it what is shared.
        """
        key = index, start, stop
        if key not in self._layers:
            self._layers[key] = tuple(
                self._arrays[number][row : row + 1, ..., start:stop, :]
                for number, row in self.places[index]
            )
        return self._layers[key]

    def arrays(self, start: int, stop: int) -> list[mx.array]:
        """The packed arrays of some tokens: of all of them the very arrays, else slices."""
        if stop - start == self.length:
            return self._arrays
        return [array[..., start:stop, :] for array in self._arrays]

    def free(self) -> None:
        """Let go of the arrays: nobody views them any more."""
        self._arrays, self._layers = [], {}

    @property
    def token_bytes(self) -> int:
        """What a token takes."""
        return sum(array.nbytes for array in self._arrays) // self.length

    @property
    def buffers(self) -> int:
        """In how many allocations it is."""
        return len(self._arrays)

    # -- views -------------------------------------------------------------------------

    def add(self, view: View) -> None:
        """Have a view more."""
        self._views.add(view)
        self._viewed_otherwise()

    def remove(self, view: View) -> None:
        """Have a view less. What nobody views then is in memory until `trim`."""
        self._views.discard(view)
        self._viewed_otherwise()

    def _viewed_otherwise(self) -> None:
        self._first, self._layers = None, {}

    @property
    def first(self) -> int:
        """Where the first view starts: that one counts the buffers."""
        if self._first is None:
            self._first = min((view.start for view in self._views), default=0)
        return self._first

    def trim(self) -> None:
        """Free what nobody views: what stays is copied, neighbours together."""
        runs: list[list[View]] = []
        for view in sorted(self._views, key=lambda view: view.start):
            if runs and runs[-1][-1].stop == view.start:
                runs[-1].append(view)
            else:
                runs.append([view])
        if [(run[0].start, run[-1].stop) for run in runs] == [(0, self.length)]:
            return
        copies = [copied(self, run[0].start, run[-1].stop) for run in runs]
        for run, storage in zip(runs, copies, strict=True):
            begin = run[0].start
            for view in run:
                view.move(storage, view.start - begin)
        self.free()


def copied(storage: Storage, start: int, stop: int) -> Storage:
    """Copy some tokens of a storage into one of their own."""
    arrays = [mx.contiguous(array) for array in storage.arrays(start, stop)]
    mx.eval(arrays)
    return Storage(arrays, storage.places)
