"""Messages of Anthropic's protocol to those of a conversation."""

import re
from typing import Literal

import msgspec
from msgspec import Raw

from ...models.text.conversation import Message, ToolCall
from ..decoding import decode_part
from ..failures import APIError
from ..quoting import quote
from .messages_blocks import (
    Blocks,
    Placed,
    TextBlock,
    ThinkingBlock,
    ToolAdditionBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
    read_blocks,
    text_in,
    texts_of,
)
from .messages_signature import hidden_in

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
        removed: names of tools that are not offered any more.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
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

    def system(self, texts: list[str]) -> None:
        """Take a system prompt; the one outside the messages comes first."""
        if told := joined(map(without_billing, texts)):
            self._append(Message(role="system", content=told))

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

    def _append(self, message: Message) -> None:
        self.messages.append(message)
        self._turns.append(self._turn)

    def _assistant(self, blocks: Placed) -> None:
        """One message, however its parts were mixed: that is what templates can render."""
        calls = [_call(block) for _, block in blocks if isinstance(block, ToolUseBlock)]
        self._called.update({call.id: call.name for call in calls})
        thoughts = [
            block.thinking or hidden_in(block.signature)
            for _, block in blocks
            if isinstance(block, ThinkingBlock)
        ]
        self._append(
            Message(
                role="assistant",
                content="".join(b.text for _, b in blocks if isinstance(b, TextBlock)),
                reasoning="".join(thoughts),
                tool_calls=calls,
            )
        )

    def _user(self, blocks: Placed) -> None:
        """Results of calls, and then what the user says."""
        results = [(p, b) for p, b in blocks if isinstance(b, ToolResultBlock)]
        said = [
            (p, b) for p, b in self._without_changes(blocks) if not isinstance(b, ToolResultBlock)
        ]
        self._turn += not results
        for place, result in results:
            self._append(self._result(place, result))
        if said or not blocks:
            self._append(Message(role="user", content=joined(texts_of(said))))

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
        text = text_in(result.content or "", "tool result", f"{place}.content")
        return Message(
            role="tool",
            content=f"Error: {text}" if result.is_error else text,
            tool_call_id=called,
            name=self._called[called],
        )


def _call(block: ToolUseBlock) -> ToolCall:
    arguments = msgspec.json.encode(block.input).decode()
    return ToolCall(id=block.id, name=block.name, arguments=arguments)
