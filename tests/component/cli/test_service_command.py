"""`weft mesh service` of a user, with a systemctl that writes down what it is asked."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from weft_app.cli.main import app
from weft_app.cli.options import EXIT_CONFLICT, EXIT_FAILED, EXIT_NOT_FOUND, EXIT_OK, EXIT_USAGE
from weft_app.compose.systemd import MARK

SYSTEMCTL = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$*" in
  *show*) echo "ActiveState=$(cat {folder}/state)"; echo SubState=running; echo NRestarts=3; echo MainPID=42;;
esac
case "$*" in *" $(cat {folder}/fails)") echo "no such thing" >&2; exit 1;; esac
"""


class User:
    """A user with a manager of services."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "config" / "systemd" / "user"
        self.says("active")
        self.fails("nothing")

    def says(self, state: str) -> None:
        """The state of all units from now on."""
        (self.folder / "state").write_text(state)

    def fails(self, last_word: str) -> None:
        """Commands that end with this word fail from now on."""
        (self.folder / "fails").write_text(last_word)

    @property
    def asked(self) -> list[str]:
        """What systemctl was asked."""
        return (self.folder / "asked").read_text().splitlines()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("systemctl", SYSTEMCTL.format(folder=tmp_path)), ("loginctl", "#!/bin/sh\necho no\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return User(tmp_path)


def _weft(*words: str) -> Result:
    verb, *rest = words
    return CliRunner().invoke(app, ["mesh", "service", verb, "--user", *rest])


def test_install_enables_and_starts_the_service_and_mentions_lingering(user: User) -> None:
    done = _weft("install", "mesh", "--", "--host", "0.0.0.0")
    assert done.exit_code == EXIT_OK
    assert "loginctl enable-linger" in done.stderr
    text = (user.units / "weft-mesh.service").read_text()
    assert text.startswith(MARK)
    assert "up --discover=no --host 0.0.0.0" in text
    assert [line.removeprefix("--user --no-pager ") for line in user.asked] == [
        "daemon-reload",
        "enable weft-mesh.service",
        "restart weft-mesh.service",
    ]


def test_unit_file_of_another_owner_is_never_replaced(user: User) -> None:
    user.units.mkdir(parents=True)
    (user.units / "weft-mesh.service").write_text("[Service]\nExecStart=/mine\n")
    done = _weft("install", "mesh")
    assert done.exit_code == EXIT_CONFLICT
    assert (user.units / "weft-mesh.service").read_text() == "[Service]\nExecStart=/mine\n"


def test_invitation_is_in_a_file_readable_only_by_its_owner(user: User) -> None:
    assert _weft("install", "join", "weft://secret").exit_code == EXIT_OK
    kept = user.folder / ".config" / "weft" / "weft-join.env"
    assert kept.read_text() == 'WEFT_JOIN_URL="weft://secret"\n'
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "secret" not in (user.units / "weft-join.service").read_text()
    assert _weft("remove", "join").exit_code == EXIT_OK
    assert not kept.exists()


def test_only_a_runner_service_takes_a_name(user: User) -> None:
    assert _weft("install", "runner").exit_code == EXIT_USAGE
    assert _weft("install", "router", "box").exit_code == EXIT_USAGE
    assert not user.units.exists()


def test_status_lists_each_service_and_fails_if_one_is_inactive(user: User) -> None:
    assert _weft("status").exit_code == EXIT_NOT_FOUND
    _weft("install", "mesh")
    done = _weft("status", "-o", "json")
    assert done.exit_code == EXIT_OK
    (item,) = json.loads(done.stdout)["items"]
    assert (item["unit"], item["state"], item["restarts"], item["process"]) == ("weft-mesh.service", "active", 3, 42)
    user.says("failed")
    assert _weft("status").exit_code == EXIT_FAILED


def test_uninstall_stops_a_service_first_and_an_unknown_one_returns_not_found(user: User) -> None:
    _weft("install", "registry")
    assert _weft("remove", "registry").exit_code == EXIT_OK
    assert "--user --no-pager stop weft-registry.service" in user.asked
    assert not (user.units / "weft-registry.service").exists()
    assert _weft("remove", "registry").exit_code == EXIT_NOT_FOUND


def test_systemd_errors_are_passed_through(user: User) -> None:
    user.fails("restart weft-mesh.service")
    done = _weft("install", "mesh")
    assert done.exit_code == EXIT_FAILED
    assert "restart weft-mesh.service failed: no such thing" in done.stderr


def test_machine_without_systemd_is_reported(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(user.folder))
    done = _weft("install", "mesh")
    assert done.exit_code == EXIT_FAILED
    assert "this machine has no systemd" in done.stderr
