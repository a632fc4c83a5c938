"""Runs a pull in a separate process, so that a runner need not import the hub library.

    WEFT_PULL_ORDER=ORDER python -m runner_svc.model_store.background_pull

A URL in the order may contain a credential, and command lines are visible to all users of a machine.

Each line of the program's output is JSON: a `PullProgress` without the stored model, a file that the source lists, or
the error that ended the pull.
"""

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import msgspec
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError

from runner_svc.model_store.pull import Puller, PullSettings
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.repository_files import ModelForm, RepositoryFile
from runner_svc.supervise.child_program import run_program
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import ModelSource, parse_source, shown_source

PROGRAM = "runner_svc.model_store.background_pull"
MAX_SAID_CHARS = 300
_ORDER_VARIABLE = "WEFT_PULL_ORDER"
_ERROR, _REASON, _MESSAGE = "error", "reason", "message"
"""Keys in an error line."""
_LISTED = "listed"
"""Key in the line of a listed file, which is a list of one; after the last file, an empty list."""
_COPY_PAUSE_SECONDS = 0.1

Copy = Callable[[Sequence[RepositoryFile]], Awaitable[object]]
"""Adds listed files to the store, if it can."""


class _Order(msgspec.Struct):
    """What to pull, as JSON in the program's environment."""

    source: str
    store: str
    form: ModelForm | None
    limit: int | None
    memory: int | None
    allow_http: bool
    copying: str
    """File that exists until the listed files were copied."""


async def pull_in_background(
    source: ModelSource,
    form: ModelForm | None,
    store: ModelStore,
    settings: PullSettings,
    on_progress: Callable[[pb.PullProgress], None],
    copy: Copy,
) -> pb.StoredModel:
    """Pulls a model and returns it. The pull ends with this process, or when the call is cancelled.

    `copy` is called at most once, with the files that the source lists and the store lacks. The rest is downloaded.
    Raises as `Puller.pull`, and BACKEND_ERROR if the program fails without an error message.
    """
    store.create()
    raised: list[WeftError] = []
    listed: list[RepositoryFile] = []
    is_listed = asyncio.Event()
    last = ""

    def read(line: str) -> None:
        nonlocal last
        with suppress(ValueError, ParseError, KeyError, TypeError):
            document = json.loads(line)
            if _ERROR in document:
                said = document[_ERROR]
                raised.append(WeftError(Reason[said[_REASON]], str(said[_MESSAGE])))
            elif _LISTED in document:
                listed.extend(RepositoryFile(**file) for file in document[_LISTED])
                if not document[_LISTED]:
                    is_listed.set()
            else:
                on_progress(ParseDict(document, pb.PullProgress(), ignore_unknown_fields=True))
            return
        last = line.strip()[:MAX_SAID_CHARS] or last

    async def copy_listed() -> None:
        try:
            await is_listed.wait()
            await copy(listed)
        finally:
            marker.unlink(missing_ok=True)

    marker = store.partial / f"copying-{secrets.token_hex(8)}"
    with store.explained():
        marker.touch()
    limit, memory = settings.disk_limit_bytes, settings.memory_bytes
    order = _Order(str(source), str(store.root), form, limit, memory, settings.allow_http, str(marker))
    variables = {_ORDER_VARIABLE: msgspec.json.encode(order).decode()}
    copying = asyncio.create_task(copy_listed())
    try:
        failure = await run_program([sys.executable, "-m", PROGRAM], read, variables=variables, folder=store.root)
    finally:
        copying.cancel()
        await asyncio.wait([copying])
    if raised:
        raise raised[0]
    found = store.find(source, form)
    if failure or found is None:
        raise WeftError(Reason.BACKEND_ERROR, f"{shown_source(source)} was not pulled: {last or failure}")
    return found


def main() -> int:
    """Pulls a model. Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    order = msgspec.json.decode(os.environ[_ORDER_VARIABLE], type=_Order)
    settings = PullSettings(disk_limit_bytes=order.limit, memory_bytes=order.memory, allow_http=order.allow_http)

    def offer(files: Sequence[RepositoryFile]) -> None:
        for file in files:
            _line(json.dumps({_LISTED: [asdict(file)]}))
        _line(json.dumps({_LISTED: []}))
        while Path(order.copying).exists():
            time.sleep(_COPY_PAUSE_SECONDS)

    try:
        puller = Puller(ModelStore(Path(order.store)), settings, _print, offer=offer)
        puller.pull(parse_source(order.source, "source"), order.form)
    except WeftError as error:
        _line(json.dumps({_ERROR: {_REASON: error.reason.name, _MESSAGE: error.message}}))
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def _print(progress: pb.PullProgress) -> None:
    # The file list of a large model would exceed the line limit; the reader looks into the store.
    progress.ClearField("model")
    _line(MessageToJson(progress, indent=None))


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
