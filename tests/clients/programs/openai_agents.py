from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
from steps import SYSTEM, read, run

task = read()
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0)
agent = Agent(
    name="watcher",
    instructions=SYSTEM,
    model=OpenAIChatCompletionsModel("tiny", client),
    model_settings=ModelSettings(temperature=0, max_tokens=4),
)


def ask(pictures: list[str], question: str) -> str:
    shown = [{"type": "input_image", "image_url": picture, "detail": "auto"} for picture in pictures]
    content = [*shown, {"type": "input_text", "text": question}]
    return str(Runner.run_sync(agent, [{"role": "user", "content": content}]).final_output)


run(ask, task)
