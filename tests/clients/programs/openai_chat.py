from openai import OpenAI
from steps import SYSTEM, part_of_chat, read, run, text_part

task = read()
client = OpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0)


def ask(pictures: list[str], question: str) -> str:
    made = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=4,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [*map(part_of_chat, pictures), text_part(question)]},
        ],
    )
    return made.choices[0].message.content or ""


run(ask, task)
