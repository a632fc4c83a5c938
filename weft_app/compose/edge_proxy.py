"""The Envoy of `weft up`, as the configuration asks for it: `edge.proxy`."""

from pathlib import Path
from urllib.parse import urlsplit

from gateway.http.server import free_address
from weft.dispatch.fleet import FleetView
from weft.kernel.address import is_loopback
from weft.kernel.clock import Clock
from weft.kernel.errors import invalid_field
from weft_app.compose.gateway import gateway_config
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig
from weft_app.edge.binary import envoy_binary
from weft_app.edge.plan import EdgePlan, Endpoint, LanePlan, endpoint_of, limits_of
from weft_app.edge.process import EdgeFiles, EdgeProxy, ProxyWatch

LOOPBACK = "127.0.0.1"
_UNIX = "unix:"


async def edge_proxy(
    config: WeftConfig, home: WeftHome, gateway_port: int, clock: Clock, watch: ProxyWatch
) -> EdgeProxy:
    """Returns the Envoy in front of the gateway at this loopback port.

    `config` has the certificate of the edge. Raises as a gateway does where the public address is not available.
    """
    binary, files = envoy_binary(config.edge), EdgeFiles(folder=home.run)
    exposure = gateway_config(config).exposure()
    host, port = await free_address(exposure, "--port")
    plan = EdgePlan(
        listen=Endpoint(host=host, port=port),
        gateways=(Endpoint(host=LOOPBACK, port=gateway_port),),
        limits=limits_of(config),
        lane=_lane(config, files),
    )
    tls = None if exposure.tls is None else exposure.tls.files
    return EdgeProxy(plan, config.edge, binary, files, clock, tls=tls, watch=watch)


def _lane(config: WeftConfig, files: EdgeFiles) -> LanePlan | None:
    """Returns the lane, where the mesh has a picker. Raises INVALID_ARGUMENT for one that needs a certificate."""
    listen = config.picker.listen
    if listen is None:
        return None
    if listen.startswith(_UNIX):
        return LanePlan(picker=Path(listen.removeprefix(_UNIX)), endpoints_file=files.endpoints)
    picker = endpoint_of(listen, "picker.listen")
    if not is_loopback(picker.host):
        raise invalid_field(
            "picker.listen", "must be loopback or a Unix socket where weft up starts Envoy (edge.proxy)"
        )
    return LanePlan(picker=picker, endpoints_file=files.endpoints)


def lane_endpoints(view: FleetView) -> set[Endpoint]:
    """Returns the HTTP ports of the runners that take requests with tickets."""
    urls = (urlsplit(runner.lane_url) for runner in view.runners.values() if runner.active and runner.lane_url)
    return {Endpoint(host=url.hostname, port=url.port) for url in urls if url.hostname and url.port}
