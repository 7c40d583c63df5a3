"""The state of sequences: where it lies, how it is moved, packed and stored."""
