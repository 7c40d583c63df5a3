"""The only calls of the model: prefill, decode, and the choice of a token."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .loader import LoadedModel
from .params import Row
from .sampling import sample

LayerStates = list[Any]
"""One of mlx-lm's cache objects for each layer."""


class Forward:
    """Runs one loaded model. All methods belong to the MLX thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._vocab_size = loaded.text.vocab_size

    def new_state(self) -> LayerStates:
        """Make the empty state of a sequence that starts from nothing."""
        states: LayerStates = make_prompt_cache(self._model)
        return states

    def prefill(self, tokens: Sequence[int], states: LayerStates) -> None:
        """Advance `states` over `tokens` and wait until that is computed.

        The logits are never asked for, so the output layer does not run.
        """
        self._model(mx.array([tokens]), cache=states)
        mx.eval([state.state for state in states])

    def decode(self, token: int, states: LayerStates, row: Row) -> int:
        """Feed one token, advance `states` over it, and choose the next one."""
        logits = self._model(mx.array([[token]]), cache=states)[:, -1, :]
        chosen = sample(logits, [row], self._vocab_size)
        return int(cast("int", chosen.item()))
