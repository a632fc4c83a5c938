"""`weft conformance`: checks of a running runner, or of an endpoint picker, against its contract."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup
from typing_extensions import override

from weft.client._channel import mesh_address, security_from
from weft.kernel.errors import invalid_field
from weft_app.cli.options import DEFAULT_HOME, EXIT_FAILED, HomeOption, OutputFormat, OutputOption, note
from weft_app.cli.output import Column, Listing, say
from weft_testing.conformance.findings import Finding, Verdict
from weft_testing.conformance.picker_gateways import GATEWAYS, GatewayName
from weft_testing.conformance.picker_suite import PICKER_CHECKS, PickerCheck, examine_picker
from weft_testing.conformance.picker_under_test import PickerAddress, PickerOptions, attach_picker
from weft_testing.conformance.runner_requests import Check
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import attach

CheckT = TypeVar("CheckT", Check, PickerCheck)

_FINDINGS = Listing(
    columns=(
        Column("CHECK", lambda finding: finding.check, min_chars=18),
        Column("VERDICT", lambda finding: str(finding.verdict), min_chars=11),
        Column("SECONDS", lambda finding: f"{finding.seconds:.2f}", min_chars=7),
        Column("DETAIL", lambda finding: finding.detail),
    ),
    kind="FindingList",
    document=asdict,
)


class _RunnerByDefault(TyperGroup):
    """A word that is no command is a runner's name: `weft conformance NAME`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_runner = bool(args) and args[0] not in {*self.commands, "-h", "--help"}
        return super().parse_args(ctx, ["runner", *args] if is_runner else args)


app = typer.Typer(
    cls=_RunnerByDefault,
    help="Check a runner of the mesh, or an endpoint picker, against its contract, promise by promise.",
    epilog="Example: weft conformance gaming-pc; weft conformance picker 127.0.0.1:9002 --model qwen",
    no_args_is_help=True,
)
OnlyOption = Annotated[list[str] | None, typer.Option(help="Run only this check (repeatable).")]


@app.command("runner")
def runner(
    runner: Annotated[str, typer.Argument(metavar="RUNNER", help="A runner's name, or its address.")],
    model: Annotated[str | None, typer.Option(help="Model of the runner. Default: the first.")] = None,
    only: OnlyOption = None,
    keep_loaded: Annotated[bool, typer.Option(help="Skip the checks that unload the model.")] = False,
    output: OutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Check a runner of the mesh against the contract. The check uses the model: other requests may have to wait.

    Exit code 1 when a promise is broken; what cannot be checked here is reported and is no failure.

    Example: weft conformance gaming-pc --keep-loaded
    """
    checks = tuple(check for check in _chosen(only or [], CHECKS) if not (keep_loaded and check.unloads))

    async def findings() -> AsyncGenerator[Finding]:
        async with (
            attach(mesh_address(home, "registry"), runner, model, security_from(os.environ)) as subject,
            aclosing(examine(subject, checks)) as examined,
        ):
            async for finding in examined:
                yield finding

    _report(findings(), output)


@app.command("picker")
def picker(  # noqa: PLR0917 - options are parameters in typer
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="host:port of the picker; https://host:port where it serves TLS.")
    ],
    model: Annotated[str, typer.Option(help="Model to ask for.")],
    gateway: Annotated[GatewayName, typer.Option(help="Gateway to play.")] = GatewayName.LLM_D,
    key: Annotated[str | None, typer.Option(help="Key of the requests, as Authorization: Bearer.")] = None,
    unready_model: Annotated[str | None, typer.Option(help="A model without a ready endpoint.")] = None,
    max_filling: Annotated[
        int, typer.Option(min=0, max=4096, help="The most requests to hold at once until one is refused; 0: none.")
    ] = 64,
    hooks: Annotated[
        bool, typer.Option("--hooks", help="The picker was started with the hooks of gateways' conformance tests.")
    ] = False,
    health: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="host:port of its health service. Default: port 9003.")
    ] = None,
    only: OnlyOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check an endpoint picker, weft's or another, against the endpoint-picker protocol, as a gateway calls it.

    The command plays the gateway and makes up the endpoints' responses: no endpoint is asked. Exit code 1 when a
    promise is broken; what cannot be checked here is reported and is no failure.

    Example: weft conformance picker https://127.0.0.1:9002 --model qwen --gateway istio
    """
    checks = _chosen(only or [], PICKER_CHECKS)
    headers = () if key is None else (("authorization", f"Bearer {key}"),)
    options = PickerOptions(
        model=model, headers=headers, hooks=hooks, unready_model=unready_model, max_filling=max_filling
    )
    place = PickerAddress.parse(address, health)

    async def findings() -> AsyncGenerator[Finding]:
        async with (
            attach_picker(place, GATEWAYS[gateway], options) as subject,
            aclosing(examine_picker(subject, checks)) as examined,
        ):
            async for finding in examined:
                yield finding

    _report(findings(), output)


def _chosen(names: list[str], checks: tuple[CheckT, ...]) -> tuple[CheckT, ...]:
    known: Mapping[str, CheckT] = {check.name: check for check in checks}
    for name in names:
        if name not in known:
            raise invalid_field("--only", f"must be one of: {', '.join(known)}")
    return tuple(check for check in checks if not names or check.name in names)


def _report(examined: AsyncGenerator[Finding], output: OutputFormat) -> None:
    """Prints the findings; exits with EXIT_FAILED where a promise is broken."""
    findings = asyncio.run(_printed(examined, output))
    if output is not OutputFormat.TABLE:
        _FINDINGS.print(findings, output)
    broken = sum(finding.verdict is Verdict.BROKEN for finding in findings)
    honoured = sum(finding.verdict is Verdict.HONOURED for finding in findings)
    note(f"{honoured} honoured, {broken} broken, {len(findings) - honoured - broken} not checked")
    if broken:
        raise typer.Exit(EXIT_FAILED)


async def _printed(examined: AsyncGenerator[Finding], output: OutputFormat) -> list[Finding]:
    """Returns all findings; in a table each is printed as soon as it is known."""
    table = _FINDINGS.table(output)
    findings: list[Finding] = []
    async with aclosing(examined):
        async for finding in examined:
            if output is OutputFormat.TABLE:
                if not findings:
                    say(table.text(()))
                say(table.row(finding))
            elif sys.stderr.isatty():
                note(f"{finding.check}: {finding.verdict}")
            findings.append(finding)
    return findings
