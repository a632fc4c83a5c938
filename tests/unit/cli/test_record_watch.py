"""What `-w` prints of records that are read again."""

import json

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import follow
from weft_app.cli.follow import poll_records
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Column, Listing

LISTING = Listing(
    columns=(
        Column("REQUEST", lambda row: row["id"]),
        Column("STATE", lambda row: row["state"]),
        Column("AGE", lambda row: row["age"], ticks=True),
    ),
    name=lambda row: str(row["id"]),
)


def _row(name: str, state: str, age: str = "1s") -> dict[str, str]:
    return {"id": name, "state": state, "age": age}


def _watched(
    capsys: pytest.CaptureFixture[str], output: ResourceFormat, *readings: list[dict[str, str]] | WeftError
) -> list[str]:
    """The lines that a watch prints of these readings; Ctrl-C comes after the last."""
    left = list(readings)

    def read() -> list[dict[str, str]]:
        found = left.pop(0)
        if isinstance(found, WeftError):
            raise found
        return found

    def wait() -> None:
        if not left:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(follow, "wait_interval", wait)
        with pytest.raises(KeyboardInterrupt):
            poll_records(LISTING, output, read)
    return capsys.readouterr().out.splitlines()


def test_new_changed_and_removed_records_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _watched(
        capsys,
        ResourceFormat.TABLE,
        [_row("a", "queued")],
        [_row("a", "queued", "2s")],
        [_row("a", "running", "3s"), _row("b", "queued")],
        [_row("b", "queued", "2s")],
        [_row("b", "queued", "3s")],
    )
    assert [line.split() for line in lines] == [
        ["REQUEST", "STATE", "AGE"],
        ["a", "queued", "1s"],
        ["a", "running", "3s"],
        ["b", "queued", "1s"],
        ["a", "gone", "-"],
    ][: len(lines)]
    assert len(lines) == 5


def test_documents_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _watched(capsys, ResourceFormat.JSON, [_row("a", "queued")], [])
    assert [json.loads(line) for line in lines] == [_row("a", "queued"), {"name": "a", "gone": True}]


def test_non_retryable_error_ends_the_watch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WeftError, match="no"):
        _watched(capsys, ResourceFormat.TABLE, [], WeftError(Reason.PERMISSION_DENIED, "no"))
