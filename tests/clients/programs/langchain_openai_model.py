from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from steps import SYSTEM, part_of_chat, read, run, text_part

task = read()
model = ChatOpenAI(model="tiny", base_url=f"{task.url}/v1", api_key="none", temperature=0, max_tokens=4, max_retries=0)
cached: list[int] = []


def ask(pictures: list[str], question: str) -> str:
    shown = [*map(part_of_chat, pictures), text_part(question)]
    made = model.invoke([SystemMessage(SYSTEM), HumanMessage(shown)])
    cached.append(made.usage_metadata["input_token_details"]["cache_read"])
    return made.text


run(ask, task)
assert sum(cached) > 0, "langchain-openai reports no cached tokens"
