"""Request bodies: read within a budget of bytes and of time, and sized up before they are decoded.

Decoding holds Python's lock for as long as it takes, on whatever thread: no single call may be
given much to do. So a body's values are counted before it is decoded, its large parts are
decoded one by one, and what one of them may hold has a bound.
"""

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER
from ..quoting import quote
from .failures import APIError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BODY = 64 * 1024 * 1024
"""Bytes of one body."""

SMALL_BODY = 64 * 1024
"""Bytes up to which a body is decoded where it was read."""

MAX_VALUES = 100_000
"""Values in a body, tokens of prompts apart: what holds more is no conversation."""

MAX_ESCAPES = 2_000_000
"""Backslashes in a body: each costs ten times what a plain character does."""

MAX_BLANKS = 4_000_000
"""Blanks between the values of a body: they take time too."""

TOKEN_BYTES = 40
"""Bytes of a prompt's token while its request waits: an int, and its places in lists."""

_OPERATORS_SHARE = 16  # one part in this many is let in beyond the budget, for the operator only
_LARGE = 1 << 20
_BLOCK = 64 * 1024


class BodyBudget:
    """The bytes of all bodies in flight, and of the prompts that were made of them.

    Tenants share them: one may hold seven eighths of the bytes that all others leave, and with a
    large body three quarters. So half-sent bodies of one tenant never shut another out, and large
    bodies no small ones. An operator that holds little is let in beyond the limit.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used_by: Counter[str] = Counter()

    @property
    def most(self) -> int:
        """Bytes that one request may hold, where no other has any."""
        return max(self.limit * 3 // 4, min(self.limit, _LARGE))

    @property
    def largest(self) -> int:
        """Bytes that one body may have."""
        return min(MAX_BODY, self.most)

    @property
    def longest_prompt(self) -> int:
        """Tokens that one prompt may have."""
        return self.most // TOKEN_BYTES

    @contextmanager
    def share(self) -> "Iterator[Share]":
        """Give a request its share of the budget until the block ends."""
        share = Share(self)
        try:
            yield share
        finally:
            share.resize(0)

    def take(self, share: "Share", nbytes: int) -> None:
        """Count a share that has `nbytes` from now on.

        Raises:
            APIError: 413, there never is room for so many.
            UnavailableError: there is no room for them now.
        """
        if nbytes > self.most:
            message = (
                f"the request takes {nbytes} bytes while it waits, {TOKEN_BYTES} for each token "
                f"of its prompt, and one request may take {self.most} of the daemon's setting "
                "body_bytes; send less, or raise the setting"
            )
            raise APIError(413, message, code="request_too_large")
        more = nbytes - share.nbytes
        if more > 0 and not self._has_room(share, nbytes):
            others = self.used > self._used_by[share.tenant] > 0
            whose = f" of tenant {share.tenant}" if others else ""
            message = f"too many request bodies{whose} are in flight; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER)
        self.used += more
        self._used_by[share.tenant] += more
        if not self._used_by[share.tenant]:
            del self._used_by[share.tenant]

    def _has_room(self, share: "Share", nbytes: int) -> bool:
        if self.used == share.nbytes:
            return True  # no other request holds any
        before = self._used_by[share.tenant]
        own = before - share.nbytes + nbytes
        if share.operator and own <= self.limit // _OPERATORS_SHARE:
            return True
        left = self.limit - (self.used - before)
        return own <= (left * 3 // 4 if nbytes > _LARGE else left * 7 // 8)


class Share:
    """The bytes that one request holds of the budget.

    Attributes:
        nbytes: that it holds.
        tenant: whose request it is; empty until that is known.
        operator: whether the one who runs the daemon has sent it.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.nbytes = 0
        self.tenant = ""
        self.operator = False

    def assign(self, tenant: str, *, operator: bool) -> None:
        """Count it to a tenant, before it holds anything."""
        self.tenant, self.operator = tenant, operator

    def resize(self, nbytes: int) -> None:
        """Hold so many bytes instead.

        Raises:
            APIError: 413, there never is room for them.
            UnavailableError: there is no room for them now.
        """
        self._budget.take(self, nbytes)
        self.nbytes = nbytes


async def read_body(
    request: web.Request, share: Share, *, largest: int, within: float
) -> bytearray:
    """Read a body as it comes, and no more of it than there is room for.

    Args:
        request: whose body has not been read.
        share: of the budget; holds the body's bytes afterwards.
        largest: bytes that a body may have.
        within: seconds that it may take to arrive.

    Raises:
        APIError: it is compressed, too large, too slow, or broken.
        UnavailableError: other bodies take the room.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.lower() != "identity":
        message = f"Content-Encoding {quote(encoding)} is not supported; send the body as it is"
        raise APIError(415, message, code="unsupported_encoding")
    if (request.content_length or 0) > largest:
        raise _too_large(largest)
    body = bytearray()
    try:
        async with asyncio.timeout(within):
            while block := await request.content.readany():
                if len(body) + len(block) > largest:
                    raise _too_large(largest)
                share.resize(len(body) + len(block))
                body += block
    except web.RequestPayloadError as error:
        raise APIError(400, f"the body cannot be read: {error}", code="invalid_body") from error
    except TimeoutError as error:
        message = f"the body did not arrive within {within:g} s"
        raise APIError(408, message, code="request_timeout") from error
    return body


def check_values(body: bytearray, limit: int) -> None:
    """Refuse a body that would take long to decode, without decoding it.

    What separates and opens values is counted outside strings, a block at a time, so that other
    threads run between two blocks.

    Raises:
        APIError: 400, it has more values than `limit`, or too many escapes.
    """
    values = quotes = escapes = blanks = start = 0
    inside = False
    while start < len(body):
        block = _whole_escapes(bytes(body[start : start + _BLOCK]))
        start += len(block)
        escapes += block.count(b"\\")
        parts = block.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = parts[int(inside) :: 2]
        inside ^= len(parts) % 2 == 0
        values += sum(part.count(b",") + part.count(b"[") + part.count(b"{") for part in outside)
        quotes += len(parts) - 1
        blanks += sum(len(part) - len(part.translate(None, b" \n\r\t")) for part in outside)
        # Of two strings, a key and its value, at least one has a separator.
        if max(values, quotes // 4 - 1) > limit:
            raise APIError(400, f"the body has over {limit} values; send fewer")
        if blanks > MAX_BLANKS:
            raise APIError(400, f"the body has over {MAX_BLANKS} blanks between values")
        if escapes > MAX_ESCAPES:
            message = f"the body has over {MAX_ESCAPES} escapes; send text as UTF-8"
            raise APIError(400, message)


def _whole_escapes(block: bytes) -> bytes:
    """Leave a block's last backslash to the next one if it begins an escape."""
    backslashes = len(block) - len(block.rstrip(b"\\"))
    return block[:-1] if backslashes % 2 and len(block) > 1 else block


def _too_large(largest: int) -> APIError:
    if largest < MAX_BODY:
        message = (
            f"the body has over {largest} bytes, which is what one request may take of the "
            "daemon's setting body_bytes; send less, or raise the setting"
        )
    else:
        message = f"the body has over {largest // 2**20} MiB; send less"
    return APIError(413, message, code="request_too_large")
