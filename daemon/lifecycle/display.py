"""Progress of a daemon's start and stop, as its user may see it: by default nothing is shown."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from ..config import Settings, default_socket

if TYPE_CHECKING:
    from ..models.assembly import Phase
    from ..models.slot import Resident


class Served(NamedTuple):
    """A daemon that serves.

    Attributes:
        model: its name.
        context: tokens of prompt and answer together.
        weights: bytes of the model.
        budget: bytes of state, at most.
        one_by_one: the reason if sequences do not decode in batches.
        most: requests that run at once.
        socket: the Unix socket.
        default_socket: clients look there by default.
        addresses: TCP addresses, as `host:port`.
        needs_key: clients on TCP must send a key.
        state: the folder of the disk tier; None without one.
    """

    model: str
    context: int
    weights: int
    budget: int
    one_by_one: str | None
    most: int
    socket: Path
    default_socket: bool
    addresses: tuple[str, ...]
    needs_key: bool
    state: Path | None

    @classmethod
    def of(
        cls,
        resident: "Resident",
        settings: Settings,
        socket: Path,
        addresses: Iterable[str],
    ) -> Self:
        """Describe a daemon by its default model, its settings and its addresses."""
        assembly, service = resident.assembly, resident.service
        return cls(
            model=service.model_name,
            context=assembly.context_length,
            weights=service.weight_bytes,
            budget=assembly.cache.pool.budget.nbytes,
            one_by_one=assembly.runner.one_by_one,
            most=settings.max_batch,
            socket=socket,
            default_socket=socket == default_socket().absolute(),
            addresses=tuple(addresses),
            needs_key=settings.api_key is not None,
            state=None if assembly.disk is None else assembly.disk.folder,
        )


class Display:
    """Shows nothing. `terminal.display` has one for a terminal."""

    def begin(self, phase: "Phase") -> None:
        """Show the next phase of start-up. Safe to call from any thread."""

    def advance(self, done: int, total: int) -> None:
        """Show the progress of the phase. Safe to call from any thread."""

    def served(self, served: Served) -> None:
        """Show that requests are served."""

    def stop(self) -> None:
        """Show that the daemon will stop as soon as nothing is computed."""

    def waiting(self, _text: Callable[[], str]) -> AbstractContextManager[object]:
        """Show a text while a block lasts.

        Args:
            _text: called again and again, from any thread; an empty text shows nothing.
        """
        return nullcontext()

    def close(self) -> None:
        """Show nothing more of start-up."""
