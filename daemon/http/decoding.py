"""Bodies decoded and checked, large ones part by part: a single call holds up all threads."""

from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw

from ...models.text.json_text import whole_characters
from ..quoting import shorten
from .failures import APIError

MAX_PART = 8 * 1024 * 1024
"""Bytes that one call decodes: of a message, of a prompt, or of all other fields together."""


class CheckedBody(msgspec.Struct):
    """A body that knows what it must not hold."""

    def refuse_unsupported(self) -> None:
        """Raise an APIError for what cannot be done."""


class ModelBody(CheckedBody, kw_only=True):
    """A body that may name the model it is for."""

    model: str | None = None


Body = TypeVar("Body", bound=CheckedBody)
Part = TypeVar("Part")


def decode(raw: bytes | bytearray, kind: type[Body]) -> Body:
    """Decode and check a body; what is `Raw` in it is decoded later, part by part.

    Raises:
        APIError: 400, naming the field at fault; 413 for what one call shall not be given.
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
        raise _too_large(largest)


def _is_raw(type_: Any) -> bool:
    """Whether what is of this type is decoded later, or is a list, or nothing."""
    return type_ is Raw or any(_is_raw(part) for part in get_args(type_))


def decode_part(raw: Raw, kind: Any, place: str) -> Any:
    """Decode one part of a body.

    Raises:
        APIError: 400, naming the field at fault; 413 for what one call shall not be given.
    """
    if len(memoryview(raw)) > MAX_PART:
        raise _too_large(place)
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


def _too_large(place: str) -> APIError:
    message = f"{place} has over {MAX_PART // 2**20} MiB; send less"
    return APIError(413, message, code="request_too_large", param=place)
