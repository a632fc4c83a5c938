"""The program: `python -m weft_testing.fake_mcp_server [--http | --bare] [switches]`.

With `--http` it listens on a free loopback port and prints it. With `--bare` it speaks JSON lines without the SDK,
which starts ten times faster and allows misbehavior that the SDK prevents. Otherwise it uses the SDK over standard
input and output.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# `hang` never answers, `deaf` stops reading, `crash` ends the process, `garbage` prints an invalid line before its
# answer, `endless` prints an endless line, `asks` sends requests without reading answers, `lists` returns how often the
# tools were listed.
TOOLS = ("echo", "crash", "hang", "garbage", "environment", "pid", "deaf", "endless", "asks", "lists")
_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


def main() -> None:
    """Serves until the input ends or a signal arrives."""
    parser = argparse.ArgumentParser(prog="fake_mcp_server")
    parser.add_argument("--http", action="store_true", help="streamable HTTP, the port printed as `port N`")
    parser.add_argument("--bare", action="store_true", help="without the SDK")
    parser.add_argument("--bad-schemas", action="store_true", help="offer tools that must be refused")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="offer N more tools")
    parser.add_argument("--chatter", action="store_true", help="print a megabyte to the standard error")
    parser.add_argument("--fail-first", type=Path, metavar="FILE", help="end at once unless FILE exists; create it")
    parser.add_argument(
        "--child", action="store_true", help="start a child in a session of its own that holds the output open"
    )
    parser.add_argument("--modern-only", action="store_true", help="refuse the handshake (not with --bare)")
    parser.add_argument(
        "--restless", action="store_true", help="say after every list of tools that they have changed (with --bare)"
    )
    options = parser.parse_args()
    if options.fail_first is not None and not options.fail_first.exists():
        options.fail_first.touch()
        sys.exit(3)
    if options.chatter:
        sys.stderr.write(("chatter " * 128 + "\n") * 1024)
    if options.bare:
        serve_bare(leave_child=options.child, restless=options.restless)
    else:
        from weft_testing.fake_mcp_server.scripted import serve  # noqa: PLC0415 - takes half a second

        serve(http=options.http, bad_schemas=options.bad_schemas, many=options.many, modern_only=options.modern_only)


def serve_bare(*, leave_child: bool, restless: bool) -> None:
    """Answers line by line until the input ends."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True) if leave_child else None  # noqa: S607
    lists = 0
    for line in sys.stdin:
        message = json.loads(line)
        lists += message["method"] == "tools/list"
        if "id" in message:
            _answer(message, 0 if child is None else child.pid, lists)
        if restless and message["method"] == "tools/list":
            _send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})


def _answer(message: dict[str, Any], child: int, lists: int) -> None:
    method = message["method"]
    if method == "initialize":
        result: dict[str, Any] = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "bare", "version": "1"},
        }
    elif method == "tools/list":
        result = {"tools": [{"name": name, "description": f"The {name}.", "inputSchema": _SCHEMA} for name in TOOLS]}
    elif method == "tools/call":
        text = _call(message["params"]["name"], message["params"].get("arguments") or {}, child, lists)
        if text is None:
            return
        result = {"content": [{"type": "text", "text": text}]}
    else:
        _send({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "Method not found"}})
        return
    _send({"jsonrpc": "2.0", "id": message["id"], "result": result})


def _call(name: str, arguments: dict[str, Any], child: int, lists: int) -> str | None:
    text = str(arguments.get("text", ""))
    match name:
        case "crash":
            os._exit(7)
        case "hang":
            return None
        case "deaf":
            time.sleep(600)
        case "garbage":
            sys.stdout.write("this is not JSON\n\n")
        case "endless" | "asks":
            _go_on(asks=name == "asks")
        case "environment":
            return json.dumps(dict(os.environ))
        case "pid":
            return json.dumps([os.getpid(), child])
        case "lists":
            return str(lists)
    return text


def _go_on(*, asks: bool) -> None:
    for number in itertools.count():
        if asks:
            _send({"jsonrpc": "2.0", "id": f"ask-{number}", "method": "ping"})
        else:
            sys.stdout.write("x" * 65_536)


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
