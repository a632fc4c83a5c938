import sys

import pytest

from runner_svc.tools import mcp_servers
from runner_svc.tools.port import ToolSettings
from runner_svc.tools.schemas import ArgumentCheck
from runner_svc.tools.tool_box import build_tool_box
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def test_a_missing_library_for_checks_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(WeftError, match="pip install jsonschema") as caught:
        ArgumentCheck("t", {"type": "object"}).parse("{}")
    assert caught.value.reason is Reason.TOOL_UNAVAILABLE


async def test_a_missing_sdk_leaves_the_runner_up_and_names_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    monkeypatch.delitem(sys.modules, "runner_svc.tools.mcp_connection", raising=False)
    monkeypatch.setattr(mcp_servers, "EAGER_FAILURES", 1)
    box = build_tool_box([ToolSettings(type="mcp_command", name="files", argv=("never-run",))])
    await box.start()
    with pytest.raises(WeftError, match="pip install mcp"):
        box.pick(["files.read"])
    await box.stop()
