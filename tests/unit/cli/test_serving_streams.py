"""What is printed by a command that serves, after its terminal has gone."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
import typer

from weft.kernel.telemetry.structured_logs import configure_logging
from weft_app.cli.options import EXIT_FAILED
from weft_app.cli.serving import LastingStream, serving
from weft_app.cli.terminal import note, say


class Gone(io.StringIO):
    """A terminal that has been closed."""

    def write(self, _: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_messages_and_logs_to_a_closed_terminal_do_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    configured = structlog.get_config()
    with serving():
        try:
            configure_logging("host")
            structlog.get_logger("fresh").error("something happened")
            say("stopping\n")
            note("a runner ended")
            sys.stderr.flush()
        finally:
            structlog.contextvars.clear_contextvars()
            structlog.configure(**configured)


def test_message_to_a_closed_terminal_raises_without_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what ended the host in the middle of its streams."""
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(OSError, match="Input/output error"):
        say("stopping\n")


def test_descriptor_points_to_dev_null_after_a_failed_write() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as file:
        stream = LastingStream(file)
        stream.write("a line\n")
        stream.flush()
        assert os.fstat(file.fileno()).st_rdev == Path(os.devnull).stat().st_rdev
        file.write("and past it\n")
        file.flush()


def test_broken_stream_without_a_descriptor_leaks_no_file() -> None:
    """Each failed write once left a descriptor of /dev/null open."""
    stream = LastingStream(Gone())
    stream.write("the first write imports what it needs\n")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        stream.write("a line\n")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_command_without_streams_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft up >&- 2>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with serving():
        say("here\n")


def test_unexpected_error_is_one_sentence_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with structlog.testing.capture_logs() as logs, pytest.raises(typer.Exit) as ended, serving():
        raise ZeroDivisionError("a bug")
    assert ended.value.exit_code == EXIT_FAILED
    assert capsys.readouterr().err == "weft: the service failed (ZeroDivisionError); its log has the traceback\n"
    assert [line["event"] for line in logs] == ["the service failed"]


CRASH = """
import os
from weft_app.cli.serving import run_service, serving
async def crashing_library(): os.abort()
with serving(): run_service(crashing_library())
"""


def test_crash_of_a_library_names_the_code_that_ran() -> None:
    """A gateway ended with no more than "malloc(): unaligned tcache chunk detected", once in 4,000 kills."""
    ended = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False)
    assert "Fatal Python error: Aborted" in ended.stderr
    assert "in crashing_library" in ended.stderr
