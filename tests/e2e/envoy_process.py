"""A real Envoy with the configurations of deploy/: in front of a relay, and in front of gateways."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from mesh_process import POLL_SECONDS, START_SECONDS, STOP_SECONDS

from weft_testing.free_port import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "envoy"


Addresses = Mapping[tuple[str, int], tuple[str, int]]


def with_addresses(text: str, addresses: Addresses) -> str:
    """A configuration with other socket addresses; each of the named ones must be in it."""
    document = yaml.safe_load(text)
    found = set()

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "port_value" in value and (named := (value["address"], value["port_value"])) in addresses:
            found.add(named)
            host, port = addresses[named]
            return {**value, "address": host, "port_value": port}
        return {name: replaced(each) for name, each in value.items()}

    changed = replaced(document)
    assert found == set(addresses)
    return yaml.safe_dump(changed)


@contextmanager
def running_envoy(folder: Path, relay_port: int) -> Iterator[str]:
    """Envoy for the length of the block; the URL at which it takes runners for the relay at `relay_port`."""
    port, here = free_port(), "127.0.0.1"
    addresses = {(here, 7444): (here, port), (here, 7443): (here, relay_port)}
    with running_config(folder, with_addresses((FOLDER / "relay.yaml").read_text(), addresses), port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running_edge(folder: Path, tls: Path, gateway_ports: tuple[int, int]) -> Iterator[str]:
    """Envoy with edge.yaml for the length of the block; its URL. `tls` has its certificate."""
    port, here = free_port(), "127.0.0.1"
    text = (FOLDER / "edge.yaml").read_text().replace("/etc/envoy/tls", str(tls))
    addresses = {(f"gateway-{number}", 8080): (here, each) for number, each in enumerate(gateway_ports, 1)}
    with running_config(folder, with_addresses(text, {("0.0.0.0", 8443): (here, port), **addresses}), port):
        yield f"https://localhost:{port}"


@contextmanager
def running_config(folder: Path, text: str, port: int) -> Iterator[None]:
    """Envoy with a configuration for the length of the block; it listens at the port."""
    config = folder / "envoy.yaml"
    config.write_text(text)
    command = [str(Path(sys.executable).with_name("envoy")), "-c", str(config)]
    log = folder / "envoy.out"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--concurrency", "1", "-l", "warn", "--disable-hot-restart"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _until_it_listens(process, port, log)
        yield
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"envoy does not listen:\n{log.read_text()}") from None
            time.sleep(POLL_SECONDS)
