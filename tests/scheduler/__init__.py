"""Order, admission, and the engine loop."""
