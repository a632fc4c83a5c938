"""Installs units of systemd and runs its manager."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft_app.compose.service_units import SYSTEM_SETTINGS, UnitPlan

COMMAND_SECONDS = 60.0
STOP_COMMAND_SECONDS = 960.0
"""More than STOP_SECONDS of a unit."""
MAX_ERROR_CHARS = 500
MARK = "# Written by weft mesh service install. Changes go into: systemctl edit UNIT (systemctl --user edit UNIT)."
_PROPERTIES = ("Id", "ActiveState", "SubState", "NRestarts", "MainPID", "ActiveEnterTimestamp", "Result")


@dataclass(frozen=True, slots=True)
class UnitState:
    """The state of a unit in the manager."""

    unit: str
    state: str
    """ActiveState of systemd: active, activating, deactivating, inactive or failed."""
    detail: str
    since: str
    restarts: int
    process: int
    """Its process id; 0: none."""


class Systemd:
    """The system's manager or the user's."""

    def __init__(self, *, is_system: bool) -> None:
        """Raises UNSUPPORTED_OPERATION without systemd."""
        if shutil.which("systemctl") is None:
            raise WeftError(
                Reason.UNSUPPORTED_OPERATION,
                "this machine has no systemd (no systemctl on PATH); start weft up by its own supervisor",
            )
        self.is_system = is_system

    @property
    def folder(self) -> Path:
        """The folder of units."""
        if self.is_system:
            return Path("/etc/systemd/system")
        settings = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        return Path(settings).expanduser() / "systemd" / "user"

    @property
    def settings(self) -> Path:
        """The folder of weft.yaml and of the environment files."""
        return Path(SYSTEM_SETTINGS) if self.is_system else Path("~/.config/weft").expanduser()

    def install(self, plan: UnitPlan, environment: Mapping[str, str]) -> Path:
        """Writes a unit, and its environment file if it has content. Returns the unit's file.

        Raises ALREADY_EXISTS if the file exists and is not from weft, PERMISSION_DENIED.
        """
        file = self.folder / plan.file_name
        try:
            if file.exists() and not file.read_text("utf-8", errors="replace").startswith(MARK):
                raise WeftError(
                    Reason.ALREADY_EXISTS, f"{file} is not of weft mesh service install; move it away first"
                )
            self.settings.mkdir(parents=True, exist_ok=True)
            if environment:
                lines = "".join(f'{name}="{value}"\n' for name, value in environment.items())
                replace_file(self.environment_file(plan), lines.encode())
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, f"{MARK}\n{plan.text()}".encode())
            file.chmod(0o644)
        except PermissionError as error:
            raise _denied(error) from error
        self._run("daemon-reload")
        return file

    def sharing(self, plan: UnitPlan) -> list[str]:
        """Returns the other installed units of a file that an installation of `plan` would change."""
        file = self.folder / plan.file_name
        if not file.exists() or file.read_text("utf-8", errors="replace") == f"{MARK}\n{plan.text()}":
            return []
        return [unit for unit in self.installed() if unit.startswith(file.stem) and unit != plan.unit]

    def environment_file(self, plan: UnitPlan) -> Path:
        """Returns the environment file of this unit's kind."""
        return self.settings / Path(plan.environment_files[-1]).name

    def start(self, plan: UnitPlan) -> None:
        """Enables and starts a unit; a running one is drained and restarted."""
        self._run("enable", plan.unit)
        self._run("restart", plan.unit, seconds=STOP_COMMAND_SECONDS)

    def remove(self, plan: UnitPlan) -> bool:
        """Drains and stops a unit, and deletes its files. Returns whether it was installed."""
        file = self.folder / plan.file_name
        used = [unit for unit in self.installed() if unit.startswith(file.stem)]
        # The template of runners may have been installed without starting one.
        if not file.exists() or (used and plan.unit not in used):
            return False
        self._run("disable", plan.unit, seconds=STOP_COMMAND_SECONDS)
        self._run("stop", plan.unit, seconds=STOP_COMMAND_SECONDS)
        with suppress(WeftError):
            self._run("reset-failed", plan.unit)
        # Other runners may still use the template.
        if not any(unit.startswith(file.stem) for unit in self.installed()) or not plan.instance:
            try:
                file.unlink(missing_ok=True)
                if plan.secret_environment:
                    self.environment_file(plan).unlink(missing_ok=True)
            except PermissionError as error:
                raise _denied(error) from error
        self._run("daemon-reload")
        return True

    def installed(self) -> list[str]:
        """Returns the names of weft's units: files, and enabled runners."""
        units = {file.name for file in self.folder.glob("weft-*.service") if not file.stem.endswith("@")}
        units.update(link.name for link in self.folder.glob("*.wants/weft-runner@*.service"))
        return sorted(units)

    def states(self) -> Iterator[UnitState]:
        """Yields the state of each installed unit."""
        for unit in self.installed():
            said = self._run("show", unit, f"--property={','.join(_PROPERTIES)}")
            known = dict(line.partition("=")[::2] for line in said.splitlines())
            result = known.get("Result", "")
            yield UnitState(
                unit=unit,
                state=known.get("ActiveState", ""),
                detail=known.get("SubState", "") if result in ("", "success") else result,
                since=known.get("ActiveEnterTimestamp", ""),
                restarts=int(known.get("NRestarts") or 0),
                process=int(known.get("MainPID") or 0),
            )

    def _run(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
        """Runs systemctl. Raises SERVICE_UNAVAILABLE with its output, DEADLINE_EXCEEDED."""
        command = ["systemctl", *([] if self.is_system else ["--user"]), "--no-pager", *arguments]
        try:
            ended = subprocess.run(  # noqa: S603 - an argument list, never a shell
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise WeftError(
                Reason.DEADLINE_EXCEEDED, f"{' '.join(command)} has not ended within {seconds:.0f} s"
            ) from error
        if ended.returncode != 0:
            said = " ".join(ended.stderr.split())[:MAX_ERROR_CHARS]
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"{' '.join(command)} failed: {said}")
        return ended.stdout


def user_ends_with_session() -> bool:
    """Whether this user's services end with the last session, because logind does not let them linger."""
    if shutil.which("loginctl") is None:
        return False
    ended = subprocess.run(  # noqa: S603 - an argument list, never a shell
        ["loginctl", "show-user", str(os.getuid()), "--property=Linger", "--value"],  # noqa: S607 - as systemctl
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    return ended.stdout.strip() == "no"


def _denied(error: PermissionError) -> WeftError:
    return WeftError(Reason.PERMISSION_DENIED, f"{error.filename} cannot be written; use sudo, or --user")
