"""A LangGraph graph over a window, on the bundled model: a camera that is asked about. Runs on a CPU, downloads nothing."""

import base64
import io

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from PIL import Image

from ctxwin import open_engine
from ctxwin.adapters.langgraph import WindowContext, WindowNode, WindowState
from ctxwin.tiny import world


def picture(frame: world.Frame) -> dict[str, str]:
    """A frame as an image block of a message."""
    png = io.BytesIO()
    Image.fromarray(world.render(frame)).save(png, "PNG")
    return {"type": "image", "base64": base64.b64encode(png.getvalue()).decode(), "mime_type": "image/png"}


with open_engine("tiny") as engine:
    graph = StateGraph(WindowState, context_schema=WindowContext)
    graph.add_node(WindowNode(header="You watch a camera.", budget=600, max_tokens=4))
    graph.add_edge(START, "window")
    app = graph.compile(checkpointer=InMemorySaver())

    thread = {"configurable": {"thread_id": "porch"}}
    for second, frame in enumerate(world.make_stream(seed=3, n_frames=10)):  # stands in for your camera
        question = f"color of {frame.marks[0]:02d}?"
        asked = HumanMessage([{"type": "text", "text": f"t={second} s\n"}, picture(frame), question])
        state = app.invoke({"messages": [asked]}, thread, context=WindowContext(engine))
        usage = state["messages"][-1].usage_metadata
        print(f"t={second}: {question} {state['messages'][-1].text}, {usage}, {len(state['window']['placed'])} placed")
