"""Consecutive tokens of one storage, as steps read them."""

from typing import TYPE_CHECKING

from .token_layer import Tensors, starts

if TYPE_CHECKING:
    from .storage import Storage


class SpanRun:
    """Consecutive tokens of one storage, read as one. It follows them where they move.

    Whoever reads does not hold: that is a view's part.

    Attributes:
        storage: where they are.
        start: the first of them there.
        length: how many tokens.
    """

    def __init__(self, storage: "Storage", start: int, stop: int) -> None:
        self.length = stop - start
        self._layers: dict[int, Tensors] = {}
        self._starts: dict[int, Tensors] = {}
        self.move(storage, start)

    @property
    def stop(self) -> int:
        """One after the last of them."""
        return self.start + self.length

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[1, heads, tokens, size]` each, without a copy.

        The same object at every call, until the tokens move.

        Raises:
            ValueError: the state is not there any more.
        """
        if index not in self._layers:
            self._layers[index] = self.storage.tensors(index, self.start, self.stop)
        return self._layers[index]

    def start_of(self, index: int) -> Tensors:
        """The first token of `layer`, `[1, heads, 1, size]` each: where it begins in memory."""
        if index not in self._starts:
            self._starts[index] = starts(self.layer(index))
        return self._starts[index]

    def between(self, start: int, stop: int) -> "SpanRun":
        """Some of its tokens."""
        return self.storage.run(self.start + start, self.start + stop)

    def move(self, storage: "Storage", start: int) -> None:
        """Read the same tokens in another storage from now on."""
        self.let_go()
        self.storage, self.start = storage, start
        storage.watch(self)

    def let_go(self) -> None:
        """Hold no array until it is read again."""
        self._layers, self._starts = {}, {}
