"""`weft doctor`: checks of this machine and its mesh, each fault with its remedy."""

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from router_svc.store.commit_count import CommitCountFile
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.policy.engine_variables import withheld_variables
from runner_svc.runtimes.runtime import ModelFault
from runner_svc.runtimes.runtime_settings import (
    ModelSettings,
    SleepingModelSettings,
    StartedModelSettings,
    UpstreamSettings,
)
from runner_svc.runtimes.table import DEFAULT_RUNTIME, installed, require_runtime, usable_names, why_off
from weft.client._home import ADDRESS_VARIABLES
from weft.documents.resource_kinds import ResourceKind
from weft.extension import all_extensions, disabled_extensions, installed_extensions, listener_hooks
from weft.gpu.nvml import read_within
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.structured_logs import discarded_logs
from weft.kernel.time.clock import offset_words
from weft.kernel.values.names import close_names
from weft.kernel.values.units import size_words
from weft_app.cli.doctor_checks import (
    DRIVER_SECONDS,
    MAX_ASKED_AT_ONCE,
    Finding,
    Verdict,
    accelerator_findings,
    attempt,
    central_model_findings,
    certificate_findings,
    examine_mesh,
    failed,
    memory_finding,
    ok,
    platform_finding,
    port_findings,
    registry_findings,
    stored_prompt_findings,
    warning,
)
from weft_app.cli.explain import prompt_change
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.network_options import NetworkOptions, with_network_options
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_FAILED,
    HomeOption,
    MeshConfigOption,
    OutputFormat,
    OutputOption,
)
from weft_app.cli.output import Listing, custom_columns
from weft_app.cli.records import hosts_of, lease_rows, leased_bytes
from weft_app.cli.secrets import names_of_secrets
from weft_app.cli.terminal import is_out_terminal, safe_text, say
from weft_app.compose.demo import configured_runners
from weft_app.compose.dump import left_behind
from weft_app.compose.engine_reports import engine_reports
from weft_app.compose.environment import environment_of_mesh
from weft_app.compose.home import MAX_SOCKET_PATH_BYTES, WeftHome, has_started, is_socket_address
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.loader import load_files
from weft_app.config.runners import with_engines
from weft_app.edge.binary import INSTALL, envoy_binary

if TYPE_CHECKING:
    from runner_svc.policy.model_names import ServerList

FINDING_INDENT = " " * 8
"""On a terminal: the width of the longest verdict and a space."""
ORDERED_SECONDS = 0.5
"""Checks that end within this time are shown in order on a terminal."""
MIN_FREE_BYTES = 1024**3
MAX_NAMED_LEASES = 4
MAX_EXAMINED_REQUESTS = 200
MIN_PROMPT_CHANGES = 3
"""Fewer changes in a session are not reported: a new date or other tools change a prompt once."""


_FINDINGS = Listing(
    columns=custom_columns("CHECK:check :verdict DETAIL:detail FIX:remedy"),
    kind="FindingList",
    document=asdict,
)


@with_network_options
def doctor(
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
    *,
    network: NetworkOptions,
    output: OutputOption = OutputFormat.TABLE,
    mesh: Annotated[
        bool, typer.Option("--mesh", help="Check only the running mesh: the versions of all its processes.")
    ] = False,
) -> None:
    """Check whether a mesh can run on this machine. Exit code 1 if something is missing.

    The options are those of `weft up`, and what it would refuse with them is reported.

    With --mesh it lists the version of each process of the running mesh, and which releases and schemas do not go
    together.

    Example: weft doctor -o json
    """
    # A plain path, so that this home is checked even if variables refer to another mesh.
    folder = WeftHome(Path(home.expanduser().absolute()))
    is_page = output is OutputFormat.TABLE and is_out_terminal()
    found = examine_mesh(home) if mesh else examine(folder, config, network, as_known=is_page)
    with discarded_logs():
        findings = _printed(found, output, is_page=is_page)
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _printed(findings: Iterator[Finding], output: OutputFormat, *, is_page: bool) -> list[Finding]:
    """Prints and returns the findings; the page of a terminal shows each one immediately."""
    if not is_page:
        found = list(findings)
        _FINDINGS.print(found, output)
        return found
    found = []
    for finding in findings:
        found.append(finding)
        say("".join(f"{line}\n" for line in _finding_lines(finding, shutil.get_terminal_size().columns)))
    return found


def _finding_lines(finding: Finding, columns: int) -> Iterator[str]:
    """Yields a finding as lines of a terminal."""
    fill = partial(
        wrap, width=columns, subsequent_indent=FINDING_INDENT, break_long_words=False, break_on_hyphens=False
    )
    yield from fill(safe_text(f"{finding.verdict:<8}{finding.check}: {finding.detail}"))
    if finding.remedy:
        yield from fill(safe_text(f"fix: {finding.remedy}"), initial_indent=FINDING_INDENT)


def examine(
    home: WeftHome, config_path: Path | None, network: NetworkOptions, *, as_known: bool = False
) -> Iterator[Finding]:
    """Yields the findings of all checks in the order of a start. `network` has the options for `weft up`.

    `as_known`: a check that takes longer than ORDERED_SECONDS comes when it ends, and delays no other.
    """
    yield platform_finding(sys.platform, f"{platform.system()} {platform.machine()}", platform.python_version())
    yield _packages()
    yield _home(home)
    yield memory_finding()
    yield _socket_path(home)
    try:
        given = network.overrides()
    except WeftError as error:
        yield failed("configuration", error.message, "leave one of them out")
        return
    try:
        below = partial(network.with_relay, below=partial(environment_of_mesh, environment=os.environ))
        files = home.config_files(config_path)
        config = load_files(files, given, below)
    except WeftError as error:
        yield failed("configuration", error.message, "correct the file")
        return
    running = _running(home)
    on = config.runners and tuple(with_engines(config.runners, config.extensions.disabled))
    usable = replace(config, runners=on)
    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: [_startable(config, home, files)],
        lambda: _memory(home),
        lambda: [_kept_tasks(home, config)],
        lambda: [warning("databases", *said.split("; ", 1)) for said in left_behind(config, home)],
        lambda: [ok("models", _models(config))],
        lambda: registry_findings(config.addresses.registry or os.environ.get(ADDRESS_VARIABLES["registry"])),
        lambda: _keys(config),
        lambda: _extensions(config),
        lambda: _runtimes(config),
        lambda: _runners(usable, home),
        lambda: _servers(usable),
        lambda: _followed(config),
        lambda: accelerator_findings(sys.platform, platform.machine(), read_within(DRIVER_SECONDS), Path("/sys")),
        lambda: _requirements(usable, home.environments),
        lambda: _engine_choices(usable, home.environments),
        lambda: _edge(config),
        lambda: certificate_findings(config),
        lambda: _programs(usable),
        lambda: _withheld(usable, os.environ),
        lambda: port_findings(config, running),
        lambda: _engines(home) if running is not None else (),
        lambda: _central_models(home),
        lambda: _clocks(home),
        lambda: _prompts(home) if running is not None else (),
        lambda: stored_prompt_findings(home.root) if running is not None else (),
    ]
    with ThreadPoolExecutor(len(checks), thread_name_prefix="doctor") as pool:
        started = [pool.submit(lambda check: list(check()), each) for each in checks]
        for each in by_end(started, ORDERED_SECONDS) if as_known else started:
            yield from each.result()


def by_end(started: Sequence[Future[list[Finding]]], seconds: float) -> Iterator[Future[list[Finding]]]:
    """Yields checks that end within `seconds` in their order, and then each other one when it ends."""
    ended, later = wait(started, seconds)
    yield from (each for each in started if each in ended)
    yield from as_completed(later)


def _edge(config: WeftConfig) -> Iterator[Finding]:
    if config.edge.proxy == "envoy":
        yield attempt("edge", lambda: str(envoy_binary(config.edge)), INSTALL)


def _packages() -> Finding:
    missing = [package for package in ("fastapi", "uvicorn") if find_spec(package) is None]
    if missing:
        detail = f"missing: {', '.join(missing)}; gateway cannot run here"
        return failed("packages", detail, "install weft again (docs/start.md), or: pip install " + " ".join(missing))
    return ok("packages", "gateway and registry can run here")


def _running(home: WeftHome) -> dict[str, Any] | None:
    """Returns the description of the running mesh; None if none runs: a killed one leaves its file."""
    found = home.running()
    return found if found is not None and home.is_claimed() else None


def _home(home: WeftHome) -> Finding:
    running = _running(home)
    if running is not None:
        state = "runs" if has_started(running) else "is starting"
        return ok("home", f"{home.root}: a mesh {state} here (pid {running['pids']['host']}, {running['url']})")
    try:
        home.create()
    except WeftError as error:
        return failed("home", error.message, "choose another with --home")
    free = shutil.disk_usage(home.root).free
    if free < MIN_FREE_BYTES:
        detail = f"{home.root}: {free // 1024**2} MiB free"
        return warning("home", detail, "free some space, or choose another disk with --home")
    return ok("home", f"{home.root}: {free // 1024**3} GiB free")


def _memory(home: WeftHome) -> Iterator[Finding]:
    """Yields the leases without an owner; nothing if no mesh runs here or it is unreachable."""
    unowned = ""
    if _running(home) is not None:
        with suppress(WeftError):
            unowned = unowned_text(lease_rows(hosts_of(home.root)))
    if unowned:
        yield warning("memory", f"memory without an owner: {unowned}", "weft unload MODEL, or restart that runner")


def unowned_text(leases: Iterable[Document]) -> str:
    """Returns the leases without an owner as text; empty if there are none."""
    found = [lease for lease in leases if lease.get("unowned")]
    words = [
        f"{size_words(leased_bytes(lease))} on {lease['host']} for {lease['purpose']} of {lease['holder']}"
        for lease in found[:MAX_NAMED_LEASES]
    ]
    return ", ".join(words) + (f" and {len(found) - MAX_NAMED_LEASES} more" if len(found) > MAX_NAMED_LEASES else "")


def _kept_tasks(home: WeftHome, config: WeftConfig) -> Finding:
    """Checks whether the router's database lost acknowledged data, as of its last start."""
    kept = CommitCountFile(home.promises)
    if notice := kept.notice():
        return warning("tasks", notice, kept.remedy)
    database = home.state / "router.db"
    is_here = not config.router.database_url and home.promises.exists()
    if is_here and _running(home) is not None and not database.exists():
        detail = f"{database} is gone, so the running mesh accepts no tasks"
        return failed("tasks", detail, "restore it, or restart the mesh")
    return ok("tasks", "no acknowledged data is known to be missing")


def _socket_path(home: WeftHome) -> Finding:
    path = home.run / "runner-local.sock"
    if is_socket_address(path):
        return ok("sockets", str(home.run))
    length = len(os.fsencode(path))
    why = f"the path is {length} bytes long" if length > MAX_SOCKET_PATH_BYTES else "the path has %, ? or #"
    return warning("sockets", f"{why}; using loopback ports instead", "another --home")


def _models(config: WeftConfig) -> str:
    models = [model for runner in configured_runners(config) for model in runner.models]
    return ", ".join(f"{model.name} ({model.location})" if model.location else model.name for model in models)


def _startable(config: WeftConfig, home: WeftHome, config_files: Sequence[Path]) -> Finding:
    """Runs the checks of `weft up` before it starts anything."""
    files = ", ".join(map(str, config_files))
    if not files:
        files = "defaults, as in the running mesh" if home.is_claimed() else f"defaults (there is no ./{CONFIG_NAME})"
    # Imported only if all packages are installed; otherwise there is nothing to check, and `packages` reports them.
    if _packages().verdict is not Verdict.FAILED:
        from weft_app.compose.startable import require_startable  # noqa: PLC0415

        try:
            require_startable(config, home)
        except WeftError as error:
            return failed("configuration", f"{files}: {error.message}", "correct the file; `weft up` refuses it")
    return ok("configuration", files)


def _runners(config: WeftConfig, home: WeftHome) -> Iterator[Finding]:
    """Yields runners that would not start and models that could not load, with the errors of `weft up`."""
    if not config.runners:
        return
    from weft_app.compose.runner import runner_config  # noqa: PLC0415 - with the engines of all runtimes

    for runner in config.runners:
        address = home.address(f"runner-{runner.name}")
        try:
            built = runner_config(
                runner, home, address=address, registry_address=address, model_store=config.model_store
            )
        except WeftError as error:
            message = f"runner {runner.name} does not start: {error.message}"
            yield failed("runners", message, "correct the file; `weft up` gives up on it")
            continue
        for model in built.models:
            if model.lack is not None:
                yield failed("loads", f"{model.name}: {model.lack.message}", "loads fail until this is installed")


def _runtimes(config: WeftConfig) -> Iterator[Finding]:
    """Yields the available runtimes, runners whose runtime is off, and unusable runtimes of other packages."""
    others, disabled = installed(), config.extensions.disabled
    packages = {each.name: f"{each.name} ({each.package})" for each in others if each.runtime is not None}
    usable = [name for name in usable_names() if not why_off(name, disabled)]
    yield ok("runtimes", ", ".join(packages.get(name, name) for name in usable))
    for runner in config.runners or ():
        if why := why_off(runner.runtime, disabled):
            yield warning("runtimes", f"{runner.name} serves no models: {why}", "remove it from extensions.disabled")
    for each in others:
        if each.runtime is None:
            yield failed("runtimes", f"{each.name} of {each.package}: {each.fault}", "update or uninstall that package")


def _extensions(config: WeftConfig) -> Iterator[Finding]:
    """Yields the extensions that are on, why others are off, and unusable ones of other packages."""
    found = all_extensions()
    off = disabled_extensions(found, config.extensions.disabled)
    yield ok("extensions", ", ".join(each.name for each in found if each.name not in off) or "none")
    for name, why in off.items():
        yield ok("extensions", f"{name} is off: {why}")
    for hook, why in listener_hooks(config.extensions.disabled):
        if why and hook.address(config) is not None:
            yield warning("extensions", f"{hook.setting} is set, but {why}", "remove it from extensions.disabled")
    for name in sorted({*config.extensions.disabled} - {each.name for each in found}):
        close = close_names(name, [each.name for each in found])
        yield warning("extensions", f"extensions.disabled names {name}, which is not installed", close or "remove it")
    for each in installed_extensions():
        if each.extension is None:
            words = f"{each.name} of {each.package}: {each.fault}"
            yield failed("extensions", words, "update or uninstall that package")


def _servers(config: WeftConfig) -> Iterator[Finding]:
    """Yields for each attached server whether it serves the configured model."""
    asked = [
        (model, find_fault)
        for runner in config.runners or ()
        if (find_fault := runner.engine.find_fault) is not None
        for model in runner.models
    ]
    with ThreadPoolExecutor(max_workers=MAX_ASKED_AT_ONCE) as pool:
        faults = pool.map(lambda each: each[1](each[0], os.environ), asked)
        yield from (_server(model, fault) for (model, _), fault in zip(asked, faults, strict=True))


def _server(model: ModelSettings, fault: ModelFault | None) -> Finding:
    if fault is None:
        return ok("server", f"{model.name}: its server responds and has the model")
    detail = f"{model.name}: {fault.message}"
    if fault.is_reachable:
        return warning("server", detail, fault.remedy)
    if isinstance(model, SleepingModelSettings) and model.wake is not None:
        return ok("server", f"{detail}; the first request will wake it")
    return failed("server", detail, fault.remedy)


def _followed(config: WeftConfig) -> Iterator[Finding]:
    """Yields the models of each followed server."""
    runners = [runner for runner in config.runners or () if runner.follows_server]
    if not runners:
        return
    from weft_app.compose.followed_servers import list_of_followed  # noqa: PLC0415 - few configurations need it

    async def lists() -> "Sequence[ServerList | None]":
        return await asyncio.gather(*map(list_of_followed, runners))

    for runner, found in zip(runners, asyncio.run(lists()), strict=True):
        if found is not None and found.models is None:
            yield warning("server", f"{runner.name}: {found.why}", found.remedy)
        elif found is not None and found.models is not None:
            yield ok("server", f"{runner.name}: its server has {', '.join(found.models.names) or 'no models'}")


def _requirements(config: WeftConfig, environments: EnvironmentFolder) -> Iterator[Finding]:
    """Checks once each whether programs, libraries and environments of the configured runtimes are installed."""
    configured = [(runner.runtime, runner.command) for runner in config.runners or ()]
    runners = [(DEFAULT_RUNTIME, None)] if config.runners is None else configured
    for name, command in dict.fromkeys(runners):
        runtime = require_runtime(name)
        needed, environment = runtime.requirement, runtime.environment
        is_installed = environment is not None and not command and environments.link(environment).is_symlink()
        if needed is not None and not is_installed:
            yield attempt(needed.name, partial(needed.find, command), needed.remedy)
        if environment is not None and not command and runtime.engine_report is None:
            look = partial(environments.description, environment)
            found = attempt("environment", look, environments.install_command(environment.name))
            is_advice = found.verdict is Verdict.FAILED and not runtime.needs_environment
            yield replace(found, verdict=Verdict.WARNING) if is_advice else found


def _engine_choices(config: WeftConfig, environments: EnvironmentFolder) -> Iterator[Finding]:
    """Reports which engines are used where there is a choice, and faster ones for this machine's devices."""
    engines = [(runner.engine, runner.command) for runner in config.runners or ()]
    engines = engines if config.runners is not None else [(require_runtime(DEFAULT_RUNTIME), None)]
    for text, advice in engine_reports(engines, environments):
        yield warning("engine", text, advice) if advice else ok("engine", text)


def _programs(config: WeftConfig) -> Iterator[Finding]:
    """Checks whether the program of each model with a `command` is installed."""
    for runner in config.runners or ():
        find_fault = runner.engine.find_program_fault
        if find_fault is None:
            continue
        for model in runner.models:
            fault = find_fault(model, runner.command, os.environ)
            if fault is None:
                yield ok("program", f"{model.name}: its program is installed")
            else:
                yield failed("program", f"{model.name}: {fault.message}", fault.remedy)


def _withheld(config: WeftConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the names of the variables that not all engines of a runtime get, once per runtime."""
    passed: dict[str, list[set[str]]] = {}
    for runner in configured_runners(config):
        if runner.engine.starts_engines:
            models = [set(model.environment) for model in runner.models if isinstance(model, StartedModelSettings)]
            passed.setdefault(runner.runtime, []).extend(models or [set()])
    for runtime, each_own in passed.items():
        withheld, own = withheld_variables(environment, require_runtime(runtime).variables), set.intersection(*each_own)
        if names := [name for name in withheld if name not in own]:
            detail = f"engines of {runtime} do not get: {', '.join(names)}, unless a model's `environment` sets them"
            yield ok("variables", detail)


def _keys(config: WeftConfig) -> Iterator[Finding]:
    """Checks whether the variables for the models' keys are set, without showing their values."""
    waiting: dict[str, list[str]] = {}
    for model in (model for runner in config.runners or () for model in runner.models):
        if isinstance(model, UpstreamSettings) and model.api_key_env is not None:
            waiting.setdefault(model.api_key_env, []).append(model.name)
    if waiting:
        from runner_svc.runtimes.unmanaged_server import read_key  # noqa: PLC0415 - with an HTTP client
    for variable, names in sorted(waiting.items()):
        try:
            read_key(variable, os.environ)
        except WeftError as error:
            yield failed("keys", f"{', '.join(names)}: {error.message}", f"export {variable}=... before you start weft")
        else:
            yield ok("keys", f"{variable} is set, for {', '.join(names)}")


def _has_registry(home: WeftHome) -> bool:
    files = home.run / "registry.sock", home.address_file("registry")
    return _running(home) is not None or any(file.exists() for file in files)


def _central_models(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per central model if a registry runs on this home. Sends no keys."""
    if not _has_registry(home):
        return
    try:
        with connect(home.root) as api:
            central = [each for each in api.documents(ResourceKind.MODEL) if "provider" in each]
            secrets = set(names_of_secrets(api)) if central else set()
    except WeftError as error:
        yield warning("central models", error.message, "weft get models")
        return
    yield from central_model_findings(central, secrets)


def _clocks(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per runner with a clock that is notably off, if a registry runs on this home."""
    runners: list[Document] = []
    if _has_registry(home):
        with suppress(WeftError), connect(home.root) as mesh:
            runners = mesh.documents(ResourceKind.RUNNER)
    for runner in runners:
        status = runner["status"]
        offset, is_refused = status.get("clockOffsetSeconds"), status.get("clockRefused", False)
        if offset and status["state"] == "active":
            detail = f"runner {runner['name']}: {offset_words(offset)}{'; it takes no requests' if is_refused else ''}"
            yield (failed if is_refused else warning)("clock", detail, f"correct the clock of {status['host']} (NTP)")


def _engines(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per model of this home's mesh with an engine that ended because of a fault."""
    try:
        with connect(home.root) as mesh:
            models = mesh.documents(ResourceKind.MODEL)
    except WeftError as error:
        yield warning("engines", error.message, "weft events")
        return
    faulty = [each for each in (model["status"].get("instance", {}) for model in models) if each.get("faultCount")]
    for instance in faulty:
        count, model = instance["faultCount"], instance["model"]
        times = f"{count} {'time' if count == 1 else 'times'} because of a fault"
        last = instance.get("lastFault") or "unknown"
        yield warning("engines", f"{model}: ended {times}, the last time: {last}", f"weft describe model/{model}")
    if not faulty:
        yield ok("engines", "none ended because of a fault")


def _prompts(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per session of recent requests with a prompt that keeps changing near its beginning."""
    requests: list[Document] = []
    with suppress(WeftError), connect(home.root) as api:
        requests = api.get("/v1/requests", limit=MAX_EXAMINED_REQUESTS, state="ended", allTenants=True)["items"]
    sessions: dict[tuple[str, str], Document] = {}
    for request in requests:
        if change := request.get("receipt", {}).get("promptChange"):
            sessions.setdefault((request["tenant"], change["session"]), request)
    for request in sessions.values():
        change = request["receipt"]["promptChange"]
        if change["changeCount"] >= MIN_PROMPT_CHANGES and 2 * change["changeCount"] > change["requestCount"]:
            detail = f"{prompt_change(request['receipt'])}; nothing after this is cached"
            yield warning("prompts", detail, f"move the changing part to the end: weft explain {request['requestId']}")
