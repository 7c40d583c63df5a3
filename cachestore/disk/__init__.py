"""The disk tier: files of state, the index that describes them, and the threads that serve both."""
