"""The manual page: every command, in roff without warnings."""

import shutil
import subprocess

import pytest

from weft_app.cli.commands import COMMANDS
from weft_app.cli.man_page import man_page


def test_page_has_every_command_with_its_summary() -> None:
    lines = man_page("1.2.3").replace("\\-", "-").replace("\\&", "").splitlines()
    for words, (_, summary) in COMMANDS.items():
        assert lines[lines.index(f".B weft {words}") + 1] == summary.replace("\\", "\\e")


@pytest.mark.skipif(shutil.which("groff") is None, reason="apt-get install groff")
def test_roff_is_valid() -> None:
    command = ["groff", "-man", "-ww", "-Tutf8"]
    made = subprocess.run(command, input=man_page("1.2.3").encode(), capture_output=True, check=True)
    assert made.stderr == b""
