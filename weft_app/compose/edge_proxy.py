"""The Envoy of `weft up`, as the configuration asks for it: `edge.proxy`."""

from gateway.http.server import free_address
from weft.kernel.clock import Clock
from weft_app.compose.gateway import gateway_config
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig
from weft_app.edge.binary import envoy_binary
from weft_app.edge.plan import EdgePlan, Endpoint, limits_of
from weft_app.edge.process import EdgeFiles, EdgeProxy, ProxyWatch

LOOPBACK = "127.0.0.1"


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
    )
    tls = None if exposure.tls is None else exposure.tls.files
    return EdgeProxy(plan, config.edge, binary, files, clock, tls=tls, watch=watch)
