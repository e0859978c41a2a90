from pydantic_ai import Agent, ImageUrl, ModelSettings
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import SYSTEM, read, run

task = read()
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{task.url}/v1", api_key="none"))
agent = Agent(model, system_prompt=SYSTEM, model_settings=ModelSettings(temperature=0, max_tokens=4))


def ask(pictures: list[str], question: str) -> str:
    return agent.run_sync([*(ImageUrl(url=picture) for picture in pictures), question]).output


run(ask, task)
