"""The only calls of the model: prefill, decode, and the choice of a token."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from .attention import bind
from .layer_states import LiveStates, PackedSpan, WholeCheckpoint
from .loader import LoadedModel
from .params import Row
from .sampling import sample


class Forward:
    """Runs one loaded model. All methods belong to the MLX thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._stack = loaded.stack
        self._vocab_size = loaded.text.vocab_size
        bind(loaded.model)

    def open(
        self,
        offset: int = 0,
        spans: Sequence[PackedSpan] = (),
        checkpoint: WholeCheckpoint | None = None,
    ) -> LiveStates:
        """Make the live state of a sequence that resumes at `offset`; see `LayerStack.open`."""
        return self._stack.open(offset, spans, checkpoint)

    def prefill(self, tokens: Sequence[int], states: LiveStates) -> None:
        """Advance `states` over `tokens` and wait until that is computed.

        The logits are never asked for, so the output layer does not run.
        """
        self._model(mx.array([tokens]), cache=states.caches)
        states.advanced(len(tokens))
        mx.eval(states.arrays())

    def logits(self, token: int, states: LiveStates) -> mx.array:
        """Feed one token and advance `states` over it, lazily.

        Returns:
            `[1, V]` logits of the next token.
        """
        logits: mx.array = self._model(mx.array([[token]]), cache=states.caches)[:, -1, :]
        states.advanced(1)
        return logits

    def decode(self, token: int, states: LiveStates, row: Row) -> int:
        """Feed one token, advance `states` over it, and choose the next one."""
        chosen = sample(self.logits(token, states), [row], self._vocab_size)
        mx.eval(chosen, states.arrays())
        return int(cast("int", chosen.item()))
