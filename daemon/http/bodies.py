"""Request bodies: read within a budget of bytes and of time, sized up, then decoded.

Decoding holds Python's lock for as long as it takes, on any thread, so no single call gets much to
do: a body's values are counted before it is decoded, its large parts are decoded one by one, and
the size of such a part has a bound.
"""

import asyncio
from collections import Counter
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta, Raw

from ...models.text.json_text import whole_characters
from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER
from ..quoting import quote, shorten
from .failures import APIError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BODY = 64 * 1024 * 1024
"""Bytes of one body."""

MAX_PART = 8 * 1024 * 1024
"""Bytes that one call decodes: a message, a prompt, or all other fields together."""

SMALL_BODY = 64 * 1024
"""Bytes up to which a body is decoded on the event loop."""

MAX_VALUES = 100_000
"""Values in a body, tokens of prompts apart: no conversation has more."""

MAX_ESCAPES = 2_000_000
"""Backslashes in a body: each costs ten times as much as a plain character."""

MAX_BLANKS = 4_000_000
"""Blanks between the values of a body: they take time too."""

TOKEN_BYTES = 40
"""Bytes of a prompt's token while its request waits: an int, and its places in lists."""

_OPERATORS_SHARE = 16  # an operator with less than this part of the budget is always let in
_LARGE = 1 << 20
_BLOCK = 64 * 1024


class BodyBudget:
    """The bytes of all bodies in flight, and of the prompts that were made of them.

    Tenants share them: one may hold seven eighths of the bytes that all others leave, and with a
    large body three quarters. So half-sent bodies of one tenant never shut another out, and large
    bodies no small ones. An operator that holds little is let in beyond the limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._used_by: Counter[str] = Counter()

    @property
    def most(self) -> int:
        """Bytes that one request may hold if no other holds any."""
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
        """Count `nbytes` for a share from now on; raises as `Share.resize` does."""
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
    """The bytes that one request holds of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.nbytes = 0
        self.tenant = ""  # until it is known
        self.operator = False

    def assign(self, tenant: str, *, operator: bool) -> None:
        """Count the share to a tenant, before it holds anything."""
        self.tenant, self.operator = tenant, operator

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` instead.

        Raises:
            APIError: 413, one request may never hold so many.
            UnavailableError: there is no room for them now.
        """
        self._budget.take(self, nbytes)
        self.nbytes = nbytes


async def read_body(
    request: web.Request, share: Share, *, largest: int, within: float
) -> bytearray:
    """Read a body of at most `largest` bytes within so many seconds; `share` then holds its bytes.

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


def _too_large(largest: int) -> APIError:
    if largest < MAX_BODY:
        message = (
            f"the body has over {largest} bytes, which is what one request may take of the "
            "daemon's setting body_bytes; send less, or raise the setting"
        )
    else:
        message = f"the body has over {largest // 2**20} MiB; send less"
    return APIError(413, message, code="request_too_large")


def check_values(body: bytearray, limit: int) -> None:
    """Refuse a body that would take long to decode, without decoding it.

    Separators and opening brackets are counted outside strings, a block at a time, so that other
    threads run between two blocks.

    Raises:
        APIError: 400, it has more values than `limit`, or too many escapes or blanks.
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
    """Leave a block's last backslash to the next block if it begins an escape."""
    backslashes = len(block) - len(block.rstrip(b"\\"))
    return block[:-1] if backslashes % 2 and len(block) > 1 else block


class CheckedBody(msgspec.Struct):
    """A body that knows its unsupported values."""

    def refuse_unsupported(self) -> None:
        """Raise an APIError for a value that cannot be honoured."""


class ModelBody(CheckedBody, kw_only=True):
    """A body that may name the model it is for."""

    model: str | None = None


Body = TypeVar("Body", bound=CheckedBody)
Part = TypeVar("Part")


def decode(raw: bytes | bytearray, kind: type[Body]) -> Body:
    """Decode and check a body; its `Raw` fields are decoded later, part by part.

    Raises:
        APIError: 400, naming the field at fault; 413 for a part beyond `MAX_PART`.
    """
    if len(raw) > MAX_PART:
        _check_size(_decode(raw, _outline(kind), ""), kind)
    body = _decode(raw, kind, "")
    body.refuse_unsupported()
    return body


@cache
def _outline(kind: type[CheckedBody]) -> type[Any]:
    """Make a struct that finds a body's fields and decodes none."""
    names = msgspec.structs.fields(kind)
    return msgspec.defstruct("Outline", [(f.name, Raw, Raw(b"")) for f in names])


def _check_size(outline: Any, kind: type[CheckedBody]) -> None:
    types = get_type_hints(kind)
    at_once = {name for name, type_ in types.items() if not _is_raw(type_)}
    sizes = {name: len(memoryview(getattr(outline, name))) for name in at_once}
    largest = max(sizes, key=lambda name: sizes[name])
    if sum(sizes.values()) > MAX_PART:
        raise _part_too_large(largest)


def _is_raw(type_: Any) -> bool:
    """True if values of this type, or a part of them, are decoded later."""
    return type_ is Raw or any(_is_raw(part) for part in get_args(type_))


def decode_part(raw: Raw, kind: Any, place: str) -> Any:
    """Decode one part of a body, which stands at `place`.

    Raises:
        APIError: 400, naming the field at fault; 413 for a part beyond `MAX_PART`.
    """
    if len(memoryview(raw)) > MAX_PART:
        raise _part_too_large(place)
    return _decode(raw, kind, place)


def decode_parts(raw: Raw, most: int, place: str) -> list[Raw]:
    """Find the parts of a list, and decode none.

    Raises:
        APIError: 400, it is no list, or has more than `most` parts.
    """
    kind: Any = Annotated[list[Raw], Meta(max_length=most)]
    parts: list[Raw] = _decode(raw, kind, place)
    return parts


def _decode(raw: bytes | bytearray | Raw, kind: type[Part], place: str) -> Part:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        detail, _, path = str(error).partition(" - at `$")
        path = path.strip("`.")
        param = f"{place}{'.' if place and path and path[0] != '[' else ''}{path}" or None
        detail = shorten(detail)
        message = f"{param}: {detail}" if param else detail
        raise APIError(400, message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (mended := whole_characters(bytes(raw))) is not None:
            return _decode(mended, kind, place)
        message = f"the body is not valid JSON: {shorten(str(error))}"
        raise APIError(400, message, code="invalid_json") from error


def _part_too_large(place: str) -> APIError:
    message = f"{place} has over {MAX_PART // 2**20} MiB; send less"
    return APIError(413, message, code="request_too_large", param=place)
