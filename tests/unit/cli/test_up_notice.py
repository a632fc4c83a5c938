"""What `weft up` shows when it is ready."""

from pathlib import Path

import pytest

from weft_app.cli.up import print_ready
from weft_app.compose.home import WeftHome
from weft_app.compose.up import UpHost
from weft_app.config.config import WeftConfig


@pytest.mark.parametrize("notice", ["", "the router's database is older than what was acknowledged with it"])
def test_lost_work_is_said_on_the_terminal(notice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = WeftHome(tmp_path)
    host = UpHost(WeftConfig(), home, None)
    host.notice = notice
    print_ready(host, home)
    shown = capsys.readouterr().out
    assert ("WARNING" in shown) is bool(notice)
    assert notice in shown
