import base64
import io

from PIL import Image
from smolagents import ChatMessage, MessageRole, OpenAIModel
from steps import SYSTEM, base64_of, read, run, text_part

task = read()
model = OpenAIModel("tiny", api_base=f"{task.url}/v1", api_key="none", temperature=0, max_tokens=4)


def part(picture: str) -> dict[str, object]:
    return {"type": "image", "image": Image.open(io.BytesIO(base64.b64decode(base64_of(picture))))}


def ask(pictures: list[str], question: str) -> str:
    messages = [
        ChatMessage(MessageRole.SYSTEM, [text_part(SYSTEM)]),
        ChatMessage(MessageRole.USER, [*map(part, pictures), text_part(question)]),
    ]
    return str(model.generate(messages).content)


run(ask, task)
