"""Plain values are taken without pydantic, and give what typer gives; everything else goes typer's own way."""

import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from weft_app.cli.plain_values import _is_within, without_conversion


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def _made(found: dict[str, Any]) -> Any:
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(
        words: Annotated[list[str] | None, typer.Argument()] = None,
        name: Annotated[str, typer.Option()] = "x",
        count: Annotated[int | None, typer.Option(min=1, max=9)] = None,
        share: Annotated[float, typer.Option()] = 0.5,
        colour: Annotated[Colour, typer.Option()] = Colour.RED,
        home: Annotated[Path, typer.Option()] = Path("~/x"),
        file: Annotated[Path | None, typer.Option(exists=True)] = None,
        *,
        on: Annotated[bool, typer.Option("--on/--off")] = True,
    ) -> None:
        found.update(words=words, name=name, count=count, share=share, colour=colour, home=home, file=file, on=on)

    return get_command(app)


LARGE = {"pydantic", "rich", "yaml", "structlog", "msgspec", "uvloop"}
"""Libraries that take longer to import than most commands take."""
CALLS = [
    (),
    ("a", "b"),
    ("--name", "1"),
    ("--count", "3"),
    ("--count", "10"),
    ("--count", "x"),
    ("--share", "2"),
    ("--share", "x"),
    ("--colour", "blue"),
    ("--colour", "Blue"),
    ("--colour", "green"),
    ("--home", "/tmp"),
    ("--home", ""),
    ("--file", "/nowhere/at/all"),
    ("--file", "/etc/passwd"),
    ("--off",),
    ("--help",),
    ("--wrong",),
]


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_a_command_gives_what_it_gives_with_the_conversion_of_typer(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = []
    for is_plain in (False, True):
        found: dict[str, Any] = {}
        command = _made(found)
        if is_plain:
            without_conversion(command)
        with pytest.raises(SystemExit) as ended:
            command.main(list(words), prog_name="command")
        types = {name: type(value) for name, value in found.items()}
        outcomes.append((ended.value.code, found, types, capsys.readouterr()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        *((f"weft {words} ", set[str]()) for words in ("chat", "describe model", "wait model", "cancel")),
        # The settings of a load are checked by pydantic.
        ("weft load --", {"pydantic"}),
    ],
)
def test_a_completion_imports_none_of_the_large_libraries(line: str, needed: set[str], tmp_path: Path) -> None:
    heavy = {*LARGE, "weft_app.compose"} - needed
    program = (
        "import sys\n"
        "from weft_app.cli.main import app\n"
        "try: app(prog_name='weft')\n"
        f"except SystemExit: print(*({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    completing = {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **completing, "WEFT_HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("words", [("ps",), ("get", "models", "-o", "json"), ("describe", "x"), ("explain", "x")])
def test_a_command_imports_none_of_the_large_libraries_that_it_does_not_use(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        "import sys\n"
        "from weft_app.cli.main import app\n"
        "try: app()\n"
        f"except SystemExit: print(*({LARGE!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "WEFT_HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "weft up --home" in done.stderr
    assert done.stdout == "\n"


def test_a_default_within_the_bounds_of_its_option_needs_no_conversion_and_one_beyond_them_does() -> None:
    class Bounds:
        min, max = 1, 64

    assert [_is_within(value, Bounds()) for value in (1, 64, 0, 65)] == [True, True, False, False]  # type: ignore[arg-type]  # all that is read of it
