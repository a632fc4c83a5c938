"""A real Envoy with the configurations of deploy/: in front of a relay, and in front of gateways."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh_process import POLL_SECONDS, START_SECONDS, STOP_SECONDS

from weft_testing.free_port import free_port

FOLDER = Path(__file__).parents[2] / "deploy" / "envoy"


@contextmanager
def running_envoy(folder: Path, relay_port: int) -> Iterator[str]:
    """Envoy for the length of the block; the URL at which it takes runners for the relay at `relay_port`."""
    port = free_port()
    text = (FOLDER / "relay.yaml").read_text().replace("port_value: 7444", f"port_value: {port}")
    with running_config(folder, text.replace("port_value: 7443", f"port_value: {relay_port}"), port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running_edge(folder: Path, tls: Path, gateway_ports: tuple[int, int]) -> Iterator[str]:
    """Envoy with edge.yaml for the length of the block; its URL. `tls` has its certificate."""
    port = free_port()
    text = (FOLDER / "edge.yaml").read_text().replace("/etc/envoy/tls", str(tls))
    text = text.replace("address: 0.0.0.0, port_value: 8443", f"address: 127.0.0.1, port_value: {port}")
    for name, gateway_port in zip(("gateway-1", "gateway-2"), gateway_ports, strict=True):
        text = text.replace(f"address: {name}, port_value: 8080", f"address: 127.0.0.1, port_value: {gateway_port}")
    with running_config(folder, text, port):
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
            [*command, "--concurrency", "1", "-l", "warn", "--use-dynamic-base-id"],
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
