"""Runs a pull in a separate process, for a process with an event loop."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress

from google.protobuf.json_format import ParseDict, ParseError

from runner_svc.environments.child_program import run_program
from runner_svc.model_store.program import ERROR, MESSAGE, REASON
from runner_svc.model_store.pull import PullSettings
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.repository_files import ModelForm
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.model_source import ModelSource
from weft.kernel.reasons import Reason

PROGRAM = "runner_svc.model_store.program"
MAX_SAID_CHARS = 300


async def pull_in_background(
    source: ModelSource,
    form: ModelForm | None,
    store: ModelStore,
    settings: PullSettings,
    on_progress: Callable[[pb.PullProgress], None],
) -> pb.StoredModel:
    """Pulls a model and returns it. The pull ends with this process, or when the call is cancelled.

    Raises as `Puller.pull`, and BACKEND_ERROR if the program fails without an error message.
    """
    store.create()
    output = _Output(on_progress)
    command = [sys.executable, "-m", PROGRAM, str(source), "--store", str(store.root)]
    command += [] if form is None else ["--form", form]
    command += [] if settings.disk_limit_bytes is None else ["--limit", str(settings.disk_limit_bytes)]
    command += [] if settings.memory_bytes is None else ["--memory", str(settings.memory_bytes)]
    command += ["--allow-http"] if settings.allow_http else []
    failure = await run_program(command, output.read, variables={}, folder=store.root)
    if output.error is not None:
        raise output.error
    found = store.find(source, form)
    if failure or found is None:
        raise WeftError(Reason.BACKEND_ERROR, f"{source} was not pulled: {output.last or failure}")
    return found


class _Output:
    """Parses the program's output."""

    def __init__(self, on_progress: Callable[[pb.PullProgress], None]) -> None:
        self._on_progress = on_progress
        self.error: WeftError | None = None
        self.last = ""
        """The last line that is not a message."""

    def read(self, line: str) -> None:
        with suppress(ValueError, ParseError, KeyError, TypeError):
            document = json.loads(line)
            if ERROR in document:
                said = document[ERROR]
                self.error = WeftError(Reason[said[REASON]], str(said[MESSAGE]))
            else:
                self._on_progress(ParseDict(document, pb.PullProgress(), ignore_unknown_fields=True))
            return
        self.last = line.strip()[:MAX_SAID_CHARS] or self.last
