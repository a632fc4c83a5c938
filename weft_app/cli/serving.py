"""Output streams and exit of commands that serve."""

import asyncio
import faulthandler
import os
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import typer

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.open_files import raise_open_files
from weft.kernel.telemetry.log import get_logger
from weft_app.cli.inherited import has_working_folder
from weft_app.cli.options import WINDOWS, reporting
from weft_app.compose.shutdown import error_text

log = get_logger("weft_app.compose")


class LastingStream:
    """An output stream that continues with /dev/null after the first failed write.

    Writers and loggers get no error: a service must not end because its terminal is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See TextIO.write. Never raises."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._redirect_to_null()
            return len(text)

    def flush(self) -> None:
        """See TextIO.flush. Never raises."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        # Replaces the descriptor, so that buffered text and the output of C libraries go there, too.
        with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def require_serving_platform(platform: str) -> None:
    """Checks that a platform of `sys.platform` supports services. Raises UNSUPPORTED_OPERATION."""
    if platform == WINDOWS:
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "weft serves on Linux and macOS; on Windows run it in WSL (wsl --install), and see weft doctor for what "
            "works without",
        )


Result = TypeVar("Result")


def run_service(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs a service to its end, and returns its result."""
    import resource  # noqa: PLC0415 - Windows lacks it

    # A core would contain prompts and keys. Engines inherit the limit, which their command may raise again.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    raise_open_files()
    # A library that crashes leaves no log line: this prints what each thread ran, without any value.
    faulthandler.enable()
    return asyncio.run(work)


@contextmanager
def serving() -> Iterator[None]:
    """As `reporting`, for a command that serves and may outlive its terminal.

    An unexpected error prints one sentence, with a traceback in the log.
    """
    with lasting_streams(), reporting():
        require_serving_platform(sys.platform)
        try:
            yield
        except (WeftError, typer.Exit, BrokenPipeError):
            raise
        except Exception as error:
            if not has_working_folder():
                raise
            log.critical("the service failed", exc_info=error)
            raise WeftError(
                Reason.INTERNAL, f"the service failed ({error_text(error)}); its log has the traceback"
            ) from error


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Ignores failed writes to standard output and error."""
    before: tuple[TextIO | None, TextIO | None] = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        # None: the stream was closed when the process started.
        out, err = (LastingStream(nowhere if stream is None else stream) for stream in before)
        sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
        try:
            yield
        finally:
            out.flush()
            err.flush()
            sys.stdout, sys.stderr = cast("TextIO", before[0]), cast("TextIO", before[1])
