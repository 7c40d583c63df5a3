"""Text to tokens and back, and a prompt's text by the chat template."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from ..errors import ModelLoadError, TemplateError, TemplateTimeoutError
from ..load.time_limit import TEMPLATE_LIMIT, within
from .control import ControlText
from .conversation import Conversation
from .formats import OutputFormat, read_format
from .harmony import ENDS, is_harmony
from .template import ChatTemplate
from .token_bytes import Detokenizer, TokenBytes, without_blank

Message = Mapping[str, Any]
"""A chat message as templates take it: `role`, `content` and the role's own entries."""


class TokenText(NamedTuple):
    """The text of one token."""

    text: str  # with U+FFFD for bytes that are no UTF-8; a special token's name
    data: bytes | None  # None for unknown and invisible special tokens, which write nothing


class TextCodec:
    """A model's tokenizer and chat template. Safe to call from several threads at once.

    Encoding uses the Rust tokenizer: transformers' own `encode` changes settings of padding and
    truncation, and is not thread-safe.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper` of the model's tokenizer.
        rows: tokens that the model has an embedding of; None for all.

    Raises:
        ModelLoadError: the tokenizer has no fast (Rust) form.
    """

    def __init__(self, tokenizer: Any, rows: int | None = None) -> None:
        self._wrapper = tokenizer
        try:
            self._fast = tokenizer.backend_tokenizer
        except AttributeError as error:
            raise ModelLoadError("the model's tokenizer has no tokenizer.json form") from error
        # tokenizer.json may hold limits of a training script, which would cut prompts.
        self._fast.no_truncation()
        self._fast.no_padding()
        # Some models' settings leave out the ends of a harmony answer.
        ends = ENDS[1:] if is_harmony(tokenizer.chat_template) else ()
        ids = {self._fast.token_to_id(end) for end in ends} - {None}
        self.eos_ids: frozenset[int] = frozenset(tokenizer.eos_token_ids) | ids
        self.longest_token: int = max(map(len, self._fast.get_vocab()))
        # A vocabulary may have holes: its highest token counts.
        self.vocab_size: int = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        self.embedded: int = min(self.vocab_size, rows or self.vocab_size)  # usable in prompts
        self._token_bytes = TokenBytes(self._fast)

    @cached_property
    def template(self) -> ChatTemplate:
        """The model's form of conversations and answers."""
        return ChatTemplate(self.render_chat, self._form, self.control)

    @cached_property
    def _form(self) -> OutputFormat:
        return read_format(self._wrapper, self.added_tokens, self._template_source() or "")

    @cached_property
    def control(self) -> ControlText:
        """Names of special tokens, and of added tokens in the template or the format."""
        source, markers = self._template_source(), self._form.markers
        texts = [source or "", *markers]
        added = [
            token
            for token in self._fast.get_added_tokens_decoder().values()
            if token.special or source is None or any(token.content in text for text in texts)
        ]
        normalizer = self._fast.normalizer
        folds = normalizer is not None and any(token.normalized for token in added)
        names = (token.content for token in added)
        return ControlText(names, normalizer.normalize_str if folds else None)

    def _template_source(self) -> str | None:
        """Return the template's text; None if it is a program of mlx-lm's."""
        match self._wrapper.chat_template:
            case str() as source:
                return source
            case dict() as named:
                return "".join(map(str, named.values()))
        return None if self.has_chat_template else ""

    @cached_property
    def markup_tokens(self) -> frozenset[int]:
        """Special tokens of markup: an `OutputParser` must see their text."""
        form, call_text = self.template.form, self.template.abilities.call_text
        markers = {t for m in form.markers for t in self.encode(m, special_tokens=False)}
        inside = set(self.encode(call_text, special_tokens=False)) - self.eos_ids
        return self._token_bytes.special & (markers | inside)

    @property
    def special_tokens_by_name(self) -> dict[str, int]:
        """Tokens that write nothing, by their names."""
        added = self._fast.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """Texts that the tokenizer never cuts, including special tokens' names."""
        return frozenset(t.content for t in self._fast.get_added_tokens_decoder().values())

    def to_json(self, *, without_prefix: bool = False) -> str:
        """Write the tokenizer as tokenizer.json; `without_prefix`, no blank precedes a text."""
        text: str = self._fast.to_str()  # megabytes, parsed only if needed
        return without_blank(text) if without_prefix and not self.encodes_apart else text

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._wrapper.has_chat_template)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render messages with the model's chat template.

        `tools` are in OpenAI's form; `options` are further variables of the template.

        Raises:
            TemplateError: the model has no template, or its template refuses the messages.
            TemplateTimeoutError: the rendering exceeds the time limit.
        """
        if not self.has_chat_template:
            raise TemplateError("this model has no chat template; use /v1/completions")
        render = partial(
            self._wrapper.apply_chat_template,
            [dict(m) for m in messages],
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **({"tools": list(tools)} if tools else {}),
            **options,
        )
        try:
            return str(within(TEMPLATE_LIMIT, render))
        except TimeoutError as error:
            words = f"the model's chat template takes more than {TEMPLATE_LIMIT:g} seconds"
            raise TemplateTimeoutError(f"{words} for these messages") from error
        except OSError:
            raise  # no file descriptor was free: a fault of the machine, not of the messages
        except Exception as error:  # a template is a program: it may raise anything
            words = f"the model's chat template refuses these messages: {error}"
            raise TemplateError(self.control.plain(words)) from error

    def encode_conversation(
        self, conversation: Conversation, *, generation_prompt: bool = True
    ) -> list[int]:
        """Render a conversation and encode the result; raise as `ChatTemplate.render` does.

        The template writes its own special tokens, so that none are added.
        """
        text = self.template.render(conversation, generation_prompt=generation_prompt)
        return self.encode(text, special_tokens=False)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Encode text, with the model's own prefix (such as `<s>`) if it has one.

        The text is encoded as a batch of one: only batches release Python's lock. Broken names of
        control tokens are encoded as text.
        """
        if self.control.is_marked(text):
            return self.encode_pieces([text])[0]
        batch = self._fast.encode_batch_fast([text], add_special_tokens=special_tokens)
        return list(batch[0].ids)

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that follow each other, without the model's own prefix."""
        cut = [self.control.pieces(text) for text in texts]
        first, *others = [piece for pieces in cut for piece in pieces]
        encoded = self._fast.encode_batch_fast([first], add_special_tokens=False)
        encoded += self._behind.encode_batch_fast(others, add_special_tokens=False)
        left = iter(encoded)
        return [[token for _ in pieces for token in next(left).ids] for pieces in cut]

    @cached_property
    def _behind(self) -> Any:
        if self.encodes_apart:
            return self._fast
        return FastTokenizer.from_str(self.to_json(without_prefix=True))

    @cached_property
    def encodes_apart(self) -> bool:
        """True if a text's tokens write that text wherever they stand.

        False if the tokenizer writes a blank before each text.
        """
        tokens = self.encode("x", special_tokens=False)
        return b"".join(self._token_bytes.read(t, first=False) or b"" for t in tokens) == b"x"

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that write nothing unless they are visible."""
        return self._token_bytes.special

    def beyond_embedding(self, tokens: Sequence[int]) -> str | None:
        """Name a token of a prompt that the model has no embedding of, if there is one."""
        if self.embedded == self.vocab_size or max(tokens, default=0) < self.embedded:
            return None
        return str(self._fast.id_to_token(max(tokens)))

    def read_token(
        self, token: int, *, first: bool, visible: frozenset[int] = frozenset()
    ) -> TokenText:
        """Read the text that `token` adds; see `TokenBytes.read`."""
        data = self._token_bytes.read(token, first=first, visible=visible)
        if data is None:
            return TokenText(self._fast.id_to_token(token) or "", None)
        return TokenText(data.decode(errors="replace"), data)

    def detokenizer(
        self, visible: frozenset[int] = frozenset(), *, continues: bool = False
    ) -> Detokenizer:
        """Start to decode an answer, or one that `continues` a text.

        Visible special tokens write their names.
        """
        return Detokenizer(self._token_bytes, visible, continues=continues)
