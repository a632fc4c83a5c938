"""What `weft up` shows when it is ready."""

from pathlib import Path

import pytest

from weft_app.cli.ready_text import KEY_FILE, FirstAccess, KeptAccess, ready_text
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.home import WeftHome
from weft_app.compose.up import UpHost


@pytest.mark.parametrize("notice", ["", "the router's database is older than what was acknowledged with it"])
def test_lost_work_is_reported_on_the_terminal(notice: str, tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    source = ConfigurationSource()
    host = UpHost(source, source.of_document({}, ()), home)
    host.notices = [notice] if notice else []
    shown = ready_text(host, home, FirstAccess())
    assert ("WARNING" in shown) is bool(notice)
    assert notice in shown


@pytest.mark.parametrize("is_enabled", [True, False])
def test_workbench_address_is_shown_if_it_is_enabled(is_enabled: bool, tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    source = ConfigurationSource()
    host = UpHost(source, source.of_document({"gateway": {"workbench": {"enabled": is_enabled}}}, ()), home)
    assert ("/ui/" in ready_text(host, home, FirstAccess())) is is_enabled


@pytest.mark.parametrize(
    "access", [FirstAccess(key="weft_first"), FirstAccess(key_file=Path("/home/x/first-admin-key"))]
)
def test_no_suggested_command_uses_the_admin_key(access: FirstAccess, tmp_path: Path) -> None:
    home, source = WeftHome(tmp_path), ConfigurationSource()
    host = UpHost(source, source.of_document({"host": "0.0.0.0", "auth": {"required": True}}, ()), home)
    host.network_urls = ("https://box:8080",)
    facts, _, tries = ready_text(host, home, access).partition("try it:")
    assert (access.key or KEY_FILE) in facts
    assert "weft_first" not in tries
    assert KEY_FILE not in tries
    assert tries.index("weft keys create") < tries.index("OPENAI_API_KEY=weft_...")
    assert "export WEFT_API_KEY=$(weft keys create --role user -o name)\n" in tries


VOICE = {"name": "voice", "runtime": "piper", "models": [{"name": "reader", "path": "/voices"}]}


@pytest.mark.parametrize(
    ("runners", "command"),
    [
        (
            [VOICE],
            "weft media speak ",
        ),
        (
            [
                VOICE,
                {"name": "far", "runtime": "openai_http", "models": [{"name": "m", "url": "http://127.0.0.1:9/v1"}]},
            ],
            "/v1/chat/completions",
        ),
    ],
    ids=["a voice alone", "a voice and a model that chats"],
)
def test_suggested_commands_match_the_models_capabilities(
    runners: list[dict[str, object]], command: str, tmp_path: Path
) -> None:
    home = WeftHome(tmp_path)
    source = ConfigurationSource()
    host = UpHost(source, source.of_document({"runners": runners}, ()), home)
    shown = ready_text(host, home, FirstAccess())
    assert command in shown
    assert ("reader" in shown.partition("try it:")[2]) is (len(runners) == 1)


def test_background_line_is_shown_unchanged_if_its_file_is_unreadable(tmp_path: Path) -> None:
    kept = KeptAccess(WeftHome(tmp_path))
    line = f"  keys      callers need one. The first, with the role admin, is in {tmp_path / KEY_FILE}"
    assert kept.on_terminal(line) == line
    assert kept.on_terminal("  keys      callers need one: weft keys create").endswith("weft keys create")
    (tmp_path / KEY_FILE).write_text("weft_an-older-one\n")
    kept.on_terminal("  keys      callers need one: weft keys create")
    kept.remove_shown()
    assert (tmp_path / KEY_FILE).exists(), "of an earlier start, and not shown"
    assert kept.on_terminal(line).endswith("is shown only now:\n            weft_an-older-one")
    kept.remove_shown()
    assert not (tmp_path / KEY_FILE).exists()
