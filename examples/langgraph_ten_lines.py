"""A LangGraph graph over a window, on the bundled model: a camera that is asked about. Runs on a CPU, downloads nothing."""

import base64
import io

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from PIL import Image

from ctxwin import open_engine
from ctxwin.tiny import world
from langchain_ctxwin.langgraph import WindowContext, WindowNode, WindowState


def picture(frame: world.Frame) -> dict[str, str]:
    """A frame as an image block of a message."""
    png = io.BytesIO()
    Image.fromarray(world.render(frame)).save(png, "PNG")
    return {"type": "image", "base64": base64.b64encode(png.getvalue()).decode(), "mime_type": "image/png"}


with open_engine("tiny") as engine:
    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(WindowNode(system_prompt="You watch a camera.", budget=600, max_tokens=4))
    graph.add_edge(START, "window")
    app = graph.compile(checkpointer=InMemorySaver())

    thread = {"configurable": {"thread_id": "porch"}}
    frames = world.make_stream(seed=3, n_frames=10)  # stands in for your camera
    for second, frame in enumerate(frames):
        question = world.question_about(frames, second).text
        message = HumanMessage([{"type": "text", "text": f"t={second} s\n"}, picture(frame), question])
        state = app.invoke({"messages": [message]}, thread, context=WindowContext(engine))
        answer, chunk_count = state["messages"][-1], len(state["window"]["placed"])
        usage = answer.usage_metadata["input_token_details"]["cache_read"], answer.usage_metadata["input_tokens"]
        print(
            f"t={second}: {question} {answer.text}, {usage[0]} of {usage[1]} tokens reused, {chunk_count} chunks placed"
        )
