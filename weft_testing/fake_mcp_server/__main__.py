"""The program: `python -m weft_testing.fake_mcp_server [--http | --bare] [switches]`.

With `--http` it listens on a free port of the loopback and prints it. With `--bare` it speaks JSON lines without the
SDK, which starts ten times faster and can misbehave in ways that the SDK prevents. Otherwise it is the SDK over
standard input and output.
"""

import argparse
import sys
from pathlib import Path


def main() -> None:
    """Serve until the input ends or a signal comes."""
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
        from weft_testing.fake_mcp_server.bare import serve_bare  # noqa: PLC0415 - without the SDK

        serve_bare(leave_child=options.child, restless=options.restless)
    else:
        from weft_testing.fake_mcp_server.scripted import serve  # noqa: PLC0415 - takes half a second

        serve(http=options.http, bad_schemas=options.bad_schemas, many=options.many, modern_only=options.modern_only)


if __name__ == "__main__":
    main()
