"""The program that pulls models for a runner, in a separate process so that the runner need not import the hub library.

    python -m runner_svc.model_store.program SOURCE --store FOLDER [--form FORM] [--limit BYTES] [--memory BYTES]
        [--allow-http]

Each line of its output is JSON: a `PullProgress` without the stored model, or the error that ended the pull.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from google.protobuf.json_format import MessageToJson

from runner_svc.model_store.pull import Puller, PullSettings
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.repository_files import ModelForm
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.model_source import parse_source

ERROR, REASON, MESSAGE = "error", "reason", "message"
"""Keys in an error line."""


def main() -> int:
    """Pulls a model. Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = _arguments()
    settings = PullSettings(disk_limit_bytes=asked.limit, memory_bytes=asked.memory, allow_http=asked.allow_http)
    try:
        Puller(ModelStore(asked.store), settings, _print).pull(parse_source(asked.source, "source"), asked.form)
    except WeftError as error:
        _line(json.dumps({ERROR: {REASON: error.reason.name, MESSAGE: error.message}}))
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--form", type=ModelForm)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--allow-http", action="store_true")
    return parser.parse_args()


def _print(progress: pb.PullProgress) -> None:
    # The file list of a large model would exceed the line limit; the reader looks into the store.
    progress.ClearField("model")
    _line(MessageToJson(progress, indent=None))


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
