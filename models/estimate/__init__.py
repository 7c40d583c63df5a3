"""What a model would take in memory, from its files alone: no weights are read, and no MLX."""
