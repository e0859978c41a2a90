"""A LangChain agent whose messages are a window, on the bundled model. Runs on a CPU, downloads nothing."""

import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from PIL import Image

from ctxwin import open_engine
from ctxwin.tiny import world
from langchain_ctxwin import ChatCtxwin, WindowMiddleware

frames = world.make_stream(seed=3, n_frames=10)  # stands in for your camera
with (
    open_engine("tiny") as engine,
    tempfile.TemporaryDirectory() as folder,
    ChatCtxwin(engine=engine, max_tokens=4, allowed_local_media_path=folder) as model,
):
    slides = WindowMiddleware(trigger=("messages", 10), keep=("messages", 6), recall=False)
    agent = create_agent(model, tools=[], system_prompt="You watch a camera.", middleware=[slides])
    messages = []
    for second, frame in enumerate(frames):
        path = Path(folder, f"{second}.png")
        Image.fromarray(world.render(frame)).save(path)
        question = world.question_about(frames, second).text
        messages.append(HumanMessage([f"t={second} s\n", {"type": "image", "path": str(path)}, question]))
        messages = agent.invoke({"messages": messages})["messages"]  # all of them, always: the middleware deletes none
        usage = messages[-1].usage_metadata
        read = usage["input_token_details"]["cache_read"]
        print(f"t={second}: {question} {messages[-1].text}, {read} of {usage['input_tokens']} tokens reused")
