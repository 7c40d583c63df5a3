"""Messages of Anthropic's protocol to those of a conversation."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Raw

from ...models.text.conversation import CacheHint, Message, ToolCall
from ..http.decoding import decode_part
from ..http.failures import APIError
from ..quoting import quote
from .cache_control import marked
from .messages_blocks import (
    RESULT,
    Blocks,
    Placed,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    is_marked,
    read_blocks,
    text_in,
    texts_of,
)
from .signature import hidden_in
from .tools import arguments_text

# Claude Code's first line: it differs from request to request, and what follows is the same.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


class MessageParam(msgspec.Struct):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str | Blocks


def without_billing(text: str) -> str:
    """Take the line away that keeps prompts apart that are the same."""
    return text[found.end() :] if (found := _BILLING.match(text)) else text


class MessageReader:
    """Reads messages one after the other, and knows which calls results can refer to.

    Attributes:
        messages: what has become of those that were read.
        hints: where blocks of theirs end that are marked for the cache.
        removed: names of tools that are not offered any more.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.hints: list[CacheHint] = []
        self.removed: set[str] = set()
        self._turns: list[int] = []  # of each message: how many turns of the user's come before
        self._turn = 0
        self._called: dict[str, str] = {}

    def add(self, raw: Raw, place: str) -> None:
        """Read the next message.

        Raises:
            APIError: 400, naming the block at fault.
        """
        message = decode_part(raw, MessageParam, place)
        blocks = read_blocks(message.content, message.role, f"{place}.content")
        match message.role:
            case "assistant":
                self._assistant(blocks)
            case "user":
                self._user(blocks)
            case "system":
                self.system(texts_of(self._without_changes(blocks)))

    def system(self, texts: Sequence[tuple[str, bool]]) -> None:
        """Take a system prompt; the one outside the messages comes first.

        Args:
            texts: each with whether it is marked for the cache.
        """
        plain = ((without_billing(text), is_end) for text, is_end in texts)
        told, ends = marked(plain, between="\n")
        if told:
            self._append(Message(role="system", content=told), ends)

    def keep_thinking(self, turns: int) -> None:
        """Forget what was thought before so many of the last turns in which anything was."""
        thought = {
            turn
            for turn, message in zip(self._turns, self.messages, strict=True)
            if message.reasoning
        }
        kept = sorted(thought)[-turns:]
        for turn, message in zip(self._turns, self.messages, strict=True):
            if turn not in kept:
                message.reasoning = ""

    def _append(self, message: Message, ends: Iterable[int] = ()) -> None:
        """Add a message; blocks of it that are marked end after so many of its characters."""
        index = len(self.messages)
        self.hints += [CacheHint(index, end) for end in ends if end or not message.content]
        self.messages.append(message)
        self._turns.append(self._turn)

    def _assistant(self, blocks: Placed) -> None:
        """One message, however its parts were mixed: that is what templates can render."""
        calls = [_call(block) for _, block in blocks if isinstance(block, ToolUseBlock)]
        self._called.update({call.id: call.name for call in calls})
        thoughts = [
            block.thinking or hidden_in(block.signature or "")
            for _, block in blocks
            if isinstance(block, ThinkingBlock)
        ]
        texts = [
            ((block.text or "") if isinstance(block, TextBlock) else "", is_marked(block))
            for _, block in blocks
        ]
        content, ends = marked(texts, between="")
        self._append(
            Message(
                role="assistant",
                content=content,
                reasoning="".join(thoughts),
                tool_calls=calls,
            ),
            ends,
        )

    def _user(self, blocks: Placed) -> None:
        """Results of calls, and then what the user says."""
        results = [(p, b) for p, b in blocks if isinstance(b, ToolResultBlock)]
        said = [
            (p, b) for p, b in self._without_changes(blocks) if not isinstance(b, ToolResultBlock)
        ]
        self._turn += not results
        for place, result in results:
            message = self._result(place, result)
            self._append(message, [len(message.content)] if is_marked(result) else [])
        if said or not blocks:
            content, ends = marked(texts_of(said), between="\n")
            self._append(Message(role="user", content=content), ends)

    def _without_changes(self, blocks: Placed) -> Placed:
        """Note which tools are offered from here on."""
        left = []
        for place, block in blocks:
            match block:
                case ToolAdditionBlock():
                    self.removed.discard(block.tool.name)
                case ToolRemovalBlock():
                    self.removed.add(block.tool.name)
                case _:
                    left.append((place, block))
        return left

    def _result(self, place: str, result: ToolResultBlock) -> Message:
        called = result.tool_use_id
        if called not in self._called:
            message = (
                f"{place} is the result of a call {quote(called)} that no message before it "
                "asks for; send the assistant's message with that tool_use too"
            )
            raise APIError(400, message, param=f"{place}.tool_use_id")
        text = text_in(result.content or "", RESULT, f"{place}.content")
        return Message(
            role="tool",
            content=f"Error: {text}" if result.is_error else text,
            tool_call_id=called,
            name=self._called[called],
        )


def _call(block: ToolUseBlock) -> ToolCall:
    return ToolCall(id=block.id, name=block.name, arguments=arguments_text(block.input))
