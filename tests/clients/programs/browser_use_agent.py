"""Four steps of a browser agent on a page of its own; what it answers is up to the model, that it is answered is not."""

import asyncio
import http.server
import json
import tempfile
import threading
from pathlib import Path

from browser_use import Agent, Browser
from browser_use.llm.openai.chat import ChatOpenAI
from steps import read

PAGE = b"<title>shop</title><h1>Shop</h1><a href='/two'>next</a><button>buy</button>"

task = read()


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        pass


async def main(address: str, folder: Path) -> None:
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{task.url}/v1",
        api_key="none",
        temperature=0,
        frequency_penalty=None,
        max_completion_tokens=200,
        max_retries=0,
    )
    browser = Browser(headless=True, chromium_sandbox=False, user_data_dir=folder, enable_default_extensions=False)
    agent = Agent(
        task="Buy what the shop sells.",
        llm=model,
        browser=browser,
        initial_actions=[{"navigate": {"url": address}}],
        override_system_message="You use a browser.",
        max_failures=4,
        use_judge=False,
        llm_screenshot_size=(448, 448),
        generate_gif=False,
    )
    history = await agent.run(max_steps=4)
    print(json.dumps([str(error) for error in history.errors()]))


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    asyncio.run(main(f"http://127.0.0.1:{server.server_port}/", Path(folder)))
server.shutdown()
