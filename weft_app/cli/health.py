"""`weft mesh health`: a probe of the processes of a home, for containers and supervisors."""

from collections.abc import Iterator
from typing import Annotated

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.grpc_calls import MESH, call
from weft_app.cli.options import DEFAULT_HOME, EXIT_FAILED, EXIT_NOT_FOUND, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Column, Listing
from weft_app.cli.terminal import note
from weft_app.compose.home import WeftHome

CALL_SECONDS = 3.0
"""Timeout per process."""
READY, NOT_READY, LIVE, STUCK, NO_ANSWER = "ready", "not ready", "live", "stuck", "no answer"
_WORDS = {"readiness": (READY, NOT_READY), "liveness": (LIVE, STUCK)}
"""Texts for a healthy and an unhealthy process, by name in the health service."""


_PROCESSES = Listing(
    columns=(Column("PROCESS", "process"), Column("HEALTH", "health")),
    kind="ProcessHealthList",
)


def health(
    live: Annotated[
        bool, typer.Option("--live", help="Check liveness instead of readiness (is the process alive?).")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check the health of the processes of a home: a probe for containers and supervisors.

    Exit code 1 if one of them is not ready, or does not answer within 3 s; 3 if none runs. weft status shows more.

    Example: weft mesh health --live
    """
    folder = WeftHome(home.expanduser().absolute())
    question = "liveness" if live else "readiness"
    found = [{"process": name, "health": _answer(address, question)} for name, address in _processes(folder)]
    if not found:
        note(f"weft is not running on this home ({folder.root})")
        raise typer.Exit(EXIT_NOT_FOUND)
    _PROCESSES.print(found, output)
    if not all(each["health"] in (READY, LIVE) for each in found):
        raise typer.Exit(EXIT_FAILED)


def _processes(home: WeftHome) -> Iterator[tuple[str, str]]:
    """Yields name and address of `weft up`, or of each `weft serve` process on the home."""
    if home.is_claimed():
        running = home.running()
        # A starting mesh has no address yet.
        yield MESH, "" if running is None else str(running["grpc"])
        return
    for service, address in home.served().items():
        # The address of a gateway is a URL; its gRPC is on a socket of the home.
        yield service, home.address(service) if service == "gateway" else address
    yield from home.served_runners().items()


def _answer(address: str, question: str) -> str:
    if not address:
        return NO_ANSWER
    yes, no = _WORDS[question]
    try:
        request = health_pb2.HealthCheckRequest(service=question)
        answer = call(address, health_pb2_grpc.HealthStub, "Check", request, CALL_SECONDS)
    except WeftError:
        return NO_ANSWER
    return yes if answer.status == health_pb2.HealthCheckResponse.SERVING else no
