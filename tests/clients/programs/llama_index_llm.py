from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from steps import SYSTEM, read, run

task = read()
model = OpenAILike(
    model="tiny",
    api_base=f"{task.url}/v1",
    api_key="none",
    is_chat_model=True,
    temperature=0,
    max_tokens=4,
    max_retries=0,
)


def ask(pictures: list[str], question: str) -> str:
    blocks = [*(ImageBlock(url=picture) for picture in pictures), TextBlock(text=question)]
    answer = model.chat([ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", blocks=blocks)])
    return answer.message.content or ""


run(ask, task)
