"""The embedding of a model's tokens."""

from typing import Any

_NAMES = frozenset(
    {
        *("embed_tokens", "word_embeddings", "embeddings", "wte", "token_embeddings"),
        *("tok_embeddings", "embedding", "embed_in", "embed"),
    }
)
"""mlx-lm's names for it."""


def embedding_rows(model: Any) -> int | None:
    """Count the tokens that a model has an embedding of; None where its layer is not known.

    MLX does not check indices: a token beyond them reads memory behind the array.
    """
    found = [
        module.weight.shape[0]
        for name, module in model.named_modules()
        if name.split(".")[-1] in _NAMES and "weight" in module
    ]
    return min(found, default=None)
