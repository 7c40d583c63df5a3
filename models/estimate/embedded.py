"""What is known of the embedded model: its file says it in another form."""

from .config import ModelConfig
from .facts import ModelFacts
from .weights import Weights

_NUMBERS = 134_515_008

EMBEDDED = ModelFacts(
    ModelConfig(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
        }
    ),
    # Dequantised when it is loaded, whatever computes it.
    Weights(nbytes=2 * _NUMBERS, fp32=4 * _NUMBERS, width=2),
)
"""SmolLM2-135M-Instruct."""
