"""Answers drawn at random from a grammar, token by token, with what is hard to read among them."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from umbel.models.params import Grammar
from umbel.models.text.codec import TextCodec

_LONGEST = 1500  # tokens
_RANDOM = 60  # from here on a walk makes for the end
_TRIED = 0.3  # of the steps write a text as far as it is allowed

HARD = (
    *("null", "NULL", "None", "True", "false", "1e999", "9" * 30, "-0", "[", "{", "}", "'", '"'),
    *("<tool_call>", "</tool_call>", "<", "</", "\n", " ", "\\", "é", "世", "\u2028", "\xa0", "#"),
    *('{"a": [1, null]}', "[1]", '"x"', "0x1f", "2026-02-30", '{"name": "f", "arguments": {}}'),
)


def walk(codec: TextCodec, grammar: Grammar, seed: int, hard: Sequence[str] = ()) -> str | None:
    """Draw an answer.

    Args:
        codec: of the model.
        grammar: of the answer.
        seed: the same one gives the same answer.
        hard: texts that are tried besides; what ends values should be among them.

    Returns:
        None where the walk has not come to an end.
    """
    drawn = random.Random(seed)  # noqa: S311  (not a secret)
    matcher, tokens = grammar.matcher(), list[int]()
    texts = [codec.encode(text, special_tokens=False) for text in (*HARD, *hard)]
    closing = [codec.encode(text, special_tokens=False) for text in (*hard, '"', "}", "]")]
    for step in range(_LONGEST):
        if matcher.is_complete:
            break
        free = step < _RANDOM
        for wanted in _next(drawn, texts if free else closing, free=free):
            allowed = _allowed(matcher.mask())
            token = drawn.choice(allowed) if wanted is None else wanted
            if not free and (ends := codec.eos_ids.intersection(allowed)):
                token = min(ends)
            if token not in allowed:
                break
            if token in codec.eos_ids:
                return _text(codec, tokens)
            matcher.consume(token)
            tokens.append(token)
            if matcher.is_complete:
                break
    return _text(codec, tokens) if matcher.is_complete else None


def follow(codec: TextCodec, grammar: Grammar, text: str) -> str:
    """Write a text token by token: `complete`, `may end`, `goes on`, or where it is not allowed."""
    matcher = grammar.matcher()
    for token in codec.encode(text, special_tokens=False):
        if not allows(matcher.mask(), token):
            return "not allowed"
        matcher.consume(token)
    if matcher.is_complete:
        return "complete"
    mask = matcher.mask()
    ends = {allows(mask, eos) for eos in codec.eos_ids}
    assert len(ends) == 1
    return "may end" if ends.pop() else "goes on"


def allows(mask: Any, token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


def _next(drawn: random.Random, texts: Sequence[list[int]], *, free: bool) -> Iterator[int | None]:
    if drawn.random() < (_TRIED if free else 0.8):
        yield from drawn.choice(texts)
    else:
        yield None


def _allowed(mask: np.ndarray) -> list[int]:
    return list(map(int, np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))


def _text(codec: TextCodec, tokens: Sequence[int]) -> str:
    detokenizer = codec.detokenizer(codec.special_tokens)
    return "".join(map(detokenizer.push, tokens))
