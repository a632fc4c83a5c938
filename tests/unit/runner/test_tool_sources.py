from typing import Any

import pytest
from kit.failures import fails

from runner_svc.runner_settings import RunnerSettings
from runner_svc.tools.port import ToolSettings
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.tool_sources import tool_sources
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

ENVIRONMENT = {"PATH": "/bin", "HOME": "/root", "LANG": "C", "SECRET": "s", "WEFT_TOOL_TOKEN": "t0ken"}


def section(*tools: dict[str, Any]) -> RunnerSettings:
    return parse_section(
        ConfiguredRunner, {"name": "r", "models": [{"name": "m", "path": "/m.gguf"}], "tools": list(tools)}
    )


def test_every_type_becomes_its_source() -> None:
    sources = tool_sources(
        section(
            {"type": "python", "name": "count", "function": "a.b:c", "timeout_seconds": 2.0},
            {
                "type": "mcp_command",
                "name": "files",
                "argv": ["server", "--x"],
                "environment": {"KEY": "${WEFT_TOOL_TOKEN}", "HOME": "/tmp"},
                "allow": ["read"],
            },
            {
                "type": "mcp_http",
                "name": "mail",
                "url": "https://example.org/mcp",
                "headers": {"Authorization": "Bearer ${WEFT_TOOL_TOKEN}"},
                "max_output_bytes": 300,
            },
        ),
        ENVIRONMENT,
    )
    assert sources == (
        ToolSettings(type="python", name="count", function="a.b:c", timeout_seconds=2.0),
        ToolSettings(
            type="mcp_command",
            name="files",
            argv=("server", "--x"),
            environment={"PATH": "/bin", "HOME": "/tmp", "LANG": "C", "KEY": "t0ken"},
            allow=("read",),
        ),
        ToolSettings(
            type="mcp_http",
            name="mail",
            url="https://example.org/mcp",
            headers={"Authorization": "Bearer t0ken"},
            max_output_bytes=300,
        ),
    )
    assert "t0ken" not in repr(sources)


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "mcp_http", "name": "t", "url": "ftp://x"}, "url"),
        ({"type": "mcp_http", "name": "t", "url": "http://"}, "url"),
        ({"type": "mcp_http", "name": "t", "url": "http://[::1"}, "url"),
        ({"type": "mcp_http", "name": "t", "url": "http://me:pw@x/"}, "url"),
        ({"type": "mcp_http", "name": "t", "url": "http://x", "headers": {"A": "${WEFT_TOOL_NONE}"}}, "headers"),
        ({"type": "mcp_http", "name": "t", "url": "http://x", "headers": {"A b": "x"}}, "headers"),
        ({"type": "mcp_http", "name": "t", "url": "http://x", "headers": {"A": "x\r\nB: y"}}, "headers"),
        ({"type": "mcp_command", "name": "t", "argv": [""]}, "argv"),
        ({"type": "mcp_command", "name": "t", "argv": ["a", "\0"]}, "argv"),
        ({"type": "mcp_command", "name": "t", "argv": ["a"], "environment": {"A=B": "x"}}, "environment"),
        ({"type": "mcp_command", "name": "t", "argv": ["a"], "url": "http://x"}, "url"),
        ({"type": "python", "name": "t", "function": "a:b", "allow": ["x"]}, "allow"),
    ],
)
def test_mistakes_are_reported_by_field_without_the_value(tool: dict[str, Any], field: str) -> None:
    with fails(field=f"runners.r.tools.t.{field}") as caught:
        tool_sources(section(tool), ENVIRONMENT)
    assert "pw" not in caught.value.message


def test_other_environment_variables_cannot_be_read() -> None:
    tool = {"type": "mcp_http", "name": "t", "url": "http://x", "headers": {"A": "${SECRET}"}}
    (source,) = tool_sources(section(tool), ENVIRONMENT)
    assert source.type == "mcp_http"
    assert source.headers == {"A": "${SECRET}"}


def test_two_tools_with_one_name_are_refused() -> None:
    tool = {"type": "python", "name": "t", "function": "a:b"}
    with pytest.raises(FieldError, match="share a name"):
        tool_sources(section(tool, tool), ENVIRONMENT)
