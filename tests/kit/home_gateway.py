"""A real gateway on a home's socket, with a registry and router that a test serves over gRPC."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

import gateway.gateway_service
from weft.kernel.services.health import HealthSource
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft_app.compose.gateway import RemoteMesh
from weft_app.compose.home import WeftHome
from weft_app.compose.service_configs import gateway_config
from weft_app.config.config import AddressSettings, WeftConfig

START_SECONDS = 30.0
SILENT = 50
"""Log level that suppresses all output of the gateway."""


@contextmanager
def home_gateway(home: Path, registry: str, router: str = "", *, is_ready: bool = False) -> Iterator[str]:
    """Yields the gateway's URL, which is also in the file of `weft up`.

    `router`: by default the registry's address. `is_ready`: wait until the gateway knows the registry's resources. The
    gateway has its own thread and event loop, since commands block theirs.
    """
    ready, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    urls: list[str] = []
    folder = WeftHome(home)
    folder.create()
    config = WeftConfig(port=0, addresses=AddressSettings(registry=registry, router=router or registry))

    async def serve() -> None:
        remote = RemoteMesh(config, folder)
        service = gateway.gateway_service.build(
            gateway_config(config),
            remote.ports(HealthSource()),
            metrics=MetricsPage(),
            socket_path=folder.http_socket(),
        )
        await remote.start()
        await service.start()
        if is_ready:
            async with asyncio.timeout(START_SECONDS):
                await remote.fleet.wait_ready()
        loops.append(asyncio.get_running_loop())
        urls.append(service.url)
        ready.set()
        await over.wait()
        await service.stop(0)
        await remote.stop()

    # Otherwise the output of commands would contain its log.
    logging = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(SILENT))
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(START_SECONDS)
        facts = folder.running() or {"grpc": registry}
        folder.up_file.write_text(json.dumps(facts | {"url": urls[0]}))
        yield urls[0]
    finally:
        if loops:
            loops[0].call_soon_threadsafe(over.set)
        thread.join(START_SECONDS)
        structlog.configure(**logging)
