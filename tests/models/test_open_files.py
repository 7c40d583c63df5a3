"""What importing mlx-lm does to the limits of this process."""

import subprocess
import sys

_PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 5000))
import umbel.daemon.lifecycle.server
print(*resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit.__name__)
"""


def test_mlx_lm_does_not_lower_the_limit_of_open_files() -> None:
    """The hard limit could not be raised again, and `setrlimit` is itself afterwards."""
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["3000", "5000", "setrlimit"]
