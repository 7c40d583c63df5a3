"""The clients of OpenAI and Anthropic over TCP, asynchronous: streamed tools in three dialects."""

import asyncio
import json
import os
import sys
from typing import Any

from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI

TASKS = json.loads(sys.argv[1])
URL = os.environ["URL"]
MODEL = "default"

DESCRIPTION = {
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"21 degrees in {city}"


async def chat(client: AsyncOpenAI) -> str:
    """Chat completions."""
    messages: list[Any] = [{"role": "user", "content": TASKS["tools"]}]
    tools: list[Any] = [{"type": "function", "function": DESCRIPTION}]
    while True:
        async with client.chat.completions.stream(
            model=MODEL, messages=messages, tools=tools
        ) as stream:
            answer = (await stream.get_final_completion()).choices[0].message
        if not answer.tool_calls:
            return answer.content
        messages.append(answer.to_dict())
        for call in answer.tool_calls:
            content = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def responses(client: AsyncOpenAI) -> str:
    """Responses: the daemon keeps the conversation."""
    items: Any = TASKS["tools"]
    previous = None
    while True:
        async with client.responses.stream(
            model=MODEL,
            input=items,
            tools=[{"type": "function", **DESCRIPTION}],
            previous_response_id=previous,
        ) as stream:
            answer = await stream.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        previous = answer.id
        items = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": get_weather(**json.loads(call.arguments)),
            }
            for call in calls
        ]


async def messages(client: AsyncAnthropic) -> str:
    """Messages: the client itself runs the tools."""

    @beta_async_tool(name="get_weather", description="Tell the weather of a city.")
    async def tool(city: str) -> str:
        return get_weather(city)

    answer = await client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": TASKS["tools"]}],
        tools=[tool],
    ).until_done()
    return answer.content[0].text


async def main() -> None:
    """Do the task in all dialects at once and print what came of it."""
    async with (
        AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused") as openai,
        AsyncAnthropic(base_url=URL, api_key="unused") as anthropic,
    ):
        answers = await asyncio.gather(chat(openai), responses(openai), messages(anthropic))
    print(json.dumps(dict(zip(("chat", "responses", "messages"), answers, strict=True))))


asyncio.run(main())
