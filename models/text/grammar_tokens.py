"""A model's tokens as llguidance takes them."""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
from tokenizers import Tokenizer

from ..errors import GrammarError
from .codec import TextCodec

_MARK = b"\xff"  # llguidance's own, for special tokens; no UTF-8 has this byte


def grammar_tokenizer(codec: TextCodec) -> Any:
    """Build llguidance's tokenizer for a model.

    Special tokens are the codec's and those that end answers: they write nothing, and grammars
    match them by number. All others match by what they write, added ones included. llguidance's
    own reading of tokenizer.json takes every added token for a special one, and published
    tokenizers have `<tool_call>` or line breaks among those.

    Raises:
        GrammarError: the tokenizer cannot be held to a grammar.
    """
    try:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(codec)),
            n_vocab=codec.vocab_size,
            eos_token=sorted(codec.eos_ids),
        )
    except Exception as error:  # its own choice, and a panic's message
        words = f"this model's tokenizer cannot be held to a grammar: {error}"
        raise GrammarError(words) from error


class _Tokens:
    """The tokenizer that llguidance asks. It encodes text that a grammar forces."""

    bos_token_id = None

    def __init__(self, codec: TextCodec) -> None:
        self.eos_token_id = min(codec.eos_ids)
        self.special_token_ids = sorted(codec.special_tokens | codec.eos_ids)
        self.tokens = [_written(codec, token) for token in range(codec.vocab_size)]
        text = codec.to_json()  # megabytes, which are parsed only where they must be
        text = text if codec.encodes_apart else without_prefix(text)
        self._tokenizer = Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True  # their names are text

    def __call__(self, text: bytes | str) -> Sequence[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = batch[0].ids
        return ids


def _written(codec: TextCodec, token: int) -> bytes:
    text, data = codec.read_token(token, first=False)
    data = text.encode() if data is None else data
    return b"" if data.startswith(_MARK) else data


def without_prefix(text: str) -> str:
    """Change a tokenizer.json so that no blank is written before a text."""
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
