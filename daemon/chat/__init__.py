"""`umbel chat`: a conversation in the terminal, or over a pipe."""

from .conversation import Options
from .reach import Wanted
from .session import chat

__all__ = ["Options", "Wanted", "chat"]
