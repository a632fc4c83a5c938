"""systemd units for the processes of a mesh, as text.

Pure: `weft_app.compose.systemd` writes and starts them. This program writes the units of deploy/systemd:

    python -m weft_app.compose.service_units FOLDER
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.names import require_name

SYSTEM_PROGRAM = "/opt/weft/bin/weft"
"""Path of weft in the units of deploy/systemd, outside home folders."""
SYSTEM_HOME = "/var/lib/weft"
SYSTEM_SETTINGS = "/etc/weft"
USER_PROGRAM = "%h/.local/bin/weft"
"""Path that pipx uses."""
USER_SETTINGS = "%h/.config/weft"
MAX_ARGUMENT_CHARS = 4_096
STOP_SECONDS = 900
"""Stop timeout, far above `drain_seconds` plus the grace periods of engines."""


class UnitKind(StrEnum):
    """The process that a unit runs."""

    MESH = "mesh"
    REGISTRY = "registry"
    ROUTER = "router"
    GATEWAY = "gateway"
    CENTRAL = "central"
    RUNNER = "runner"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class _Process:
    description: str
    command: str
    has_devices: bool = False
    """Whether it starts engines, which use accelerators and compile code at run time."""


_PROCESSES: Mapping[UnitKind, _Process] = {
    UnitKind.MESH: _Process("weft: one endpoint over every model", "up --discover=no", has_devices=True),
    UnitKind.REGISTRY: _Process("weft: registry", "serve registry"),
    UnitKind.ROUTER: _Process("weft: router", "serve router"),
    UnitKind.GATEWAY: _Process("weft: gateway", "serve gateway"),
    UnitKind.CENTRAL: _Process("weft: the models of providers", "serve central"),
    UnitKind.RUNNER: _Process("weft: runner %i", "serve runner --runner %i", has_devices=True),
    UnitKind.JOIN: _Process("weft: a runner that dials out", "runner join --discover=yes", has_devices=True),
}

_RESTARTS = f"""\
Type=exec
# systemd restarts a process that has ended. An unhealthy process is reported by weft mesh health, not restarted.
Restart=on-failure
RestartSec=2
# The kernel ends an engine before other processes: the service keeps running, and restarts it.
OOMPolicy=continue
# SIGTERM goes to the process itself, which drains its requests and then ends its engines.
KillMode=mixed
TimeoutStopSec={STOP_SECONDS}
"""

_HARDENED = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
PrivateTmp=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077
"""

_WITHOUT_DEVICES = """\
ProtectHome=yes
PrivateDevices=yes
ProtectProc=invisible
MemoryDenyWriteExecute=yes
"""

_WITH_DEVICES = """\
# Models may lie in homes, to be read; engines use accelerators, and some compile code while they run.
ProtectHome=read-only
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-drm rw
DeviceAllow=char-kfd rw
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A unit to generate."""

    kind: UnitKind
    is_system: bool
    """Whether the system's manager runs it, not a user's."""
    instance: str = ""
    """The name of the runner if the kind is `runner`."""
    program: str = SYSTEM_PROGRAM
    arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT for values that a unit cannot contain."""
        if self.kind is UnitKind.RUNNER and self.instance:
            require_name(self.instance, "NAME")
        elif self.instance:
            raise invalid_field("NAME", f"is for the kind {UnitKind.RUNNER}")
        for argument in (self.program, *self.arguments):
            if len(argument) > MAX_ARGUMENT_CHARS or not argument.isprintable():
                raise invalid_field("ARGUMENTS", f"have at most {MAX_ARGUMENT_CHARS} printable characters each")

    @property
    def file_name(self) -> str:
        """The file name; a runner's is a template for all runners."""
        return f"weft-{self.kind}@.service" if self.kind is UnitKind.RUNNER else f"weft-{self.kind}.service"

    @property
    def unit(self) -> str:
        """The name of the unit to start."""
        return self.file_name.replace("@", f"@{self.instance}")

    @property
    def environment_files(self) -> tuple[str, ...]:
        """Environment files in the order of reading: one for all units, then one for this unit."""
        folder = SYSTEM_SETTINGS if self.is_system else USER_SETTINGS
        return f"{folder}/weft.env", f"{folder}/weft-{self.kind}.env"

    @property
    def secret_environment(self) -> bool:
        """Whether the unit's environment file contains an invitation, a secret."""
        return self.kind is UnitKind.JOIN

    def text(self) -> str:
        """Returns the content of the file."""
        process = _PROCESSES[self.kind]
        words = [_quoted(self.program), process.command, *(_quoted(each).replace("%", "%%") for each in self.arguments)]
        lines = [
            "[Unit]",
            f"Description={process.description}",
            *(["Wants=network-online.target", "After=network-online.target"] if self.is_system else []),
            "# It is never given up, however often it fails.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"ExecStart={' '.join(words)}",
            *self._places(),
            *(f"EnvironmentFile=-{file}" for file in self.environment_files),
            "",
            _RESTARTS,
            *self._protection(process),
            "[Install]",
            f"WantedBy={'multi-user.target' if self.is_system else 'default.target'}",
            "",
        ]
        return "\n".join(lines)

    def _places(self) -> list[str]:
        """Returns the lines for the locations of settings and state."""
        if not self.is_system:
            return ["# weft.yaml is looked for here.", f"WorkingDirectory=-{USER_SETTINGS}"]
        return [
            "# A separate user, which exists while a unit of weft runs; all units share it.",
            "DynamicUser=yes",
            "User=weft",
            "StateDirectory=weft",
            "StateDirectoryMode=0700",
            "ConfigurationDirectory=weft",
            "# weft.yaml is looked for here.",
            f"WorkingDirectory={SYSTEM_SETTINGS}",
            f"Environment=WEFT_HOME={SYSTEM_HOME} HOME={SYSTEM_HOME}",
        ]

    def _protection(self, process: _Process) -> list[str]:
        if not self.is_system:
            return ["NoNewPrivileges=yes", "UMask=0077", ""]
        return [_HARDENED + (_WITH_DEVICES if process.has_devices else _WITHOUT_DEVICES)]


def _quoted(argument: str) -> str:
    """Quotes an argument for systemd."""
    plain = argument.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{plain}"' if not plain or any(character in plain for character in " '\t;\"") else plain


def main(folder: str) -> None:
    """Writes the units of deploy/systemd."""
    for place, is_system in (("system", True), ("user", False)):
        (Path(folder) / place).mkdir(parents=True, exist_ok=True)
        for kind in UnitKind:
            program = SYSTEM_PROGRAM if is_system else USER_PROGRAM
            plan = UnitPlan(kind=kind, is_system=is_system, program=program)
            (Path(folder) / place / plan.file_name).write_text(plan.text(), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
