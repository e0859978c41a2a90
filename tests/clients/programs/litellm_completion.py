import litellm
from steps import SYSTEM, part_of_chat, read, run, text_part

task = read()
cached: list[int] = []


def ask(pictures: list[str], question: str) -> str:
    made = litellm.completion(
        model="hosted_vllm/tiny",
        api_base=f"{task.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=4,
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [*map(part_of_chat, pictures), text_part(question)]},
        ],
    )
    cached.append(made.usage.prompt_tokens_details.cached_tokens)
    return made.choices[0].message.content or ""


run(ask, task)
assert sum(cached) > 0, "litellm reports no cached tokens"
