from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from steps import SYSTEM, base64_of, read, run, text_part

task = read()
model = ChatAnthropic(model="tiny", base_url=task.url, api_key="none", temperature=0, max_tokens=4, max_retries=0)
cached: list[int] = []


def part(picture: str) -> dict[str, object]:
    return {"type": "image", "base64": base64_of(picture), "mime_type": "image/png"}


def ask(pictures: list[str], question: str) -> str:
    made = model.invoke([SystemMessage(SYSTEM), HumanMessage([*map(part, pictures), text_part(question)])])
    cached.append(made.usage_metadata["input_token_details"]["cache_read"])
    return made.text


run(ask, task)
assert sum(cached) > 0, "langchain-anthropic reports no cached tokens"
