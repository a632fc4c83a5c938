"""A server whose engine repeats prompts: `python indiscreet_server.py MODE PORT`.

`prints`: it prints the prompt and dies of it. `echoes`: its error quotes the request, as FastAPI's do.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def indiscreet_runner(mode: str) -> dict[str, Any]:
    """A runner section with one such model, named like the mode; its own name is short, as its socket needs."""
    command = [sys.executable, str(Path(__file__)), mode, "{port}"]
    return {"name": mode[0], "runtime": "server", "models": [{"name": mode, "command": command}]}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": sys.argv[1]}]})

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        words = messages[-1]["content"]
        if sys.argv[1] == "prints":
            sys.stdout.write(f"Received request cmpl-1: prompt: {words}\n")
            sys.stdout.flush()
            sys.stderr.write(f"RuntimeError: out of memory while handling {words}\n")
            os._exit(1)
        fault = {"type": "string_type", "loc": ["body"], "msg": "Input should be a valid string", "input": messages}
        self._answer(422, {"detail": [fault]})

    def log_message(self, *_: object) -> None:
        """Its own log would not have the prompt."""

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), _Handler).serve_forever()
