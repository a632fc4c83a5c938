"""Runs `weft` with short ping intervals: `python -m kit.quick_pings python -m weft_app.cli.main ...`.

This detects frozen peers sooner. Only channels that it opens are affected; their servers keep the usual intervals.
"""

import sys

from weft.kernel.channels import rpc
from weft_app.cli.main import app

QUICK = {"grpc.keepalive_time_ms": 3_000, "grpc.keepalive_timeout_ms": 1_000, "grpc.http2.ping_timeout_ms": 1_000}
"""A server tolerates at most four pings without data at intervals below ten seconds."""


def main() -> None:
    """Shortens the intervals in this process, then runs `weft`."""
    for name in ("CHANNEL_OPTIONS", "POOLED_OPTIONS"):
        options: tuple[tuple[str, int], ...] = getattr(rpc, name)
        setattr(rpc, name, tuple((option, QUICK.get(option, value)) for option, value in options))
    sys.argv = ["weft", *sys.argv[4:]]
    app()


if __name__ == "__main__":
    main()
