import asyncio

from browser_use.llm.messages import ContentPartImageParam, ContentPartTextParam, ImageURL, SystemMessage, UserMessage
from browser_use.llm.openai.chat import ChatOpenAI
from steps import SYSTEM, read, run

task = read()


async def answer(pictures: list[str], question: str) -> str:
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{task.url}/v1",
        api_key="none",
        temperature=0,
        frequency_penalty=None,
        max_completion_tokens=4,
        max_retries=0,
    )
    shown = [ContentPartImageParam(image_url=ImageURL(url=p, media_type="image/png")) for p in pictures]
    content = [*shown, ContentPartTextParam(text=question)]
    return str((await model.ainvoke([SystemMessage(content=SYSTEM), UserMessage(content=content)])).completion)


def ask(pictures: list[str], question: str) -> str:
    return asyncio.run(answer(pictures, question))


run(ask, task)
