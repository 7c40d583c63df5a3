"""What the pager asks of whoever knows what state is made of; `models/kv/stored.py` fulfils it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Exported(Protocol):
    """State for the thread that writes it.

    Attributes:
        tensors: by name the fields of a `HostTensor`.
        metadata: what they are.
    """

    @property
    def tensors(self) -> Any: ...  # noqa: D102  (described above)

    @property
    def metadata(self) -> dict[str, str]: ...  # noqa: D102  (described above)


class Codec(Protocol):
    """Hands state to the thread that writes files, and turns files into state.

    What is handed over shall cost the thread that runs the model next to nothing: it is there
    for the other thread to read, or to wait for.

    Attributes:
        copies: whether all that is handed over takes memory of its own. Else it is the state's own
            buffers, whole, which stay in memory until they are written.

    Loading raises a ValueError where a file is not what was written, and an OSError where it
    cannot be read at present.
    """

    @property
    def copies(self) -> bool: ...  # noqa: D102  (described above)

    def export_span(self, span: Any, start: int, stop: int, /) -> Exported:
        """Hand over some tokens of a span, counted from its first."""
        ...

    def export_checkpoint(self, checkpoint: Any, /) -> Exported:
        """Hand over a checkpoint."""
        ...

    def load_span(self, parts: Sequence[tuple[Path, int, int]], /) -> Any:
        """Read consecutive tokens: for each file, which of its tokens."""
        ...

    def load_checkpoint(self, path: Path, /) -> Any:
        """Read a checkpoint."""
        ...
