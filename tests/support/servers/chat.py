# SPDX-License-Identifier: Apache-2.0
"""A chat-completions server for tests: HTTP on a local port, answers from a function, failures on demand."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

Body = dict[str, Any]


def chat(text: str | None, *, finish: str | None = "stop", logprobs: Mapping[str, float] | None = None) -> Body:
    """A chat.completion object with one choice."""
    choice: Body = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if logprobs is not None:
        top = [{"token": token, "logprob": value, "bytes": None} for token, value in logprobs.items()]
        first = {**top[0], "top_logprobs": top} if top else {"token": "x", "logprob": -1.0, "top_logprobs": []}
        choice["logprobs"] = {"content": [first]}
    return {"object": "chat.completion", "model": "tiny", "choices": [choice]}


def sent_images(body: Body) -> list[np.ndarray]:
    """The images of a request as uint8 [H, W, 3], in order."""
    parts = [
        part for message in body["messages"] if isinstance(message["content"], list) for part in message["content"]
    ]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [np.array(Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1])))) for url in urls]


def words(body: Body) -> str:
    """The texts of a request, joined."""
    texts = []
    for message in body["messages"]:
        content = message["content"]
        texts += (
            [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        )
    return "\n".join(texts)


class ChatStub:
    """The server's answers, and its requests."""

    def __init__(self, answer: Callable[[Body], Any]) -> None:
        self.answer = answer
        self.asked: list[Body] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.url = ""
        self.closing = threading.Event()
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    def enter(self, path: str, key: str | None, body: Body) -> None:
        with self._lock:
            self.asked.append(body)
            self.keys.append(key)
            self.paths.append(path)
            self._running += 1
            self.most = max(self.most, self._running)

    def leave(self) -> None:
        with self._lock:
            self._running -= 1


def _handler(stub: ChatStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.enter(self.path, self.headers["Authorization"], body)
            try:
                self._answer(stub.answer(body))
            except ConnectionError:  # the client gave up
                return
            finally:
                stub.leave()

        def _answer(self, reply: Any) -> None:
            if reply == "!hang":
                stub.closing.wait(60)
            elif reply == "!drip":  # a byte now and then, for ever
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                while not stub.closing.wait(0.2):
                    self.wfile.write(b" ")
            elif reply == "!reset":  # the connection is torn down in the middle of an answer
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif reply != "!close":
                status, text, headers = reply if isinstance(reply, tuple) else (200, reply, {})
                raw = (text if isinstance(text, str) else json.dumps(text)).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    return Handler


class _Threads(ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error of the test."""


@contextmanager
def serving(answer: Callable[[Body], Any]) -> Iterator[ChatStub]:
    """Serve while the context lasts."""
    stub = ChatStub(answer)
    with _Threads(("127.0.0.1", 0), _handler(stub)) as http:
        stub.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield stub
        finally:
            stub.closing.set()
            http.shutdown()
            thread.join()
