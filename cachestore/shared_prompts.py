"""Prompts that are declared shared: computed once, and read by all tenants.

Their state is in a trie of its own, where it stays as long as it is declared. A prompt that begins
with one and goes on resumes at its end, whoever sends it. What follows is in a trie of the sender
that begins there, and nobody else's: only what was declared is common, and only as a whole.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from .evict import Evictor
from .node import Tokens, common_length
from .record import digest
from .tries import SHARED, Namespace, Tries

if TYPE_CHECKING:
    from .prefix_cache import Lease

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class SharedPrompt:
    """A prompt that all tenants may begin with. No lease before its state was read from disk."""

    tokens: Tokens
    digest: bytes
    lease: "Lease | None"

    def begins(self, prompt: Tokens) -> bool:
        """Whether a prompt begins with it and goes on."""
        length = len(self.tokens)
        return length < len(prompt) and common_length(self.tokens, prompt) == length

    def is_base_of(self, namespace: Namespace) -> bool:
        """Whether all prompts of a namespace begin with it."""
        return namespace.base == self.digest

    def namespace(self, namespace: Namespace) -> Namespace:
        """Say where a tenant's state is that follows it."""
        return namespace._replace(base=self.digest)


class SharedPrompts:
    """The declared prompts of a model. Belongs to the MLX thread."""

    def __init__(self, tries: Tries, evictor: Evictor) -> None:
        self._tries = tries
        self._evictor = evictor
        self._declared: dict[str, SharedPrompt] = {}
        self._retracted: list[SharedPrompt] = []

    def declare(self, name: str, tokens: Tokens, lease: "Lease | None") -> None:
        """Share a prompt under a name, in place of an older one.

        Takes ownership of the lease, unless it raises; then nothing has changed. The lease is None
        while the state is on disk only.
        """
        older = self._declared.get(name)
        self._declared[name] = SharedPrompt(tokens, digest(tokens), lease)
        self._let_go(older)

    def retract(self, name: str) -> None:
        """Have a prompt be common no more. What follows it is forgotten once nobody uses it."""
        self._let_go(self._declared.pop(name, None))

    def _let_go(self, prompt: SharedPrompt | None) -> None:
        """Settle once more. A fault there is logged: each lease that closes tries it again."""
        if prompt is None:
            return
        self._retracted.append(prompt)
        try:
            self.settle()
        except BaseException:
            log.exception("a prompt that is not shared any more is still held")

    def close(self) -> None:
        """Give back all leases, as the model is unloaded, each whatever the others raise."""
        prompts = (*self._declared.values(), *self._retracted)
        self._declared.clear()
        self._retracted.clear()
        with ExitStack() as leases:
            for prompt in prompts:
                if prompt.lease is not None:
                    leases.callback(prompt.lease.close)

    def find(self, namespace: Namespace, prompt: Tokens) -> SharedPrompt | None:
        """The longest that a prompt begins with, if its state is in memory."""
        found = self.longest(namespace, prompt)
        return None if found is None or found.lease is None else found

    def is_awaited(self, namespace: Namespace, prompt: Tokens) -> bool:
        """Whether the longest that a prompt begins with is not read from disk yet."""
        found = self.longest(namespace, prompt)
        return found is not None and found.lease is None

    def ending_at(self, offset: int, prefix: bytes) -> SharedPrompt | None:
        """The one with so many tokens and this digest, in memory or not."""
        return next(
            (p for p in self._declared.values() if (len(p.tokens), p.digest) == (offset, prefix)),
            None,
        )

    def settle(self) -> None:
        """Let go of what was retracted and is not in use any more; what is declared again stays."""
        kept = {prompt.digest for prompt in self._declared.values()}
        for prompt in list(self._retracted):
            if prompt not in self._retracted:
                continue  # to close another one's lease has let it go
            if prompt.digest not in kept:
                self._evictor.clear(prompt.is_base_of)
            below = [trie for name, trie in self._tries.items() if prompt.is_base_of(name)]
            if not any(trie.root.ref_count for trie in below):
                self._retracted.remove(prompt)
                if prompt.lease is not None:
                    prompt.lease.close()

    def longest(self, namespace: Namespace, prompt: Tokens) -> SharedPrompt | None:
        """The longest that a prompt begins with, in memory or not. None for shared prompts."""
        if namespace.tenant == SHARED:
            return None
        begun = [each for each in self._declared.values() if each.begins(prompt)]
        return max(begun, key=lambda each: (len(each.tokens), each.lease is not None), default=None)
