"""State of past requests: where it is kept, and in how many bytes."""
