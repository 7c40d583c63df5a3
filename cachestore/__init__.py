"""What is remembered of past requests, where, and in how many bytes."""
