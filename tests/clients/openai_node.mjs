// Every scenario with the real `openai` package for Node. Prints one JSON object: scenario → what was seen.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "hi there" }];
const tools = [
  { type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } } },
];
const image = { type: "image_url", image_url: { url: process.env.IMAGE } };
const schema = { name: "City", strict: true, schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } };

async function plain() {
  const { data, request_id } = await client.chat.completions.create({ model: "m", messages }).withResponse();
  return { text: data.choices[0].message.content, tokens: data.usage.completion_tokens, request_id };
}

async function stream() {
  const chunks = await client.chat.completions.create({ model: "m", messages, stream: true, stream_options: { include_usage: true } });
  let text = "", tokens = null;
  for await (const chunk of chunks) {
    text += chunk.choices[0]?.delta.content ?? "";
    tokens = chunk.usage?.completion_tokens ?? tokens;
  }
  return { text, tokens };
}

async function helper() {
  const runner = client.chat.completions.stream({ model: "m", messages, stream_options: { include_usage: true } });
  const answer = await runner.finalChatCompletion();
  return { text: answer.choices[0].message.content, tokens: answer.usage.completion_tokens };
}

async function calls() {
  const answer = await client.chat.completions.create({ model: "m@calls", messages, tools });
  const call = answer.choices[0].message.tool_calls[0].function;
  return { name: call.name, arguments: JSON.parse(call.arguments) };
}

async function streamed_calls() {
  const runner = client.chat.completions.stream({ model: "m@calls", messages, tools });
  const call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0].function;
  return { name: call.name, arguments: JSON.parse(call.arguments) };
}

async function parsed() {
  const answer = await client.chat.completions.parse({
    model: "m@json", messages, response_format: { type: "json_schema", json_schema: schema },
  });
  return { city: answer.choices[0].message.parsed.city };
}

async function picture() {
  const content = [{ type: "text", text: "what is it" }, image];
  const { data, request_id } = await client.chat.completions.create({ model: "m", messages: [{ role: "user", content }] }).withResponse();
  return { text: data.choices[0].message.content, request_id };
}

async function responses() {
  const answer = await client.responses.create({ model: "m", input: "hi there" });
  return { text: answer.output_text, tokens: answer.usage.output_tokens };
}

async function streamed_responses() {
  const runner = client.responses.stream({ model: "m", input: "hi there" });
  const answer = await runner.finalResponse();
  return { text: answer.output_text, tokens: answer.usage.output_tokens };
}

async function refused() {
  try {
    await client.chat.completions.create({ model: "unknown", messages });
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, request_id: error.requestID };
  }
}

async function broken() {
  const chunks = await client.chat.completions.create({ model: process.env.BROKEN_MODEL, messages, stream: true });
  let text = "";
  try {
    for await (const chunk of chunks) text += chunk.choices[0]?.delta.content ?? "";
  } catch (error) {
    return { text, code: error.code };
  }
}

async function cancelled() {
  const { data, request_id } = await client.chat.completions.create({ model: "m@slow-chunks", messages, stream: true }).withResponse();
  let seen = 0;
  for await (const chunk of data) {
    seen += chunk.choices[0]?.delta.content ? 1 : 0;
    if (seen === 5) break; // leaving the loop aborts the request
  }
  return { seen, request_id };
}

const scenarios = { plain, stream, helper, calls, streamed_calls, parsed, picture, responses, streamed_responses, refused, broken, cancelled };
const found = {};
for (const [name, run] of Object.entries(scenarios)) {
  try {
    found[name] = await run();
  } catch (error) {
    found[name] = { failed: String(error.stack ?? error) };
  }
}
console.log(JSON.stringify(found));
