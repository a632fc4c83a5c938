"""What a command inherits: closed or full streams, no HOME, a deleted working folder, a locale without UTF-8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft_app.cli.options import EXIT_FAILED

RUN = "from weft_app.cli.inherited import failures_of_system_in_one_line, make_usable; make_usable()\n"
IN_ONE_LINE = RUN + "import sys\nwith failures_of_system_in_one_line():\n  "


def run(program: str, *, shell: str = '"$@"', environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The exit code, output and errors of a Python program; `shell` starts it as "$@"."""
    found = subprocess.run(
        ["/bin/sh", "-c", shell, "sh", sys.executable, "-c", program],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


def test_closed_streams_become_dev_null_and_keep_their_descriptors() -> None:
    """`weft up -d` of a supervisor that closes stdout ended with an AttributeError of None."""
    program = RUN + (
        "import os, sys\n"
        "print('lost'); sys.stdout.flush(); assert not sys.stdout.isatty(); assert sys.stdin.read() == ''\n"
        "os._exit(7 if os.open('/dev/zero', os.O_RDONLY) > 2 else 8)"
    )
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert run(program, shell=f'"$@" {closed}')[0] == 7, closed


@pytest.mark.parametrize("action", ["print('x' * 100_000)", "print('x')", "print('x'); sys.exit(0)"])
def test_unwritable_output_is_reported_in_one_line(action: str) -> None:
    code, _, error = run(IN_ONE_LINE + action, shell='"$@" > /dev/full')
    assert (code, error.count("\n")) == (EXIT_FAILED, 1)
    assert error.startswith("weft: the output cannot be written: No space left on device")


def test_command_ends_even_if_errors_cannot_be_written() -> None:
    assert run(IN_ONE_LINE + "print('x')", shell='"$@" > /dev/full 2>&1')[0] == EXIT_FAILED


def test_user_without_a_home_gets_the_root_folder() -> None:
    program = (
        "import os, pwd\n"
        "os.environ.pop('HOME', None)\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n" + RUN + "from pathlib import Path; print(Path('~/.weft').expanduser())"
    )
    assert run(program)[1] == "/.weft\n"


def test_relative_path_in_a_deleted_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = f'cd "{gone}"; rmdir "{gone}"; "$@"'
    code, _, error = run(IN_ONE_LINE + "from pathlib import Path; Path('x').absolute()", shell=shell)
    assert (code, error.count("\n")) == (EXIT_FAILED, 1)
    assert "the working directory was deleted" in error


def test_path_of_an_unknown_user_is_reported_in_one_line() -> None:
    """`weft pull ~models/m.gguf` ended with a traceback."""
    code, _, error = run(IN_ONE_LINE + "from pathlib import Path; Path('~models/m.gguf').expanduser()")
    assert (code, error.count("\n")) == (EXIT_FAILED, 1)
    assert "an unknown user" in error


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("Path('x' * 300).exists()", "xxx: File name too long"),
        ("Path('/dev/null/weft.yaml').open()", "/dev/null/weft.yaml: Not a directory"),
        ("raise PermissionError(13, 'Permission denied', '/root/mesh')", "/root/mesh: Permission denied"),
    ],
)
def test_path_that_the_system_refuses_is_reported_in_one_line(action: str, words: str) -> None:
    """`weft models ls --home` of another user's folder ended with a traceback."""
    code, _, error = run(IN_ONE_LINE + f"from pathlib import Path; {action}")
    assert (code, error.count("\n")) == (EXIT_FAILED, 1)
    assert error.endswith(f"{words}\n")


def test_argument_that_is_not_text_is_reported_in_one_line() -> None:
    """`weft chat` with a prompt in Latin-1 ended with a traceback, as did `weft explain`."""
    action = "import sys; from weft.api.common.v1 import chat_pb2; chat_pb2.ContentPart(text=sys.argv[1])"
    code, _, error = run(IN_ONE_LINE + action, shell='"$@" "$(printf "caf\\351")"')
    assert (code, error.count("\n")) == (EXIT_FAILED, 1)
    assert "not UTF-8 text" in error


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_typed_bytes_that_are_not_text_are_replaced(errors: str) -> None:
    """A word in Latin-1 ended `weft chat`, and its conversation was lost."""
    shell = 'printf "caf\\351\\n" | "$@"'
    program = RUN + "print(ascii(input()))"
    assert run(program, shell=shell, environment={"PYTHONIOENCODING": f":{errors}"})[1] == "'caf\\ufffd'\n"


def test_service_leaves_a_deleted_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os; from weft_app.cli.inherited import *; leave_deleted_folder('/'); print(os.getcwd())"
    assert run(program, shell=f'cd "{gone}"; rmdir "{gone}"; "$@"')[1] == "/\n"
    assert run(program, shell=f'cd "{tmp_path}"; "$@"')[1] == f"{tmp_path}\n"


def test_other_errors_are_unchanged() -> None:
    _, _, error = run(IN_ONE_LINE + "open('/nowhere/x')")
    assert "FileNotFoundError" in error


def test_command_restarts_with_utf_8_if_the_locale_lacks_it() -> None:
    """A home with an umlaut in its name failed with a UnicodeEncodeError."""
    program = RUN + "import sys; print(sys.getfilesystemencoding(), chr(252))"
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    assert run(program, environment=plain)[1] == "utf-8 ü\n"
    assert run(program, environment={"PYTHONIOENCODING": "ascii"})[1] == "utf-8 \\xfc\n"
