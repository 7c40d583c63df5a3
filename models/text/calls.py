"""The text between a call's markers: the model's own form, or JSON."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from .formats import ToolFormat

_ARGUMENTS = ("arguments", "parameters")
_GEMMA_STRING = re.compile(r'<\|"\|>.*?<\|"\|>', re.DOTALL)
_MOST_WORDS = 4096  # of a call without tags, where the parser guesses
_MOST_READ = 200_000_000  # characters, of a parser that reads a text repeatedly
_NAME = re.compile(r"[^\s<>{}()\[\]\"']{1,256}")
_WORD = re.compile(r'"(?:[^"\\]|\\.)*+"|NaN|Infinity')


class _Quirks(NamedTuple):
    """Checks before one of mlx-lm's parsers reads a text.

    The parsers silently skip a call or an argument that they cannot read, and their patterns take
    quadratic time if tags are not closed: seconds for 16 KB.
    """

    unit: str = ""  # beginning of each call, for a parser that skips calls
    tags: Sequence[tuple[str, str]] = ()  # of calls and arguments; they must alternate
    opening: str = ""  # the parser may read all text again for each of these


def _tags(*names: str) -> list[tuple[str, str]]:
    return [(f"<{name}", f"</{name.rstrip(' =>')}>") for name in names]


_KIMI = [(f"<|open|>{tag}", f"<|close|>{tag}<|sep|>") for tag in ("call", "argument", "json")]
_QUIRKS = {
    "function_gemma": _Quirks("call:"),
    "gemma4": _Quirks(opening='<|"|>'),
    "glm47": _Quirks(tags=[*_tags("arg_key>"), ("<arg_key>", "</arg_value>")]),
    "kimi_k2": _Quirks(tags=[("<|tool_call_begin|>", "<|tool_call_end|>")]),
    "kimi_k3": _Quirks("<|open|>call ", _KIMI),
    "longcat": _Quirks(
        tags=[*_tags("longcat_arg_key>"), ("<longcat_arg_key>", "</longcat_arg_value>")]
    ),
    "minicpm5": _Quirks(tags=_tags("param ")),
    "minimax_m2": _Quirks("<invoke name=", _tags("invoke ", "parameter ")),
    "muse_spark": _Quirks(tags=_tags("atem:invoke ", "atem:parameter ")),
    "pythonic": _Quirks(opening="["),
    "qwen3_coder": _Quirks("<function=", _tags("function=", "parameter=")),
}
_NONE = _Quirks()
_GUESSES = "glm47"  # its parser may take plain words for a call without arguments


class Call(NamedTuple):
    """A call; its name is not empty. `arguments` is a JSON object as the model wrote it."""

    name: str
    arguments: str
    id: str | None = None


class MalformedCallError(ValueError):
    """The text between the markers is no call."""


def read_calls(body: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> Sequence[Call]:
    """Read the calls in the text between two markers.

    JSON is read whatever the model's own form is. A call of an unknown tool is a call too: agents
    answer it, and the model corrects itself. Forms without types use the tools' schemas.

    Raises:
        MalformedCallError: it holds no call, or other text besides.
    """
    try:
        if form.called:
            text = body.strip()
            call = _own_call({"name": form.called, "arguments": _LENIENT.decode(text)})
            return [call if _strict(text) is None else call._replace(arguments=text)]
        if body.lstrip()[:1] in ("{", "[") and (found := _json_calls(body)):
            return found
        return _own_calls(body, form, tools)
    except MalformedCallError:
        raise
    except Exception as error:  # a parser may raise anything for a bad text
        raise MalformedCallError(str(error)) from error


def _own_calls(body: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> Sequence[Call]:
    if form.parse is None:
        raise MalformedCallError("no JSON object with a name")
    quirks = _QUIRKS.get(form.name, _NONE)
    _check_shape(body, form, quirks)
    parsed = form.parse(body, tools)
    calls = [_own_call(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    if not calls or (quirks.unit and body.count(quirks.unit) > len(calls)):
        raise MalformedCallError("a call that the parser passed over")
    if form.name == "pythonic" and _passed_over(body, len(calls)):
        raise MalformedCallError("an argument without a name")
    known = {tool["function"]["name"] for tool in tools}
    if any(call.name not in known and _is_guess(call, form) for call in calls):
        raise MalformedCallError("words that are no call")
    return calls


def _check_shape(body: str, form: ToolFormat, quirks: _Quirks) -> None:
    """Refuse a text that mlx-lm's parser would read slowly, or read half of."""
    for opening, closing in quirks.tags:
        tags = re.findall(f"{re.escape(opening)}|{re.escape(closing)}", body)
        if tags != [opening, closing] * (len(tags) // 2):
            raise MalformedCallError("a tag that is not closed")
    if quirks.opening and body.count(quirks.opening) * len(body) > _MOST_READ:
        raise MalformedCallError("more than can be read in time")
    if form.name == "gemma4":
        braces = re.findall(r"[{}]", _GEMMA_STRING.sub("", body))
        depths = list(accumulate(1 if brace == "{" else -1 for brace in braces))
        if depths and (depths[-1] != 0 or min(depths) < 0):
            raise MalformedCallError("a brace that is not closed")
    if form.name == _GUESSES and quirks.tags[0][0] not in body and len(body) > _MOST_WORDS:
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
    """True if the parser may have made the call from plain words."""
    if _NAME.fullmatch(call.name) is None:
        return True
    return form.name == _GUESSES and (
        call.arguments == "{}" or call.arguments.startswith('{"raw": ')
    )


def _passed_over(body: str, calls: int) -> bool:
    """True if a list of Python calls has more than calls with named arguments."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # mlx-lm's parser searches it for calls
        return body.count("(") > calls
    listed = tree.elts if isinstance(tree, ast.List) else [tree]
    return any(not isinstance(one, ast.Call) or bool(one.args) for one in listed)


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair needs an escape
        text = json.dumps(value)
    return _WORD.sub(_finite, text)


def _finite(word: re.Match[str]) -> str:
    if word[0] == "NaN":
        raise MalformedCallError("NaN is no JSON")
    return "1e999" if word[0] == "Infinity" else word[0]


def _refuse(constant: str) -> Any:
    raise MalformedCallError(f"{constant} is no JSON")


# Models write line breaks into strings as they are.
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _strict(text: str | Raw, kind: Any = Raw) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _json_calls(body: str) -> list[Call]:
    """Read an object or a list of objects; nothing if the text is no JSON."""
    text = body.strip()
    try:
        value = _LENIENT.decode(text)
    except json.JSONDecodeError:
        return []
    if isinstance(value, list):
        texts = _strict(text, list[Raw]) or [""] * len(value)
        return [_spelled(_as_call(one), own) for one, own in zip(value, texts, strict=True)]
    call = _as_call(value)
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        return []  # the model's own parser may know this form of JSON
    return [_spelled(call, text)]


def _as_call(value: Any) -> dict[str, Any]:
    """Unify the spellings of a call: Llama's `parameters`, arguments in a string."""
    if not isinstance(value, dict):
        raise MalformedCallError("a call that is no object")
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        arguments = _LENIENT.decode(arguments)
    return {"name": value.get("name"), "arguments": arguments, "id": value.get("id")}


def _spelled(parsed: dict[str, Any], text: str | Raw) -> Call:
    """Make a call that keeps the model's own spelling if that is strict JSON."""
    call, members = _own_call(parsed), _strict(text, dict[str, Raw]) or {}
    own = next((bytes(members[key]).decode() for key in _ARGUMENTS if key in members), "")
    if own.startswith('"'):
        own = str(_LENIENT.decode(own)).strip()
    return call if not own.startswith("{") or _strict(own) is None else call._replace(arguments=own)
