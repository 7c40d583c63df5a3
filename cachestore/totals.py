"""Sums over a trie's nodes, kept while it changes: to describe it takes no walk."""

from dataclasses import dataclass


@dataclass
class Totals:
    """What a trie has. It and its `Persistence` alone change this.

    Attributes:
        nodes: all but the root.
        known_tokens: of all edges.
        whole_states: checkpoints in memory.
        stored_tokens: tokens whose state is on disk (too).
        leases: how often a path of it is retained.
        held_bytes: of state in memory that is retained.
    """

    nodes: int = 0
    known_tokens: int = 0
    whole_states: int = 0
    stored_tokens: int = 0
    leases: int = 0
    held_bytes: int = 0
