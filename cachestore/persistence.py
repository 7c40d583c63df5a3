"""State of a trie's nodes that the disk has, that it lacks, and that is being written."""

from .extents import Extent, FileUse, cut, join
from .node import Totals, TrieNode, Writer
from .record import Record


class Persistence:
    """A trie's own part that knows of the disk. The trie keeps it true when its shape changes.

    Attributes:
        files: who refers to which file.
        dirty: nodes with state that the disk may lack, oldest first.

    Args:
        files: shared with the tries of other namespaces.
        totals: of the trie.
    """

    def __init__(self, files: FileUse, totals: Totals) -> None:
        self.files = files
        self._totals = totals
        self.dirty: dict[TrieNode, None] = {}

    # -- what the disk lacks -----------------------------------------------------------

    def mark_dirty(self, node: TrieNode) -> None:
        """Note that the disk may lack some of a node's state."""
        self.dirty[node] = None

    def mark_clean(self, node: TrieNode) -> None:
        """Note that nothing of a node is to be written."""
        self.dirty.pop(node, None)

    def postpone(self, node: TrieNode) -> None:
        """Move a dirty node behind all others."""
        if node in self.dirty:
            del self.dirty[node]
            self.dirty[node] = None

    # -- what is being written ---------------------------------------------------------

    @staticmethod
    def begin_write(node: TrieNode, writer: Writer, until: int) -> None:
        """Note that a node's state is being written: giving it up would free nothing yet.

        Args:
            node: whose.
            writer: who writes it.
            until: offset up to which the disk has its tokens when that is done.
        """
        node.writers[writer] = until

    @staticmethod
    def end_write(node: TrieNode, writer: Writer) -> None:
        """Note that a writer is done with a node, if it had begun. In a trie or not."""
        node.writers.pop(writer, None)

    @staticmethod
    def forget_writers(node: TrieNode) -> None:
        """Forget all writers of a node. For any node, in a trie or not."""
        node.writers.clear()

    # -- what the disk has -------------------------------------------------------------

    def add_extent(self, node: TrieNode, extent: Extent) -> None:
        """Note that the disk has more of a node's tokens.

        Raises:
            ValueError: it would leave a gap, or reaches beyond the edge.
        """
        if extent.start != node.persisted_end or not extent.start < extent.stop <= node.end:
            raise ValueError("the disk has a node's tokens from the first on, without gaps")
        self.files.hold([extent.record])
        node.extents.append(extent)
        self._totals.stored_tokens += extent.stop - extent.start

    def drop_extents(self, node: TrieNode, offset: int) -> None:
        """Note that the disk has none of a node's tokens from an offset on."""
        kept, gone = cut(node.extents, offset)
        across = bool(kept and gone and kept[-1].record is gone[0].record)
        self.files.drop([extent.record for extent in gone[across:]])
        self._totals.stored_tokens -= sum(extent.stop - extent.start for extent in gone)
        node.extents = kept

    def set_checkpoint(self, node: TrieNode, record: Record) -> None:
        """Note that the disk has the whole state at a node's end."""
        self.drop_checkpoint(node)
        self.files.hold([record])
        node.persisted_checkpoint = record

    def drop_checkpoint(self, node: TrieNode) -> None:
        """Note that the disk has not, or no more, the whole state at a node's end."""
        if node.persisted_checkpoint is not None:
            self.files.drop([node.persisted_checkpoint])
            node.persisted_checkpoint = None

    # -- when the trie changes its shape -----------------------------------------------

    def split(self, upper: TrieNode, lower: TrieNode) -> None:
        """Give a new upper node its part of what is known of the lower, which had it all."""
        upper.writers = dict(lower.writers)
        upper.extents, lower.extents = cut(lower.extents, upper.end)
        if upper.extents and lower.extents and upper.extents[-1].record is lower.extents[0].record:
            self.files.hold([lower.extents[0].record])
        if lower in self.dirty and upper.persisted_end < upper.end:
            del self.dirty[lower]  # what comes first is written first
            self.dirty.update({upper: None, lower: None})

    def merge(self, upper: TrieNode, lower: TrieNode) -> None:
        """Give the lower node what is known of the upper, which is about to go."""
        lower.extents, twice = join(upper.extents, lower.extents)
        self.files.drop(twice)
        lower.writers |= upper.writers
        if upper in self.dirty:
            del self.dirty[upper]
            self.mark_dirty(lower)
