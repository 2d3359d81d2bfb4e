"""A server on the loopback that answers as an OpenAI-compatible one does, or misbehaves as told.

    with fake_server(script) as url: ...

``script(body, number)`` gets a request's JSON and its number from 0; it returns a text to answer with, a dict to
send as it is, or a `Bad`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Bad:
    """status, headers and body to send; hang: seconds before; cut: promise more bytes than are sent."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang: float = 0.0
    cut: bool = False
    drip: float = 0.0


@dataclass
class Server:
    url: str
    requests: list[dict[str, Any]]
    headers: list[dict[str, str]]
    at_once: list[int]


def completion(text: str, logprobs: list[tuple[str, float]] | None = None, finish: str = "stop") -> dict[str, Any]:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    if logprobs is not None:
        choice["logprobs"] = {"content": [{"token": t, "logprob": v} for t, v in logprobs]}
    return {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": max(1, len(text.split()))}}


@contextmanager
def fake_server(script: Callable[[dict[str, Any], int], Any]) -> Iterator[Server]:
    state = Server("", [], [], [0])
    lock, active = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections, as real servers do

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.requests)
                state.requests.append({**body, "path": self.path})
                state.headers.append(dict(self.headers))
                active[0] += 1
                state.at_once[0] = max(state.at_once[0], active[0])
            try:
                reply = script(body, number)
                if isinstance(reply, str):
                    reply = completion(reply)
                self.answer(reply if isinstance(reply, Bad) else Bad(body=json.dumps(reply).encode()))
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                with lock:
                    active[0] -= 1

        def answer(self, bad: Bad) -> None:
            time.sleep(bad.hang)
            self.send_response(bad.status)
            for name, value in bad.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(bad.body) + (100 if bad.cut or bad.drip else 0)))
            self.end_headers()
            self.wfile.write(bad.body)
            self.close_connection = bad.cut or bad.drip > 0
            for _ in range(100 if bad.drip else 0):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(bad.drip)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
