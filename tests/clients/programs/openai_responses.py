from openai import OpenAI
from steps import SYSTEM, read, run

task = read()
client = OpenAI(base_url=f"{task.url}/v1", api_key="none", max_retries=0)


def ask(pictures: list[str], question: str) -> str:
    shown = [{"type": "input_image", "image_url": picture, "detail": "auto"} for picture in pictures]
    made = client.responses.create(
        model="tiny",
        instructions=SYSTEM,
        temperature=0,
        max_output_tokens=4,
        input=[{"role": "user", "content": [*shown, {"type": "input_text", "text": question}]}],
    )
    return made.output_text


run(ask, task)
