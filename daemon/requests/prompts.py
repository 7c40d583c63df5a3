"""Bodies become tokens, on the workers' threads: read, rendered, encoded, with boundaries.

Earlier answers stand in the prompts of later turns token for token as they were generated.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from ...cachestore.checkpoints import Reason
from ...models.load.loader import LoadedModel
from ...models.params import Grammar
from ...models.text import boundaries
from ...models.text.codec import TextCodec
from ...models.text.conversation import Constraint, Conversation, Message, Tool
from ...models.text.events import PlainParser
from ...models.text.grammar.compiler import GrammarCompiler
from ...models.text.history import (
    Answer,
    AnswerStore,
    Lineage,
    Miss,
    encode_prompt,
    read_answer,
)
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
from .workers import Check

_COUNT_LIMIT_OVER_CONTEXT = 65_536  # tokens of a prompt that is only counted
_TOKENS_AT_ONCE = 1024
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_PROMPT_END = 2000  # characters: the beginning of an answer, as the template writes it
_ANSWERS_BUDGET = 32 << 20  # bytes of answers that are remembered: about 700,000 tokens

Remember = Callable[[Sequence[int], CollectedAnswer], None]
"""Takes the tokens of an answer, and the answer that the client got."""

log = structlog.get_logger()


class Author(NamedTuple):
    """A prompt's tenant, and the request's id for the log."""

    tenant: str
    request_id: str


class Rendered(NamedTuple):
    """A prompt's tokens, and how its answers are read."""

    prompt: list[int]
    boundaries: Sequence[tuple[int, Reason]] = ()  # the offsets in it that a next turn keeps
    parser: Callable[[], Parser] = PlainParser  # makes the parser of one answer
    markup: frozenset[int] = frozenset()  # special tokens whose text the parser must see
    grammar: Grammar | None = None  # that the answer must match
    remember: Remember | None = None  # keeps an answer for the prompt of the next turn
    continues: bool = False  # the answer goes on from the prompt's text


class Prepared(NamedTuple):
    """A request that is ready for the engine, and its prompts."""

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
        self._most_counted = admission.context_length + _COUNT_LIMIT_OVER_CONTEXT

    def prepare(self, body: GenerationBody, author: Author, check: Check) -> Prepared:
        """Read a body to its tokens.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: a prompt cannot fit.
        """
        self._admission.check_text(body.least_characters, self._text.longest_token)
        request = body.generation_request(check)
        # Unset fields have the values that the model's makers recommend.
        unset = {name: value for name, value in self._sampling.items() if not body.sets(name)}
        if unset:
            request.sampling = msgspec.structs.replace(request.sampling, **unset)
        check_sampling(request.sampling, self._text.vocab_size)
        prompts = []
        for prompt in request.prompts:
            check()
            prompts.append(self._render(prompt, request.constraint, author, check))
        return Prepared(request, prompts)

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
        """Encode a prompt that needs no answer.

        Args:
            prompt: to be encoded.
            special_tokens: a text gets those that the tokenizer adds.

        Raises:
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: it is far beyond the context.
        """
        if isinstance(prompt, str):
            tokens = self._encoded(prompt, special_tokens=special_tokens)
        else:
            self._check_size(prompt)
            tokens = self._embedded(self._text.encode_conversation(prompt))
        if len(tokens) > self._most_counted:
            self._admission.answer_length(len(tokens), None)
        return tokens

    def text(self, tokens: list[int], check: Check) -> str:
        """Return the text of tokens, special ones by their names; U+FFFD for what is no UTF-8.

        Raises:
            APIError: there is no such token, or there are too many.
        """
        if len(tokens) > self._most_counted:
            message = f"there are over {self._most_counted} tokens; send fewer"
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
        prompt, encode = self._history.encode(conversation, text, author)
        self._embedded(prompt)
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
            A prompt that has it, and its end there; None if the template does not tell.
        """
        self._admission.check_text(len(text), self._text.longest_token)
        messages = [Message(role="system", content=text), Message(role="user", content="1")]
        conversation = Conversation(messages=messages)
        prompt = self._embedded(self._text.encode_conversation(conversation))
        check()
        end = boundaries.find(self._text.encode_conversation, conversation, prompt).system
        ends = [] if end is None else [(end, Reason.SYSTEM)]
        return Rendered(prompt, ends), end

    def _check_size(self, conversation: Conversation) -> None:
        """Refuse a conversation that cannot fit, before a template makes one text of it.

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
        return self._embedded(self._text.encode(text, special_tokens=special_tokens))

    def _embedded(self, tokens: list[int]) -> list[int]:
        """Return a prompt's tokens; raises APIError if the model has no embedding of one."""
        if (name := self._text.beyond_embedding(tokens)) is not None:
            message = f"the prompt has {name}, and the model has no embedding of that token"
            raise APIError(400, message, param="prompt")
        return tokens


class History:
    """Remembers answers for one model, and puts them into prompts. Any thread may use it."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._answers = AnswerStore(_ANSWERS_BUDGET)

    def encode(
        self, conversation: Conversation, text: str, author: Author
    ) -> tuple[list[int], boundaries.Encode]:
        """Encode a conversation, which the template renders as `text`.

        If its last answer cannot stand as it was generated, the log says so.

        Returns:
            The tokens, and a function that encodes conversations with the same answers.
        """
        found = self._answers.find(author.tenant, conversation.messages)
        encode = partial(self._encode, answers=found)
        if not found:
            return self._codec.encode(text, special_tokens=False), encode
        prompt = encode_prompt(self._codec, conversation, found, own=text)
        last = max(found)
        for miss in prompt.misses:
            if miss.message == last:
                self._log_drift(conversation, prompt.tokens, found, miss, author.request_id)
        return prompt.tokens, encode

    def _encode(
        self,
        conversation: Conversation,
        *,
        generation_prompt: bool = True,
        answers: dict[int, Answer],
    ) -> list[int]:
        if not answers:
            return self._codec.encode_conversation(
                conversation, generation_prompt=generation_prompt
            )
        return encode_prompt(
            self._codec, conversation, answers, generation_prompt=generation_prompt
        ).tokens

    def _log_drift(
        self,
        conversation: Conversation,
        prompt: Sequence[int],
        answers: dict[int, Answer],
        miss: Miss,
        request_id: str,
    ) -> None:
        """Log at which token a prompt leaves the generated ones."""
        before = msgspec.structs.replace(
            conversation, messages=conversation.messages[: miss.message]
        )
        generated = [*self._encode(before, answers=answers), *answers[miss.message].tokens]
        pairs = enumerate(zip(generated, prompt, strict=False))
        token = next((i for i, (a, b) in pairs if a != b), min(len(generated), len(prompt)))
        log.info(
            "history drift",
            request=request_id,
            message=miss.message,
            token=token,
            lost=len(generated) - token,
            reason=miss.reason,
        )

    def remember(
        self,
        tenant: str,
        before: Lineage,
        tools: Sequence[Tool],
        prompt_end: str,
        tokens: Sequence[int],
        answer: CollectedAnswer,
    ) -> None:
        """Remember an answer under the message that its client will send back.

        Args:
            tenant: that got it.
            before: the messages of its prompt.
            tools: those that its calls were looked for with.
            prompt_end: the end of its prompt's text.
            tokens: generated, without the token that ended it.
            answer: that the client got.
        """
        # Without calls for the client, text that looks like one was held to be content.
        read = read_answer(self._codec, tokens, tools if answer.calls else [], prompt_end)
        if read is not None:
            message = Message(role="assistant", content=answer.text, tool_calls=answer.calls)
            self._answers.put(tenant, before.key(message), read)
