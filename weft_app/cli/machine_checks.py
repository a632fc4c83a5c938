"""Checks of `weft doctor` about the machine: its system, memory, accelerators and ports."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from weft import __version__
from weft.gpu.nvml import Health, NvmlReading
from weft.kernel.units import size_words
from weft_app.cli.findings import Finding, Verdict, failed
from weft_app.config.config import DEFAULT_PORT, WeftConfig

DRIVER_SECONDS = 5.0
"""Timeout of NVIDIA's library, which hangs where a card does."""
MIN_AVAILABLE_BYTES = 1024**3
MAX_CARDS = 64
_AMD = "0x1002"
_DECLARE = "declare its memory: accelerators.declared"


def platform_finding(platform: str, described: str, python: str) -> Finding:
    """Returns what works on a platform, as `sys.platform` names it."""
    detail = f"weft {__version__}, Python {python}, {described}"
    match platform:
        case "linux":
            return Finding(check="platform", verdict=Verdict.OK, detail=detail)
        case "darwin":
            return Finding(
                check="platform",
                verdict=Verdict.WARNING,
                detail=f"{detail}: commands, meshes and joined runners run here; tests run on Linux only",
                remedy="report what does not work",
            )
        case "win32":
            return failed(
                "platform",
                f"{detail}: commands on a mesh elsewhere work here (chat, get, apply, keys); up, serve, run and runner "
                "join do not",
                "run the mesh in WSL (wsl --install), and name it in WEFT_REGISTRY and WEFT_ROUTER",
            )
        case _:
            return Finding(
                check="platform", verdict=Verdict.WARNING, detail=f"{detail}: unknown to weft", remedy="use Linux"
            )


def memory_finding() -> Finding:
    """Returns how much memory there is."""
    memory = psutil.virtual_memory()
    detail = f"{size_words(memory.available)} of {size_words(memory.total)} available"
    if memory.available < MIN_AVAILABLE_BYTES:
        return Finding(
            check="memory", verdict=Verdict.WARNING, detail=detail, remedy="end programs, or serve a smaller model"
        )
    return Finding(check="memory", verdict=Verdict.OK, detail=detail)


def accelerator_findings(
    platform: str, machine: str, nvidia: NvmlReading | None, system_folder: Path
) -> Iterator[Finding]:
    """Yields the accelerators by maker; one line that says so where there is none.

    `nvidia` is a reading of NVIDIA's library, None: it hung. `system_folder` is /sys.
    """
    found = False
    for finding in (_nvidia(nvidia), *_amd(system_folder), *_apple(platform, machine)):
        if finding is not None:
            found = True
            yield finding
    if not found:
        detail = (
            "no driver of an NVIDIA or AMD card, and no Apple GPU: models run on the CPU unless their engine brings "
            "another"
        )
        yield Finding(check="accelerators", verdict=Verdict.OK, detail=detail)


def _nvidia(reading: NvmlReading | None) -> Finding | None:
    if reading is None:
        return Finding(
            check="accelerators",
            verdict=Verdict.WARNING,
            detail=f"NVIDIA's driver did not answer within {DRIVER_SECONDS:g} s",
            remedy="nvidia-smi",
        )
    if reading.health is Health.FAILED:
        return Finding(
            check="accelerators", verdict=Verdict.WARNING, detail="NVIDIA's library fails", remedy="nvidia-smi"
        )
    if not reading.devices:
        return None
    cards = ", ".join(f"{device.name} ({size_words(device.total_bytes)})" for device in reading.devices)
    return Finding(check="accelerators", verdict=Verdict.OK, detail=f"NVIDIA: {cards}")


def _amd(system_folder: Path) -> Iterator[Finding]:
    cards = amd_cards(system_folder)
    if cards:
        sizes = ", ".join(f"{name} ({size_words(size)})" for name, size in cards)
        yield Finding(
            check="accelerators",
            verdict=Verdict.OK,
            detail=f"AMD: {sizes}; engines use it, weft does not lease its memory",
            remedy=_DECLARE,
        )


def amd_cards(system_folder: Path) -> list[tuple[str, int]]:
    """Returns the name and memory of each AMD card that the kernel's driver knows."""
    found = []
    with suppress(OSError):
        for card in sorted((system_folder / "class" / "drm").glob("card[0-9]*"))[:MAX_CARDS]:
            # Connectors such as card0-HDMI-A-1 have no such files.
            with suppress(OSError, ValueError):
                if (card / "device" / "vendor").read_text("ascii").strip() == _AMD:
                    found.append((card.name, int((card / "device" / "mem_info_vram_total").read_text("ascii"))))
    return found


def _apple(platform: str, machine: str) -> Iterator[Finding]:
    if platform == "darwin" and machine == "arm64":
        yield Finding(
            check="accelerators",
            verdict=Verdict.OK,
            detail="Apple GPU, which shares the memory of the machine: llama.cpp uses it (Metal), weft does "
            "not lease its memory",
            remedy=_DECLARE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PortUse:
    what: str
    host: str
    port: int
    remedy: str


def port_findings(config: WeftConfig, running: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yields whether each port that a start takes is free; `running`: what a mesh on this home has announced."""
    other = DEFAULT_PORT + 1 if config.port == DEFAULT_PORT else DEFAULT_PORT
    uses = [_PortUse(what="", host=config.host, port=config.port, remedy=f"weft up --port {other}")]
    if config.grpc_port is not None:
        remedy = f"weft up --grpc-port {config.grpc_port + 1}"
        uses.append(_PortUse(what=" (grpc_port)", host="127.0.0.1", port=config.grpc_port, remedy=remedy))
    for name, listen, remedy in (
        ("relay.listen", config.relay.listen, "weft up --join-port PORT, or another port in relay.listen"),
        ("publishers.listen", config.publishers.listen, "another port in publishers.listen"),
    ):
        host, _, port = (listen or "").rpartition(":")
        if port.isdecimal():
            uses.append(_PortUse(what=f" ({name})", host=host.strip("[]"), port=int(port), remedy=remedy))
    for use in uses:
        yield _port(use, running)


def _port(use: _PortUse, running: Mapping[str, Any] | None) -> Finding:
    if running is not None and (use.what or str(running.get("url", "")).endswith(f":{use.port}")):
        return Finding(check="port", verdict=Verdict.OK, detail=f"{use.port}{use.what}: used by the mesh on this home")
    try:
        family, _, _, _, address = socket.getaddrinfo(use.host, use.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return failed("port", f"{use.port}{use.what} on {use.host}: {why}", use.remedy)
    return Finding(check="port", verdict=Verdict.OK, detail=f"{use.port}{use.what} is free")
