"""Earlier answers in the prompts of later turns, token for token as they were generated."""

from collections.abc import Sequence
from functools import partial

import msgspec
import structlog

from ...models.text.boundaries import Encode
from ...models.text.codec import TextCodec
from ...models.text.conversation import Conversation, Message, Tool
from ...models.text.history import Answer, AnswerStore, Lineage, Miss, encode_prompt, read_answer
from .answer_reader import CollectedAnswer

_BUDGET = 32 << 20
"""Bytes of answers that are remembered: about 700,000 tokens."""

log = structlog.get_logger()


class History:
    """Remembers answers for one model, and puts them into prompts. Any thread may use it."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._answers = AnswerStore(_BUDGET)

    def encode(
        self, conversation: Conversation, text: str, tenant: str, request_id: str
    ) -> tuple[list[int], Encode]:
        """Encode a conversation, and say how others like it are encoded.

        Where its last answer cannot stand as it was generated, the log says so.

        Args:
            conversation: its answers may have been generated here.
            text: as the template renders it.
            tenant: who sent it, and got them.
            request_id: for the log.
        """
        found = self._answers.find(tenant, conversation.messages)
        encode = partial(self._encode, answers=found)
        if not found:
            return self._codec.encode(text, special_tokens=False), encode
        prompt = encode_prompt(self._codec, conversation, found, own=text)
        last = max(found)
        for miss in prompt.misses:
            if miss.message == last:
                self._tell(conversation, prompt.tokens, found, miss, request_id)
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

    def _tell(
        self,
        conversation: Conversation,
        prompt: Sequence[int],
        answers: dict[int, Answer],
        miss: Miss,
        request_id: str,
    ) -> None:
        """Log at which token a prompt leaves what was generated."""
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
        """Remember an answer under what its client will send back of it.

        Args:
            tenant: who got it.
            before: of its prompt.
            tools: those that its calls were looked for with.
            prompt_end: the end of its prompt's text.
            tokens: what was generated, without the token that ended it.
            answer: what the client got.
        """
        # Where the client got none, what looks like a call may be content that was held to be so.
        read = read_answer(self._codec, tokens, tools if answer.calls else [], prompt_end)
        if read is not None:
            message = Message(role="assistant", content=answer.text, tool_calls=answer.calls)
            self._answers.put(tenant, before.key(message), read)
