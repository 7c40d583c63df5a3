"""What the pager asks of whoever knows what state is made of; `models.extents` fulfils it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Exported(Protocol):
    """State in host memory.

    Attributes:
        tensors: by name the fields of a `HostTensor`.
        metadata: what they are.
    """

    @property
    def tensors(self) -> Any: ...  # noqa: D102  (described above)

    @property
    def metadata(self) -> dict[str, str]: ...  # noqa: D102  (described above)


class Codec(Protocol):
    """Turns state into host memory, and files into state.

    Loading raises a ValueError where a file is not what was written, and an OSError where it
    cannot be read at present.
    """

    def export_span(self, span: Any, start: int, stop: int, /) -> Exported:
        """Make some tokens of a span, counted from its first, readable on any thread."""
        ...

    def export_checkpoint(self, checkpoint: Any, /) -> Exported:
        """Make a checkpoint readable on any thread."""
        ...

    def load_span(self, parts: Sequence[tuple[Path, int, int]], /) -> Any:
        """Read consecutive tokens: for each file, which of its tokens."""
        ...

    def load_checkpoint(self, path: Path, /) -> Any:
        """Read a checkpoint."""
        ...
