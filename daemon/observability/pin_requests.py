"""The body of `POST /cache/pins`."""

from typing import Annotated

from msgspec import Meta

from ..http.bodies import CheckedBody
from ..http.failures import APIError

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class PinRequest(CheckedBody, forbid_unknown_fields=True):
    """What to keep: a system prompt under a name, or a conversation under its own.

    Attributes:
        name: of the pin; a conversation has one.
        system: text of the system prompt.
        conversation: as the caller's requests named it.
        shared: whether all tenants' requests may begin with the system prompt's state.
    """

    name: Name | None = None
    system: str | None = None
    conversation: Name | None = None
    shared: bool = False

    def refuse_unsupported(self) -> None:
        """Refuse a body that is not one of the two.

        Raises:
            APIError: it is both or none, or lacks a name, or shares a conversation.
        """
        if (self.system is None) == (self.conversation is None):
            raise APIError(400, "send either a system prompt or a conversation to pin")
        if self.system is not None and not (self.name and self.system):
            raise APIError(400, "a system prompt is pinned under a name", param="name")
        if self.shared and self.conversation is not None:
            raise APIError(400, "a system prompt can be shared, no conversation", param="shared")
