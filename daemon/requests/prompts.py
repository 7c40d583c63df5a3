"""Bodies to tokens, on the workers' threads: read, render, encode, find boundaries."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ...cachestore.checkpoints import Reason
from ...models.load.loader import LoadedModel
from ...models.params import Grammar
from ...models.text import boundaries
from ...models.text.conversation import Constraint, Conversation, Message
from ...models.text.events import PlainParser
from ...models.text.grammar.compiler import GrammarCompiler
from ...models.text.history import Lineage
from ...models.text.output import OutputParser
from ...scheduler.limits import Admission
from ..http.failures import APIError
from ..protocols.generation_request import (
    GenerationBody,
    GenerationRequest,
    Prompt,
    check_sampling,
    check_tokens,
)
from .answer_grammar import conversation_grammar, text_grammar
from .answer_reader import CollectedAnswer, Parser
from .history import History
from .workers import Check

_TOLD_BEYOND = 65_536  # tokens of a prompt that is only counted, beyond the context
_TOKENS_AT_ONCE = 1024
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_PROMPT_END = 2000  # characters: the beginning of an answer, as the template writes it


Remember = Callable[[Sequence[int], CollectedAnswer], None]
"""Takes what was generated for an answer, and what the client got of it."""


class Author(NamedTuple):
    """Whose prompt it is: the tenant, and the request's id for the log."""

    tenant: str
    request_id: str


class Rendered(NamedTuple):
    """A prompt's tokens, and how what answers it is read.

    Attributes:
        prompt: its tokens.
        boundaries: the offsets in it that a next turn keeps.
        parser: makes what reads one answer.
        markup: special tokens whose text the parser must see.
        grammar: what the answer is held to, if it is.
        remember: keeps an answer for the prompt of the next turn; None where there is none.
        continues: the answer goes on from the prompt's text, and does not begin one.
    """

    prompt: list[int]
    boundaries: Sequence[tuple[int, Reason]] = ()
    parser: Callable[[], Parser] = PlainParser
    markup: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    remember: Remember | None = None
    continues: bool = False


class Prepared(NamedTuple):
    """A request that is ready for the engine.

    Attributes:
        request: what is wanted.
        prompts: one for each of its prompts.
    """

    request: GenerationRequest
    prompts: list[Rendered]


class PromptReader:
    """Turns decoded bodies into tokens, for one loaded model. Called on workers' threads."""

    def __init__(self, loaded: LoadedModel, admission: Admission) -> None:
        self._text = loaded.text
        self._sampling = loaded.sampling
        self._compiler = GrammarCompiler(loaded.text)
        self._history = History(loaded.text)
        self._has_checkpoints = loaded.layout.has_checkpoints
        self._admission = admission
        self._most_told = admission.context_length + _TOLD_BEYOND

    def prepare(self, body: GenerationBody, author: Author, check: Check) -> Prepared:
        """Read a body to its tokens.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: a prompt cannot fit.
        """
        self._admission.check_text(body.least_characters, self._text.longest_token)
        request = self._with_defaults(body.generation_request(check), body)
        check_sampling(request.sampling, self._text.vocab_size)
        prompts = []
        for prompt in request.prompts:
            check()
            prompts.append(self._render(prompt, request.constraint, author, check))
        return Prepared(request, prompts)

    def _with_defaults(self, request: GenerationRequest, body: GenerationBody) -> GenerationRequest:
        """Choose tokens as the model's makers would, where the body says nothing."""
        unset = {name: value for name, value in self._sampling.items() if not body.sets(name)}
        if unset:
            request.sampling = msgspec.structs.replace(request.sampling, **unset)
        return request

    def _render(
        self, prompt: Prompt, constraint: Constraint | None, author: Author, check: Check
    ) -> Rendered:
        if isinstance(prompt, Conversation):
            return self._conversation(prompt, constraint, author, check)
        if isinstance(prompt, str):
            tokens = self._encoded(prompt)
        else:
            tokens = prompt
            if tokens:  # an empty one is refused in other words
                self._admission.answer_length(len(tokens), None)
            check_tokens(tokens, self._text.embedded)
        check()
        grammar = text_grammar(self._compiler, constraint, author.tenant)
        continues = any(token not in self._text.special_tokens for token in tokens)
        return Rendered(tokens, grammar=grammar, continues=continues)

    def tokens(self, prompt: Conversation | str, *, special_tokens: bool) -> list[int]:
        """Turn a prompt into tokens that nothing has to answer.

        Args:
            prompt: what is encoded.
            special_tokens: whether a text gets those that the tokenizer adds.

        Raises:
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: it is far beyond the context.
        """
        if isinstance(prompt, str):
            tokens = self._encoded(prompt, special_tokens=special_tokens)
        else:
            self._check_size(prompt)
            tokens = self._known(self._text.encode_conversation(prompt))
        if len(tokens) > self._most_told:
            self._admission.answer_length(len(tokens), None)
        return tokens

    def text(self, tokens: list[int], check: Check) -> str:
        """Say what tokens write, special ones by their names; U+FFFD for what is no UTF-8.

        Raises:
            APIError: there is no such token, or there are too many.
        """
        if len(tokens) > self._most_told:
            message = f"there are over {self._most_told} tokens; send fewer"
            raise APIError(400, message, param="tokens")
        check_tokens(tokens, self._text.vocab_size, "tokens")
        written = bytearray()
        for index, token in enumerate(tokens):
            if index % _TOKENS_AT_ONCE == 0:
                check()
            text, data = self._text.read_token(token, first=not written)
            written += text.encode() if data is None else data
        return written.decode(errors="replace")

    def _conversation(
        self,
        conversation: Conversation,
        constraint: Constraint | None,
        author: Author,
        check: Check,
    ) -> Rendered:
        """Encode a conversation; find its boundaries if the model needs checkpoints there."""
        self._check_size(conversation)
        template = self._text.template
        text = template.render(conversation)
        characters = len(self._text.control.plain(text))
        self._admission.check_text(characters, self._text.longest_token)
        check()
        prompt, encode = self._history.encode(conversation, text, *author)
        self._known(prompt)
        check()
        opened = template.opens_reasoning(text)
        grammar, guaranteed, constrained = conversation_grammar(
            self._compiler, template, conversation, constraint, author.tenant, opened=opened
        )
        tools = conversation.tools if conversation.tool_choice.mode != "none" else []
        parser = partial(
            OutputParser,
            template.form,
            tools=tools,
            tool_choice=conversation.tool_choice,
            in_reasoning=opened,
            guaranteed=guaranteed,
            constrained=constrained,
        )
        before, end = Lineage(conversation.messages), text[-_PROMPT_END:]
        remember = partial(self._history.remember, author.tenant, before, tools, end)
        check()
        ends = self._boundaries(encode, conversation, prompt, check)
        return Rendered(prompt, ends, parser, self._text.markup_tokens, grammar, remember)

    def _boundaries(
        self,
        encode: boundaries.Encode,
        conversation: Conversation,
        prompt: list[int],
        check: Check,
    ) -> list[tuple[int, Reason]]:
        if not self._has_checkpoints:
            return []

        def rendered(
            conversation: Conversation, *, generation_prompt: bool = True
        ) -> Sequence[int]:
            check()
            return encode(conversation, generation_prompt=generation_prompt)

        found = boundaries.find(rendered, conversation, prompt)
        system = [] if found.system is None else [(found.system, Reason.SYSTEM)]
        messages = [(end, Reason.MESSAGE) for end in found.messages]
        return [*system, *messages, *((end, Reason.HINT) for end in found.hints)]

    def system_prompt(self, text: str, check: Check) -> tuple[Rendered, int | None]:
        """Render a system prompt as requests begin with it.

        Returns:
            A prompt that has it, and where it ends there; None where that cannot be told.
        """
        self._admission.check_text(len(text), self._text.longest_token)
        messages = [Message(role="system", content=text), Message(role="user", content="1")]
        conversation = Conversation(messages=messages)
        prompt = self._known(self._text.encode_conversation(conversation))
        check()
        end = boundaries.find(self._text.encode_conversation, conversation, prompt).system
        ends = [] if end is None else [(end, Reason.SYSTEM)]
        return Rendered(prompt, ends), end

    def _check_size(self, conversation: Conversation) -> None:
        """Refuse what cannot fit, before a template makes one text of it.

        Reasoning does not count: templates drop it.
        """
        characters = sum(
            len(m.content) + sum(len(call.arguments) for call in m.tool_calls)
            for m in conversation.messages
        )
        for tool in conversation.tools:
            # Without blanks, and a character is four bytes at most: no template writes less.
            size = len(msgspec.json.encode(tool.parameters)) // _LONGEST_CHARACTER
            characters += len(tool.description) + size
        self._admission.check_text(characters, self._text.longest_token)

    def _encoded(self, text: str, *, special_tokens: bool = True) -> list[int]:
        self._admission.check_text(len(text), self._text.longest_token)
        return self._known(self._text.encode(text, special_tokens=special_tokens))

    def _known(self, tokens: list[int]) -> list[int]:
        """Give a prompt's tokens back, or refuse them.

        Raises:
            APIError: the model has no embedding of one.
        """
        if (name := self._text.beyond_embedding(tokens)) is not None:
            message = f"the prompt has {name}, and the model has no embedding of that token"
            raise APIError(400, message, param="prompt")
        return tokens
