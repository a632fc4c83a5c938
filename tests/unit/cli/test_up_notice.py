"""What `weft up` shows when it is ready."""

from pathlib import Path

import pytest

from weft_app.cli.first_access import FirstAccess
from weft_app.cli.ready_text import ready_text
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.home import WeftHome
from weft_app.compose.up import UpHost


@pytest.mark.parametrize("notice", ["", "the router's database is older than what was acknowledged with it"])
def test_lost_work_is_said_on_the_terminal(notice: str, tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    source = ConfigurationSource()
    host = UpHost(source, source.of_document({}, ()), home)
    host.notice = notice
    shown = ready_text(host, home, FirstAccess())
    assert ("WARNING" in shown) is bool(notice)
    assert notice in shown


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_workbench_is_named_where_it_is_served(is_enabled: bool, tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    source = ConfigurationSource()
    host = UpHost(source, source.of_document({"gateway": {"workbench": {"enabled": is_enabled}}}, ()), home)
    assert ("/ui/" in ready_text(host, home, FirstAccess())) is is_enabled
