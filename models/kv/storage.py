"""Where spans lie: the arrays of consecutive tokens, of which several spans can be views.

What a trie cuts stays where it is, and both parts are views of one storage. So cutting copies
nothing, and what reads neighbours of one storage reads them as one piece. When a view is closed,
what stays of its storage is copied, so that the bytes of what went are free.

A storage's arrays are its own, or a row's part of a stack's (see `span_stack`): then it is
*lodged*, its tokens are held there alone.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx

from .span_run import SpanRun
from .token_layer import Tensors

_numbers = count()

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
        number: its name, never given twice in a process.
        length: how many tokens.
        places: where each layer's tensors are.
        host: in whose arrays its tokens lie; None where in its own.
        loan: the cache's note that another thread reads its arrays. They stay in memory for that
            time, wherever its tokens are, so it is not lodged then.

    Args:
        arrays: `[rows, heads, tokens, size]` each, evaluated, each with a buffer of its own.
        places: as above.
        counted: its buffers are not counted where it was divided from.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places, *, counted: bool = True) -> None:
        self.number = next(_numbers)
        self.host: object | None = None
        self._arrays = list(arrays)
        self._counted = counted
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
        return [self.part(number, start, stop) for number in range(self.parts)]

    def part(self, number: int, start: int, stop: int) -> mx.array:
        """Some tokens of one packed array; see `arrays`."""
        array = self._arrays[number]
        return array if stop - start == self.length else array[..., start:stop, :]

    def replace(self, number: int, array: mx.array) -> None:
        """Have the same tokens in the place of one packed array."""
        self._arrays[number] = array
        self._let_go()

    def _let_go(self) -> None:
        for run in self._runs.values():
            run.let_go()

    def free(self) -> None:
        """Let go of the arrays: nobody views them any more."""
        self._arrays, self.host = [], None
        self._let_go()

    @property
    def lodged(self) -> bool:
        """Whether its tokens lie elsewhere: to give them up frees nothing while that is there."""
        return self.host is not None

    @property
    def movable(self) -> bool:
        """Whether its arrays are freed when its tokens are put elsewhere."""
        return self.loan is None

    def may_move(self, start: int, stop: int) -> bool:
        """Whether some tokens can have another place than those beside them."""
        whole = stop - start == self.length
        apart = self.host is None and not any(
            run.start < at < run.stop for run in self._runs.values() for at in (start, stop)
        )
        return (whole or apart) and self.movable

    @property
    def token_bytes(self) -> int:
        """What a token takes."""
        return self.nbytes // self.length

    @property
    def nbytes(self) -> int:
        """What all of it takes, wherever it lies."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def parts(self) -> int:
        """How many packed arrays there are."""
        return len(self._arrays)

    @property
    def buffers(self) -> int:
        """In how many allocations it is; none where others have counted them."""
        return len(self._arrays) if self._counted else 0

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

    def divide(self, at: int) -> "Storage":
        """Become two, of which the other one has the tokens from one on.

        Both go on to lie where this one did: they are to be put elsewhere, part by part. Views
        must end there; see `may_move`.
        """
        first, rest = self.arrays(0, at), self.arrays(at, self.length)
        mx.eval(first, rest)
        self._arrays = list(first)
        other = Storage(rest, self.places, counted=False)
        for moved in [x for x in (*self.views, *self._runs.values()) if x.start >= at]:
            moved.move(other, moved.start - at)
        stay = {where: run for where, run in self._runs.items() if run.storage is self}
        for run in stay.values():
            run.let_go()
        self._runs, self.length = WeakValueDictionary(stay), at
        return other

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
