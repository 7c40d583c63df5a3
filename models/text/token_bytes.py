"""Bytes of each token of a vocabulary, and the text of an answer's tokens."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


class TokenBytes:
    """Bytes of a vocabulary's tokens, cached. Safe to use from any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, a in added.items() if a.special)
        decoder = tokenizer.decoder
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        kinds = set(_decoder_kinds(state))
        self._byte_level = kinds == {"ByteLevel"}
        self._byte_fallback = "ByteFallback" in kinds
        # Decoders strip the first space of a text, so later tokens are decoded after this one,
        # whose text does not depend on the next token.
        self._before = next(
            (t for w in ("a", "A", "0", ".") if (t := tokenizer.token_to_id(w)) is not None), None
        )
        self._within: dict[int, bytes | None] = {}

    def read(
        self, token: int, *, first: bool, visible: frozenset[int] = frozenset()
    ) -> bytes | None:
        """Read the bytes that `token` adds to a text, which it begins if it is `first`.

        Returns:
            Bytes, not always whole characters; None for unknown tokens, and for special tokens that
            are not `visible`.
        """
        if first or token in visible:
            return self._read(token, first=first, visible=visible)
        if token not in self._within:
            self._within[token] = self._read(token, first=False, visible=frozenset())
        return self._within[token]

    def _read(self, token: int, *, first: bool, visible: frozenset[int]) -> bytes | None:
        special = token in self.special
        word = self._tokenizer.id_to_token(token)
        if word is None or (special and token not in visible):
            return None
        return word.encode() if special else self._read_word(token, word, first=first)

    def _read_word(self, token: int, word: str, *, first: bool) -> bytes:
        if self._byte_level:
            try:
                return bytes(_BYTES[letter] for letter in word)
            except KeyError:  # an added token, written as it is
                return word.encode()
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(word)):
            return bytes([int(byte[1], 16)])
        if first or self._before is None:
            return self._decode(token).encode()
        before = self._decode(self._before)
        return self._decode(self._before, token).removeprefix(before).encode()

    def _decode(self, *tokens: int) -> str:
        return str(self._tokenizer.decode(tokens))


class Detokenizer:
    """Decodes an answer token by token, and never emits half a character.

    An answer that ends inside a character loses it. Invalid UTF-8 becomes U+FFFD. Special tokens
    have no text unless they are visible.

    `tokenizers`' DecodeStream would lose the text before half a character in the same token and a
    U+FFFD at the end, and raises on invalid UTF-8 in a byte-fallback vocabulary.
    """

    def __init__(
        self, token_bytes: TokenBytes, visible: frozenset[int], *, continues: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._visible = visible
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues

    @property
    def inside_character(self) -> bool:
        """True if the last token ended inside a character."""
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        """Decode a token; return the text that is now certain, often empty."""
        data = self._token_bytes.read(token, first=self._first, visible=self._visible)
        if data is None:
            return ""
        self._first = False
        return self._utf8.decode(data)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _decoder_kinds(state: Mapping[str, Any]) -> Iterator[str]:
    for part in state.get("decoders", ()):
        yield from _decoder_kinds(part)
    if (kind := state.get("type", "Sequence")) != "Sequence":
        yield kind


def _byte_level_letters() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes; a printable byte is its own letter."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level_letters()


def without_blank(text: str) -> str:
    """Change a tokenizer.json so that it writes no blank before a text."""
    state = json.loads(text)
    for key, listed in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        part = state.get(key) or {}
        for each in part.get(listed, [part]):
            match each.get("type"):
                case "Prepend":
                    each["prepend"] = ""
                case "Metaspace":
                    each["prepend_scheme"] = "never"
                    each.pop("add_prefix_space", None)
                case "ByteLevel":
                    each["add_prefix_space"] = False
    return json.dumps(state)
