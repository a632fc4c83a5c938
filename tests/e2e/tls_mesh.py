"""A mesh as processes apart that listen beyond loopback, over TLS with certificates on both ends."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from apart_mesh import Apart
from kit.quick_weft import within
from mesh_process import WEFT, fake_runner, user_environment, write_config

from weft_testing.certificates import Authority

HOST = "127.0.0.2"
"""An address of this machine that nobody else has; 0.0.0.0 is listened on, and TLS asked for."""
EVERYWHERE = "0.0.0.0:0"
QUICK = within({"weft.kernel.channels.tls_channel:ChannelSecurity": {"reload_interval_seconds": 0.01}})


class TlsMesh:
    """Registry, router, runner and gateway, each with a certificate of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = Authority()
        self.services = Apart(folder / "home", folder / "weft.yaml")
        self.addresses: dict[str, str] = {}

    def start_all(self) -> None:
        """Starts one of each."""
        self.start_services()
        self._start("runner", "--listen", EVERYWHERE, "--registry", self.addresses["registry"])

    def start_services(self, **registry: Any) -> None:
        """Starts registry, router and gateway; `registry`: settings of its section."""
        write_config(self.folder)
        self._start("registry", "--listen", EVERYWHERE, registry=registry)
        self._start("router", "--listen", f"tls:{HOST}:0", "--registry", self.addresses["registry"])
        places = ("--registry", self.addresses["registry"], "--router", self.addresses["router"])
        self._start("gateway", *places)

    def start_central(self, name: str) -> None:
        """Starts a runner of central models as on a machine of its own: with its own home and certificate."""
        home = str(self.folder / name / "home")
        places = ("--registry", self.addresses["registry"], "--home", home)
        self._start("central", "--listen", EVERYWHERE, *places, name=name)

    def issue(self, service: str) -> dict[str, str]:
        """A certificate for a service, new or in place of its old one; its section of the configuration."""
        place = self.folder / service
        place.mkdir(exist_ok=True)
        files = self.ca.issue(HOST, "127.0.0.1", f"weft://mesh/{service}").write(place, self.ca)
        return {
            "certificate_file": str(files.certificate_file),
            "key_file": str(files.key_file),
            "ca_file": str(files.ca_file),
        }

    def environment(self, service: str) -> dict[str, str]:
        """For a command that shows the certificate of a service."""
        files = self.issue(service)
        return {f"WEFT_{name.upper()}": path for name, path in files.items()}

    def _start(self, service: str, *arguments: str, name: str = "", **settings: Any) -> None:
        name = name or service
        files = self.issue(name)
        edge = {key: files[key] for key in ("certificate_file", "key_file")} if service == "gateway" else {}
        everyone = ["weft://mesh/*"]
        sections: dict[str, Any] = {
            "tls": {
                **files,
                "announced_host": HOST,
                "allowed_clients": {"registry": everyone, "router": everyone, "runner": ["weft://mesh/[rg]*"]},
            },
            "gateway": {"tls": edge},
            **settings,
        }
        config = write_config(self.folder / name, fake_runner("a", answer_tokens=3), **sections)
        self.addresses[name] = self.services.start(
            service, "--config", str(config), *arguments, within=QUICK, name=name
        )


async def weft(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """A command of somebody who has chosen no home."""
    environment = {name: value for name, value in user_environment().items() if name != "WEFT_HOME"}
    process = await asyncio.create_subprocess_exec(
        *WEFT,
        *arguments,
        env={**environment, "COLUMNS": "200", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(60.0):
        out, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), error.decode()
