"""The daemons that the clients talk to."""

from ..daemon.conftest import long_tiny_dir, short_path, smollm2_daemon, tiny_daemon

__all__ = ["long_tiny_dir", "short_path", "smollm2_daemon", "tiny_daemon"]
