"""What a daemon shows of its life to whoever started it: nothing, unless that is a person."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from ..config import Settings, default_socket

if TYPE_CHECKING:
    from ..models.assembly import Phase
    from ..models.slot import Resident


class Served(NamedTuple):
    """What is served, and where.

    Attributes:
        model: its name.
        context: tokens of prompt and answer together.
        weights: bytes of the model.
        budget: bytes that state may take.
        one_by_one: why sequences do not decode in batches; None if they do.
        most: requests that run at once.
        socket: the Unix socket.
        default_socket: whether that is where clients look.
        addresses: TCP addresses, as `host:port`.
        needs_key: whether clients on TCP must send a key.
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
        """Put together what is known where requests are served."""
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
    """Shows nothing. `terminal.display` has one that shows it to a person."""

    def begin(self, phase: "Phase") -> None:
        """Start-up does this next. For any thread."""

    def advance(self, done: int, total: int) -> None:
        """So much of what start-up does is done. For any thread."""

    def served(self, served: Served) -> None:
        """Start-up has ended: requests are served."""

    def stop(self) -> None:
        """The end was asked for; it begins as soon as nothing is computed."""

    def waiting(self, _text: Callable[[], str]) -> AbstractContextManager[object]:
        """Say what the end waits for, for as long as a block lasts.

        Args:
            _text: asked again and again, from any thread; empty where there is nothing to say.
        """
        return nullcontext()

    def close(self) -> None:
        """Show nothing more of start-up."""
