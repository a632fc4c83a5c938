"""Envoy from the test environment: validates configurations, and runs with one."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("envoy")
START_SECONDS = 30.0
STOP_SECONDS = 10.0


def faults(document: dict[str, Any], folder: Path) -> str:
    """Returns Envoy's faults in a configuration; empty: none."""
    file = folder / "checked.json"
    file.write_text(json.dumps(document))
    command = [str(PROGRAM), "--mode", "validate", "-l", "error", "-c", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return "" if ended.returncode == 0 else ended.stderr


@contextmanager
def running_envoy(document: dict[str, Any], folder: Path) -> Iterator[str]:
    """Runs Envoy within the block; yields its listener's address, such as 127.0.0.1:4321.

    The listener must have port 0.
    """
    file, addresses, log = folder / "envoy.json", folder / "admin.address", folder / "envoy.out"
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    file.write_text(json.dumps({"admin": admin, **document}))
    command = [str(PROGRAM), "-c", str(file), "--concurrency", "1", "-l", "warn", "--disable-hot-restart"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--admin-address-path", str(addresses)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _listener_address(process, addresses, log)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _listener_address(process: subprocess.Popen[bytes], addresses: Path, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        if not addresses.exists() or not addresses.read_text().strip():
            continue
        with urllib.request.urlopen(f"http://{addresses.read_text().strip()}/listeners?format=text") as answer:
            found = answer.read().decode().strip()
        if found:
            return str(found.rpartition("::")[2])
    raise AssertionError(f"envoy does not listen:\n{log.read_text()}")
