"""A shop whose pages are pictures of the bundled model's world, served over a loopback port.

A page is a colour chart (things of a shape have its colour until the next chart) or a shelf of grey things. The browser
composes it from two CSS sprite sheets, as web pages do; its first screen equals ``world.render(frame)`` pixel by pixel.
"""

from __future__ import annotations

import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Self

import numpy as np
from PIL import Image
from web.pages import Pages

from ctxwin.tiny import world
from ctxwin.tiny.sprites import CELL, FRAME, N_APPEARANCES, N_MARKS, digits, sprites

HERE = Path(__file__).parent
JITTERS = 9


class Shop:
    """Pages ``/0``, ``/1``, ... in a row. A context manager: the server runs inside it."""

    side = FRAME  # pixels of a page's first screen, which the model reads

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._files = {
            "/style.css": ("text/css", (HERE / "style.css").read_bytes()),
            "/sprites.png": (
                "image/png",
                _png(sprites().transpose(0, 2, 3, 1, 4, 5).reshape(-1, N_APPEARANCES * CELL, 3)),
            ),
            "/marks.png": ("image/png", _png(_ink())),
            **{f"/{page}": ("text/html", self._html(page).encode()) for page in range(len(pages))},
        }

    @property
    def url(self) -> str:
        """Of the first page."""
        return f"http://127.0.0.1:{self._server.server_port}/0"

    def _html(self, page: int) -> str:
        frame, cells = self._pages.frames[page], []
        for shape, look, jitter, mark in zip(
            frame.shape.flat, frame.appearance.flat, frame.jitter.flat, frame.mark.flat, strict=True
        ):
            place = f"0 {-mark * CELL}px,{-look * CELL}px {-(shape * JITTERS + jitter) * CELL}px"
            plain = " class=plain" if mark == world.NO_MARK else ""
            cells.append(f'<i{plain} style="background-position:{place}"></i>')
        ways = {"Back": page - 1, "Next": page + 1}
        links = [f'<a href="/{to}">{name}</a>' for name, to in ways.items() if 0 <= to < len(self._pages)]
        template = Template((HERE / "page.html").read_text())
        return template.substitute(title=self._pages.title(page), cells="".join(cells), links="".join(links))

    def __enter__(self) -> Self:
        files = self._files

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind, body = files.get(self.path, ("text/plain", b"no such page"))
                self.send_response(200 if self.path in files else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Requests do not belong between the lines of an agent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _ink() -> np.ndarray:
    """All numbers, one below the other, black on transparent."""
    ink = np.zeros((N_MARKS * CELL, CELL, 4), np.uint8)
    ink[..., 3] = digits()[:N_MARKS].reshape(-1, CELL) * 255
    return ink


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
