"""Exit codes: one table in the code, the same in the documentation."""

import re
from pathlib import Path

import pytest
import typer

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason, traits
from weft_app.cli import options
from weft_app.cli.options import EXIT_CODES, exit_code, reporting

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"


def test_documented_exit_codes_match_the_code() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)}
    assert documented == {
        value for name, value in vars(options).items() if name.startswith("EXIT_") and isinstance(value, int)
    }


def test_documented_reasons_match_the_code() -> None:
    for line in DOCUMENT.read_text("utf-8").splitlines():
        found = re.match(r"\| (\d+) \|", line)
        reasons = set(re.findall(r"`([A-Z_]{4,})`", line))
        if found and reasons:
            assert reasons == {reason.name for reason, code in EXIT_CODES.items() if code == int(found[1])}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_nonzero_exit_code(reason: Reason) -> None:
    assert exit_code(WeftError(reason, "no")) in (1, 2, 3, 4, 5)


@pytest.mark.parametrize(("http_status", "code"), [(404, 3), (409, 4)])
def test_exit_codes_agree_with_http_statuses(http_status: int, code: int) -> None:
    for reason, found in EXIT_CODES.items():
        assert (traits(reason).http_status == http_status) == (found == code), reason


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WeftError(Reason.NOT_FOUND, "no"), 3),
        (WeftError(Reason.INTERNAL, "no"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 0),
    ],
)
def test_error_ends_the_command_with_its_code(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.close", lambda: None)
    with pytest.raises(typer.Exit) as ended, reporting():
        raise error
    assert ended.value.exit_code == code


def test_command_may_set_its_own_failure_and_ctrl_c_codes() -> None:
    for error, code in ((WeftError(Reason.INTERNAL, "no"), 2), (KeyboardInterrupt(), 0)):
        with pytest.raises(typer.Exit) as ended, reporting(failed=2, interrupted=0):
            raise error
        assert ended.value.exit_code == code
