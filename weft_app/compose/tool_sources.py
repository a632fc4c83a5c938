"""A runner's tool sources: settings, checked and with variables substituted. Each error names its field."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from yarl import URL

from runner_svc.runner_settings import RunnerSettings
from runner_svc.tools.port import ToolSettings
from weft.kernel.errors.error_tree import invalid_field

INHERITED = ("PATH", "HOME", "LANG")
"""Environment variables that an MCP server's program inherits from the runner."""
# Only these variables: a configuration must not read the rest of the environment.
_VARIABLE = re.compile(r"\$\{(WEFT_TOOL_[A-Z0-9_]+)\}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def tool_sources(section: RunnerSettings, environment: Mapping[str, str]) -> tuple[ToolSettings, ...]:
    """Returns the sources with `${WEFT_TOOL_...}` replaced from `environment`, that of the runner.

    Raises INVALID_ARGUMENT naming the field, never its value, which may be a secret.
    """
    _require_distinct(section.name, section.tools)
    return tuple(_source(tool, f"runners.{section.name}.tools.{tool.name}", environment) for tool in section.tools)


def _require_distinct(runner: str, tools: Sequence[ToolSettings]) -> None:
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise invalid_field(f"runners.{runner}.tools.{tool.name}", "two tools of one runner cannot share a name")
        names.add(tool.name)


def _source(tool: ToolSettings, where: str, environment: Mapping[str, str]) -> ToolSettings:
    _require_only_its_own(tool, where)
    if tool.type == "mcp_command":
        _require_program(tool, f"{where}.argv")
        return replace(tool, environment=_program_environment(tool, f"{where}.environment", environment))
    if tool.type == "mcp_http":
        _require_url(tool.url or "", f"{where}.url")
        return replace(tool, headers=_headers(tool, f"{where}.headers", environment))
    return tool


def _require_only_its_own(tool: ToolSettings, where: str) -> None:
    """Rejects fields of other source types, which would be ignored silently."""
    foreign = {
        "python": ("argv", "environment", "url", "headers", "allow"),
        "mcp_command": ("function", "url", "headers"),
        "mcp_http": ("function", "argv", "environment"),
    }[tool.type]
    for field in foreign:
        if getattr(tool, field):
            raise invalid_field(f"{where}.{field}", f"has no meaning for a tool of type {tool.type}")


def _require_program(tool: ToolSettings, field: str) -> None:
    if not tool.argv[0]:
        raise invalid_field(field, "must begin with a program")
    if any("\0" in argument for argument in tool.argv):
        raise invalid_field(field, "must not hold NUL characters")


def _program_environment(tool: ToolSettings, field: str, environment: Mapping[str, str]) -> dict[str, str]:
    for name, value in tool.environment.items():
        if not _VARIABLE_NAME.fullmatch(name) or "\0" in value:
            raise invalid_field(field, f"{name!r} cannot be the name of a variable, or its value holds NUL")
    inherited = {name: environment[name] for name in INHERITED if name in environment}
    return inherited | _substituted(tool.environment, field, environment)


def _headers(tool: ToolSettings, field: str, environment: Mapping[str, str]) -> dict[str, str]:
    headers = _substituted(tool.headers, field, environment)
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not value.isascii() or not value.isprintable():
            raise invalid_field(field, f"{name!r} cannot be sent: letters, digits and '-' in a name, ASCII in a value")
    return headers


def _require_url(text: str, field: str) -> None:
    try:
        url = URL(text)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise invalid_field(field, "must be an http or https URL with a host")
    if url.user is not None or url.password is not None:
        raise invalid_field(field, "must not contain credentials; put them into headers, from an environment variable")


def _substituted(values: Mapping[str, str], field: str, environment: Mapping[str, str]) -> dict[str, str]:
    def value_of(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise invalid_field(field, f"the environment variable {found[1]} is not set where the runner runs")
        return environment[found[1]]

    return {name: _VARIABLE.sub(value_of, value) for name, value in values.items()}
