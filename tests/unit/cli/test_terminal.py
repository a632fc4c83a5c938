"""What text of others can do to a terminal."""

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import terminal
from weft_app.cli.options import reporting
from weft_app.cli.output import ProgressStyle, TextTable, custom_columns, shown_progress

HOSTILE = "broken\x1b]0;title\x07\x1b]52;c;cm0=\x07\x1b[2J\x9b31m\r\x08 end"


class Screen(io.StringIO):
    """A terminal that gets both streams."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(name="screen")
def _screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    # Not sys.stdout: pytest replaces it after the fixtures.
    monkeypatch.setattr(terminal, "sys", SimpleNamespace(stdout=screen, stderr=screen))
    return screen


@pytest.mark.parametrize(
    "write", [terminal.say, terminal.say_answer, terminal.tell, terminal.note], ids=lambda each: each.__name__
)
def test_writer_leaves_no_control_character_to_a_terminal(write: Callable[[str], None], screen: Screen) -> None:
    write(f"{HOSTILE}\n")
    assert terminal.shown(screen.getvalue()) == screen.getvalue()
    assert "title" in screen.getvalue()


def test_rewritten_line_has_its_own_control_sequence_only(screen: Screen) -> None:
    terminal.rewrite(HOSTILE)
    assert screen.getvalue().count("\x1b") == 1
    assert screen.getvalue().startswith("\r\x1b[K")


def test_styles_of_tables_reach_a_terminal(screen: Screen) -> None:
    terminal.say(TextTable(custom_columns("NAME:name STATE:state")).text([{"name": HOSTILE, "state": "ready"}]))
    assert screen.getvalue().startswith(terminal.BOLD)
    assert f"{terminal.GREEN}ready{terminal.PLAIN}" in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()


def test_answer_is_unchanged_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say_answer(HOSTILE)
    assert capsys.readouterr().out == HOSTILE


def test_error_of_a_command_is_safe_in_a_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BaseException, match="1"), reporting():
        raise WeftError(Reason.BACKEND_ERROR, HOSTILE)
    assert "\x1b" not in capsys.readouterr().err


def test_progress_bar_has_no_sequence_of_its_description(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import TextColumn  # noqa: PLC0415 - as in commands

    monkeypatch.setattr(sys, "stderr", screen)
    style = ProgressStyle(
        line=str, columns=lambda: (TextColumn("{task.description}"),), bar=lambda record: {"description": record}
    )
    with shown_progress(style) as show:
        show(HOSTILE)
    assert "\x1b]" not in screen.getvalue()
    assert "title" in screen.getvalue()
