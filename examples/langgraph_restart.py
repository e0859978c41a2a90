"""A LangGraph thread that outlives its process: SqliteSaver for the state, a disk store for the KV. Run it again to go on.

python examples/langgraph_restart.py watch    # three seconds of the bundled model's world, and a question about each
python examples/langgraph_restart.py watch    # another process goes on where the first one ended
"""

import argparse
import base64
import io
from pathlib import Path

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from PIL import Image

from ctxwin import open_engine
from ctxwin.tiny import world
from langchain_ctxwin.langgraph import DeltaWindowState, WindowContext, WindowNode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", nargs="?", type=Path, default="watch", help="of threads and KV; default: %(default)s")
folder = parser.parse_args().folder
folder.mkdir(parents=True, exist_ok=True)
stream = world.make_stream(seed=3, n_frames=30)  # stands in for your camera


def picture(frame: world.Frame) -> dict[str, str]:
    """A frame as an image block of a message."""
    png = io.BytesIO()
    Image.fromarray(world.render(frame)).save(png, "PNG")
    return {"type": "image", "base64": base64.b64encode(png.getvalue()).decode(), "mime_type": "image/png"}


with (
    open_engine("tiny:hf", store=f"disk:{folder / 'kv'}") as engine,
    SqliteSaver.from_conn_string(str(folder / "threads.sqlite")) as saver,
):
    # DeltaWindowState: a checkpoint holds the new messages, not all of them.
    graph = StateGraph(DeltaWindowState, context_schema=WindowContext)
    # keep_media=False: a picture leaves the messages once the window holds it, and its name stays.
    graph.add_node(WindowNode(system_prompt="You watch a camera.", budget=600, max_tokens=4, keep_media=False))
    graph.add_edge(START, "window")
    app = graph.compile(checkpointer=saver)
    thread = {"configurable": {"thread_id": "porch"}}
    done = sum(isinstance(m, HumanMessage) for m in app.get_state(thread).values.get("messages", []))
    if done == len(stream):
        print(f"the clip of {done} seconds is over; delete {folder} to begin again")
    for second in range(done, min(done + 3, len(stream))):
        question = world.question_about(stream, second).text
        message = HumanMessage([{"type": "text", "text": f"t={second} s\n"}, picture(stream[second]), question])
        state = app.invoke({"messages": [message]}, thread, context=WindowContext(engine))
        usage = state["messages"][-1].usage_metadata
        reused, size = usage["input_token_details"]["cache_read"], len(saver.serde.dumps_typed(state)[1])
        print(
            f"t={second}: {question} {state['messages'][-1].text}, {reused} of {usage['input_tokens']} reused, {size} bytes"
        )
