"""Order, admission, and the engine loop on the MLX thread."""
