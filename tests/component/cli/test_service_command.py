"""`weft mesh service` of a user, with a systemctl that writes down what it is asked."""

import json
import os
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


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize(("user_id", "option"), [(0, " --user"), (1000, "")])
def test_next_command_shows_the_service_that_was_installed(
    monkeypatch: pytest.MonkeyPatch, user_id: int, option: str
) -> None:
    """For root, the command without an option shows the services of the machine."""
    monkeypatch.setattr(os, "geteuid", lambda: user_id)
    assert f"  weft mesh service status{option}   journalctl --user -u" in _weft("install", "mesh").stdout


def test_runners_whose_shared_arguments_change_are_named(user: User) -> None:
    """The arguments of other runners changed without a word."""
    enabled = user.units / "default.target.wants"
    enabled.mkdir(parents=True)
    (enabled / "weft-runner@gpu-0.service").symlink_to(user.units / "weft-runner@.service")
    assert "gpu-0" not in _weft("install", "runner", "gpu-0", "--", "--config", "a.yaml").stderr
    assert "gpu-0" not in _weft("install", "runner", "gpu-1", "--", "--config", "a.yaml").stderr
    changed = _weft("install", "runner", "gpu-1", "--", "--config", "b.yaml")
    assert changed.exit_code == EXIT_OK
    assert "from its next start, weft-runner@gpu-0.service has these arguments, too" in changed.stderr


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


def test_runner_service_that_was_never_enabled_is_removed(user: User) -> None:
    """It was said not to be installed, and its template stayed."""
    assert _weft("install", "--no-start", "runner", "box").exit_code == EXIT_OK
    template = user.units / "weft-runner@.service"
    assert template.exists()
    assert _weft("remove", "runner", "box").exit_code == EXIT_OK
    assert not template.exists()
    assert _weft("remove", "runner", "box").exit_code == EXIT_NOT_FOUND


def test_runner_template_stays_while_another_runner_uses_it(user: User) -> None:
    _weft("install", "runner", "box")
    (user.units / "default.target.wants").mkdir()
    (user.units / "default.target.wants" / "weft-runner@box.service").symlink_to(user.units / "weft-runner@.service")
    assert _weft("remove", "runner", "other").exit_code == EXIT_NOT_FOUND
    assert (user.units / "weft-runner@.service").exists()


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
