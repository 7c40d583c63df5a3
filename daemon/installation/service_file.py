"""Files that an installation writes. Each says so, with a digest of all else that it holds."""

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from ..errors import ServiceError

_SEAL = re.compile(
    r"^.*written by `umbel service install`, digest ([0-9a-f]{64})\b.*\n", re.MULTILINE
)


class ServiceFile(NamedTuple):
    """A file as it is to be, with its seal."""

    path: Path
    text: str

    def is_there(self) -> bool:
        """Whether it is as it is to be already."""
        return _text_of(self.path) == self.text

    def is_outdated(self) -> bool:
        """Whether something else is in its place."""
        return _text_of(self.path) not in (None, self.text)


def seal(text: str, *, after: int = 0, comment: str = "# {}") -> str:
    """Add the line that tells what was written from what somebody has changed.

    Args:
        text: of the file, with a final newline.
        after: how many lines must stand before it.
        comment: how the format writes one.
    """
    words = f"written by `umbel service install`, digest {_digest(text)}"
    lines = text.splitlines(keepends=True)
    lines.insert(after, comment.format(words) + "\n")
    return "".join(lines)


def refuse_edited(paths: list[Path]) -> None:
    """Refuse where a file is not as an installation wrote it.

    Raises:
        ServiceError: it names the first such file.
    """
    for path in paths:
        text = _text_of(path)
        if text is not None and not _is_sealed(text):
            raise ServiceError(
                f"{path} was changed, or is not from `umbel service install`; "
                "keep what you need of it, and use --force"
            )


def _is_sealed(text: str) -> bool:
    found = _SEAL.search(text)
    return found is not None and found[1] == _digest(_SEAL.sub("", text, count=1))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text_of(path: Path) -> str | None:
    """Read a file; None if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServiceError(f"cannot read {path}: {error.strerror}") from error
