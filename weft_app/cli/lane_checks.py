"""The check of `weft doctor` of engines that proxies call themselves (`lane: engine`)."""

from collections.abc import Iterator

from weft.kernel.address import is_local
from weft_app.cli.findings import Finding, Verdict
from weft_app.compose.served_models import has_local_engine
from weft_app.config.config import WeftConfig

_CHECK = "lane"


def lane_findings(config: WeftConfig) -> Iterator[Finding]:
    """Yields a finding for each model whose engine listens on loopback and is called by proxies."""
    listen = config.picker.listen
    for runner in config.runners or ():
        for model in runner.models:
            if not has_local_engine(runner, model):
                continue
            where = f"{model.name}: `lane: engine` is on this machine's loopback, so the proxy must run here"
            if runner.http_port is None:
                detail = f"{where}; for others its requests go to a gateway, or are refused"
                remedy = f"set http_port of the runner {runner.name}, or leave `lane` out"
                yield Finding(check=_CHECK, verdict=Verdict.WARNING, detail=detail, remedy=remedy)
            elif listen is None or not is_local(listen):
                detail = f"{where}; others use the HTTP port {runner.http_port} of the runner {runner.name}"
                remedy = "run Envoy on this machine, or leave `lane` out"
                yield Finding(check=_CHECK, verdict=Verdict.WARNING, detail=detail, remedy=remedy)
            else:
                yield Finding(check=_CHECK, verdict=Verdict.OK, detail=where)
