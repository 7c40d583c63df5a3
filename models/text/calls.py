"""Reads what stands between a call's markers: the model's own form, or JSON."""

import ast
import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from .formats import ToolFormat

_SPACE = re.compile(r"[ \t\r\n]*")
_ARGUMENTS = ("arguments", "parameters")
_GEMMA_STRING = re.compile(r'<\|"\|>.*?<\|"\|>', re.DOTALL)
_MOST_WORDS = 4096  # of a call without tags, where the parser guesses
_MOST_READ = 200_000_000  # characters, by a parser that reads a text again and again
_INFINITE = "1e999"
_NAME = re.compile(r"[^\s<>{}()\[\]\"']{1,256}")


class Call(NamedTuple):
    """One call.

    Attributes:
        name: of the tool, never empty.
        arguments: the JSON text of an object, as the model wrote it where it wrote JSON.
        id: what the model calls it, if its form has ids.
    """

    name: str
    arguments: str
    id: str | None = None


class MalformedCallError(ValueError):
    """What stands between the markers is no call."""


def read_calls(body: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> Sequence[Call]:
    """Read the calls in the text between two markers.

    JSON is understood whatever the model's own form is. A tool that nobody knows is a call like
    any other: agents answer it, and the model corrects itself.

    Args:
        body: the text.
        form: whose markers stand around it.
        tools: as OpenAI's chat completions write them; some forms have no types of their own.

    Raises:
        MalformedCallError: it holds no call, or something that is not one besides.
    """
    try:
        if form.called:
            return [_call_of(form.called, body.strip())]
        if body.lstrip()[:1] in ("{", "[") and (found := _json_calls(body)):
            return found
        return _own_calls(body, form, tools)
    except MalformedCallError:
        raise
    except Exception as error:  # a parser raises whatever a bad text leads to
        raise MalformedCallError(str(error)) from error


def _own_calls(body: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> Sequence[Call]:
    if form.parse is None:
        raise MalformedCallError("no JSON object with a name")
    _check_shape(body, form)
    parsed = form.parse(body, tools)
    calls = [_own_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    if not calls or (form.unit and body.count(form.unit) > len(calls)):
        raise MalformedCallError("a call that the parser passed over")
    if form.is_python and _passed_over(body, len(calls)):
        raise MalformedCallError("an argument without a name")
    known = {tool["function"]["name"] for tool in tools}
    if any(call.name not in known and _is_guess(call, form) for call in calls):
        raise MalformedCallError("words that are no call")
    return calls


def _check_shape(body: str, form: ToolFormat) -> None:
    """Refuse what mlx-lm's parser would need long for, or would read half of."""
    for opening, closing in form.tags:
        tags = re.findall(f"{re.escape(opening)}|{re.escape(closing)}", body)
        if tags != [opening, closing] * (len(tags) // 2):
            raise MalformedCallError("a tag that is not closed")
    if form.opening and body.count(form.opening) * len(body) > _MOST_READ:
        raise MalformedCallError("more than can be read in time")
    if form.has_gemma_strings:
        braces = re.findall(r"[{}]", _GEMMA_STRING.sub("", body))
        depths = list(accumulate(1 if brace == "{" else -1 for brace in braces))
        if depths and (depths[-1] != 0 or min(depths) < 0):
            raise MalformedCallError("a brace that is not closed")
    if form.guesses and form.tags[0][0] not in body and len(body) > _MOST_WORDS:
        raise MalformedCallError("words that are no call")


def _own_call(parsed: Any) -> Call:
    if not isinstance(parsed, Mapping):
        raise MalformedCallError("a call that is no object")
    name, arguments, call_id = parsed.get("name"), parsed.get("arguments", {}), parsed.get("id")
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("a call without a name")
    if not isinstance(arguments, Mapping):
        raise MalformedCallError("arguments that are no object")
    return Call(name, _dump(arguments), call_id if isinstance(call_id, str) and call_id else None)


def _is_guess(call: Call, form: ToolFormat) -> bool:
    """Whether a parser may have made a call of plain words."""
    if _NAME.fullmatch(call.name) is None:
        return True
    return form.guesses and (call.arguments == "{}" or call.arguments.startswith('{"raw": '))


def _passed_over(body: str, calls: int) -> bool:
    """Whether there is more in a list of Python calls than calls with named arguments."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # mlx-lm has searched it for what looks like a call
        return body.count("(") > calls
    listed = tree.elts if isinstance(tree, ast.List) else [tree]
    return any(not isinstance(one, ast.Call) or bool(one.args) for one in listed)


def _dump(value: Any) -> str:
    mark = secrets.token_hex(8)  # nobody can foresee it
    marked = _marked(value, mark)
    text = json.dumps(marked, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        text = json.dumps(marked, allow_nan=False)
    return text.replace(f'"{mark}-"', f"-{_INFINITE}").replace(f'"{mark}"', _INFINITE)


def _marked(value: Any, mark: str) -> Any:
    """Mark numbers that no float holds: JSON has them, and Python's encoder writes none."""
    if isinstance(value, float) and math.isinf(value):
        return mark if value > 0 else f"{mark}-"
    if isinstance(value, dict):
        return {key: _marked(inner, mark) for key, inner in value.items()}
    return [_marked(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


# -- JSON ----------------------------------------------------------------------------------


def _refuse(constant: str) -> Any:
    raise MalformedCallError(f"{constant} is no JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse)
# Models write line breaks into strings as they are.
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _json_calls(body: str) -> list[Call]:
    """Read one object or a list of them; nothing where the text is no JSON."""
    text = body.strip()
    try:
        value, end = _LENIENT.raw_decode(text)
    except json.JSONDecodeError:
        return []
    if end != len(text):
        return []
    if isinstance(value, list):
        return [_spelled_call(_as_call(call), own) for call, own in _elements(text)]
    spelled = _as_call(value)
    if not isinstance(spelled["name"], str) or not isinstance(spelled["arguments"], dict):
        return []  # another form of JSON, which the model's own parser may know
    return [_spelled_call(spelled, text)]


def _elements(text: str) -> Iterator[tuple[Any, str]]:
    """Each element of a whole list, and its text."""
    at = _skip(text, 1)
    while text[at] != "]":
        value, end = _LENIENT.raw_decode(text, at)
        yield value, text[at:end]
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at


def _spelled_call(spelled: dict[str, Any], text: str) -> Call:
    call = _own_call(spelled)
    return call._replace(arguments=_own_text(text, spelled["arguments"]))


def _call_of(name: str, text: str) -> Call:
    """Make a call of its arguments, as the model wrote them where that is strict JSON."""
    arguments = _LENIENT.decode(text)
    read = _own_call({"name": name, "arguments": arguments})
    try:
        _STRICT.decode(text)
    except json.JSONDecodeError:
        return read
    return read._replace(arguments=text)


def _as_call(value: Any) -> dict[str, Any]:
    """Bring the spellings of a call together: Llama's `parameters`, arguments in a string."""
    if not isinstance(value, dict):
        raise MalformedCallError("a call that is no object")
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        arguments = _LENIENT.decode(arguments)
    return {"name": value.get("name"), "arguments": arguments, "id": value.get("id")}


def _own_text(text: str, arguments: Mapping[str, Any]) -> str:
    """Find the arguments as the model wrote them, where that is strict JSON."""
    for key in _ARGUMENTS:
        span = _member(text, key)
        if span is not None and span[:1] == '"':
            span = str(_LENIENT.decode(span)).strip()
        if span is not None and span[:1] == "{":
            try:
                _STRICT.decode(span)
            except json.JSONDecodeError:
                break
            return span
    return _dump(arguments)


def _member(text: str, wanted: str) -> str | None:
    """The text of the last member of that name in a whole object."""
    found, at = None, _skip(text, 1)
    while text[at] == '"':
        key, at = _LENIENT.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        _, at = _LENIENT.raw_decode(text, begin)
        if key == wanted:
            found = text[begin:at]
        at = _skip(text, _skip(text, at) + 1)
        if at >= len(text):
            break
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
