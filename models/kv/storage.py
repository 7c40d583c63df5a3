"""Where spans lie: the arrays of consecutive tokens, of which several spans can be views.

What a trie cuts stays where it is, and both parts are views of one storage. So cutting copies
nothing, and what reads neighbours of one storage reads them as one piece. When a view is closed,
what stays of its storage is copied, so that the bytes of what went are free.
"""

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx

from .span_run import SpanRun
from .token_layer import Tensors

Places = tuple[tuple[tuple[int, int], ...], ...]
"""For each layer, for each of its tensors: the packed array, and the row in it."""


class View(Protocol):
    """Some consecutive tokens of a storage, which stay as long as it is open.

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

    No one else touches the arrays. It knows its views and runs weakly: they hold it.

    Attributes:
        length: how many tokens.
        places: where each layer's tensors are.
        loan: the cache's note that another thread reads its arrays. They stay in memory for that
            time, wherever its tokens are.

    Args:
        arrays: `[rows, heads, tokens, size]` each, evaluated, each with a buffer of its own.
        places: as above.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places) -> None:
        self._arrays = list(arrays)
        self._views: WeakSet[View] = WeakSet()
        self._runs: WeakValueDictionary[tuple[int, int], SpanRun] = WeakValueDictionary()
        self._first: int | None = None  # where the first view starts, where that is known
        self.length = int(arrays[0].shape[-2])
        self.places = places
        self.loan: Any = None

    # -- the arrays --------------------------------------------------------------------

    def tensors(self, index: int, start: int, stop: int) -> Tensors:
        """One layer's tensors of some tokens, `[1, heads, tokens, size]` each, without a copy."""
        if not self._arrays:
            raise ValueError("state is read that nobody holds any more")
        return tuple(
            self._arrays[number][row : row + 1, :, start:stop] for number, row in self.places[index]
        )

    def arrays(self, start: int, stop: int) -> list[mx.array]:
        """The packed arrays of some tokens: of all of them the very arrays, else slices."""
        whole = stop - start == self.length
        return [array if whole else array[..., start:stop, :] for array in self._arrays]

    def free(self) -> None:
        """Let go of the arrays: no view of them is open."""
        self._arrays = []
        for run in self._runs.values():
            run.let_go()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.nbytes // self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def buffers(self) -> int:
        """Number of allocations."""
        return len(self._arrays)

    # -- views -------------------------------------------------------------------------

    def add(self, view: View) -> None:
        """Have a view more."""
        self._views.add(view)
        self._first = None

    def remove(self, view: View) -> None:
        """Have a view less. What nobody views then is in memory until `trim`."""
        self._views.discard(view)
        self._first = None

    @property
    def views(self) -> list[Any]:
        """The open views, in order."""
        return sorted(self._views, key=lambda view: view.start)

    @property
    def first(self) -> int:
        """Where the first view starts: that one counts the buffers."""
        if self._first is None:
            self._first = min((view.start for view in self._views), default=0)
        return self._first

    def run(self, start: int, stop: int) -> "SpanRun":
        """Some tokens, to be read: the same object as long as somebody reads them."""
        run = self._runs.get((start, stop))
        return SpanRun(self, start, stop) if run is None else run

    def watch(self, run: "SpanRun") -> None:
        """Have a run follow its tokens when they move."""
        self._runs[run.start, run.stop] = run

    def trim(self) -> None:
        """Free what nobody views: what stays is copied, neighbours together."""
        kept: list[list[View]] = []
        for view in self.views:
            if kept and kept[-1][-1].stop == view.start:
                kept[-1].append(view)
            else:
                kept.append([view])
        if [(views[0].start, views[-1].stop) for views in kept] == [(0, self.length)]:
            return
        copies = [copied(self, views[0].start, views[-1].stop) for views in kept]
        for views, storage in zip(kept, copies, strict=True):
            start, stop = views[0].start, views[-1].stop
            read = [run for run in self._runs.values() if start <= run.start <= run.stop <= stop]
            for moved in (*views, *read):
                moved.move(storage, moved.start - start)
        self.free()


def copied(storage: Storage, start: int, stop: int) -> Storage:
    """Copy some tokens of a storage into one of their own."""
    arrays = [mx.contiguous(array) for array in storage.arrays(start, stop)]
    mx.eval(arrays)
    return Storage(arrays, storage.places)
