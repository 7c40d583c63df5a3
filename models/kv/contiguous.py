"""The keys of a sequence that decodes alone in one piece, which is their only place.

One fused kernel then reads them. They lie in mlx-lm's own caches, which grow in place as long as
nobody holds a slice of them. So the storages that the sequence reads as a whole hold none: they ask
for what is read of them (see `lodging.Host`), and have arrays of their own again before the
sequence ends, waits or decodes with others.
"""

from collections.abc import Collection, Sequence

import mlx.core as mx

from .lodging import apart, divided
from .span_run import SpanRun
from .storage import Storage
from .token_layer import TokenLayerCache

Place = tuple[int, int]
"""A tensor of a layer cache: the layer's number, and the tensor's."""


class ContiguousKeys:
    """The keys and values of all layers of one sequence, each in one piece.

    They are made array by array, as spans are packed, and given back so: what is lodged is in two
    places for the time of one such array only.

    Args:
        layers: token-addressable, each with a prefix that is read from `runs`.
        runs: what the sequence reads, oldest first.
        lodging: numbers of the storages that are lodged: at once where they may move; those that
            are being written to disk, once that has ended.
    """

    def __init__(
        self,
        layers: Sequence[TokenLayerCache],
        runs: Sequence[SpanRun],
        lodging: Collection[int] = (),
    ) -> None:
        self._layers = layers
        self._numbers = _by_number(runs)
        self._made: dict[Place, mx.array] = {}  # what is in no layer cache yet, or not any more
        self._at: dict[Storage, int] = {}  # where each begins that is lodged, or is to be
        self._waiting: list[Storage] = []  # to be lodged
        self._rests = self._lodge(runs, lodging)
        self._begun = False

    def make(self) -> None:
        """Make them. If it fails, what is lodged is to be given back all the same."""
        for number, places in enumerate(self._numbers):
            made = {place: self._layers[place[0]].joined(place[1]) for place in places}
            mx.eval(list(made.values()))
            self._made |= made
            for storage in self._at.keys() - set(self._waiting):
                storage.host = self
                storage.ask(number, self)
            apart(self._rests, number)
        self._rests, self._begun = [], True
        for index, layer in enumerate(self._layers):
            which = sorted(place for place in self._made if place[0] == index)
            layer.begin_contiguous(tuple(self._made.pop(place) for place in which))

    def _lodge(self, runs: Sequence[SpanRun], lodging: Collection[int]) -> list[Storage]:
        """Say where what is lodged lies here; returns what lay beside it."""
        at, rests = 0, list[Storage]()
        for run in runs:
            if run.storage.number in lodging:
                if run.storage.may_move(run.start, run.stop):
                    rests += divided(run)
                    self._at[run.storage] = at
                elif run.length == run.storage.length:
                    self._at[run.storage] = at
                    self._waiting.append(run.storage)
            at += run.length
        return rests

    def adopt(self) -> None:
        """Be the only place of what could not move when it was copied here.

        Frees memory, and takes none.
        """
        for storage in [each for each in self._waiting if each.movable and not each.lodged]:
            self._waiting.remove(storage)
            storage.host = self
            for number in range(storage.parts):
                storage.ask(number, self)

    @property
    def lodged(self) -> list[Storage]:
        """What has its only place here; its bytes count where it belongs."""
        return [storage for storage in self._at if storage.host is self]

    def tensor(self, storage: Storage, number: int, row: int) -> mx.array:
        """One row of a packed array of a storage that is lodged here; see `lodging.Host`."""
        index, which = place = self._numbers[number][row]
        held = self._made[place] if place in self._made else self._layers[index].all_held()[which]
        at = self._at[storage]
        return held[..., at : at + storage.length, :]

    def give_back(self) -> None:
        """Have all that is lodged lie apart again. The layer caches hold nothing afterwards.

        If it fails, it can be tried again.
        """
        if self._begun:
            # No name must be left of what is freed array by array.
            self._made = {
                (index, which): tensor
                for index, layer in enumerate(self._layers)
                for which, tensor in enumerate(layer.give_up())
            }
            self._begun = False
        for number, places in enumerate(self._numbers):
            apart([*self.lodged, *self._rests], number)
            for place in places:
                self._made.pop(place, None)
        for storage in self.lodged:
            storage.host = None
        self._at, self._waiting, self._rests = {}, [], []


def _by_number(runs: Sequence[SpanRun]) -> list[list[Place]]:
    """The layers' tensors by the packed array that they are in, in the order of its rows."""
    numbers: dict[int, dict[int, Place]] = {}
    for index, tensors in enumerate(runs[0].storage.places if runs else ()):
        for which, (number, row) in enumerate(tensors):
            numbers.setdefault(number, {})[row] = index, which
    return [[rows[row] for row in sorted(rows)] for _, rows in sorted(numbers.items())]
