"""Memory that a model would take, from its files alone: no weights are read, and no MLX."""
