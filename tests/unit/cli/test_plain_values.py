"""Plain values are taken without pydantic, and give what typer gives; everything else goes typer's own way."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from weft_app.cli.main import _is_within, without_conversion


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
    ("--wrong",),
]


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_plain_conversion_matches_typer_conversion(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
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


def test_default_within_option_bounds_skips_conversion_and_one_beyond_does_not() -> None:
    class Bounds:
        min, max = 1, 64

    assert [_is_within(value, Bounds()) for value in (1, 64, 0, 65)] == [True, True, False, False]  # type: ignore[arg-type]  # all that is read of it
