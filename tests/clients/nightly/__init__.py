"""Clients that `.ci/nightly` installs and runs, and `.ci/run` does not."""
