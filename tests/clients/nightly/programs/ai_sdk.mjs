// The AI SDK over TCP in four protocols: chat, stream, a tool and structured output.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // it would announce them on standard output
const tasks = JSON.parse(process.argv[2]);
const baseURL = `${process.env.URL}/v1`;
const apiKey = "unused";
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({
  name: "umbel",
  baseURL,
  apiKey,
  supportsStructuredOutputs: true,
});
const models = {
  compatible: compatible("default"),
  chat: openai.chat("default"),
  responses: openai.responses("default"),
  messages: createAnthropic({ baseURL, apiKey })("default"),
};
const Weather = z.object({ city: z.string(), degrees: z.number().int() });

async function piecesOf(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

async function doTasks(model, structured) {
  const cities = [];
  const tools = {
    get_weather: tool({
      description: "Tell the weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        cities.push(city);
        return `21 degrees in ${city}`;
      },
    }),
  };
  const stopWhen = stepCountIs(3);
  const using = { model, prompt: tasks.tools, tools, stopWhen };
  const streamed = streamText(using);
  return {
    chat: (await generateText({ model, prompt: tasks.chat })).text,
    stream: await piecesOf(streamText({ model, prompt: tasks.chat }).textStream),
    tools: (await generateText(using)).text,
    streamed_tools: (await piecesOf(streamed.textStream)).join(""),
    cities,
    structured: (
      await generateText({
        model,
        prompt: structured,
        output: Output.object({ schema: Weather }),
      })
    ).output,
  };
}

const results = {};
for (const [name, model] of Object.entries(models)) {
  // For models that are not Claude by name, its structured output is a call of a tool.
  const structured = name === "messages" ? tasks.json : tasks.structured;
  results[name] = await doTasks(model, structured);
}
console.log(JSON.stringify(results));
