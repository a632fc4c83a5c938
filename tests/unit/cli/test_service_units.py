"""Units of systemd: what stands in them, checked by systemd itself where it is there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft_app.compose.service_units import UnitKind, UnitPlan, main

SHIPPED = Path(__file__).parents[3] / "deploy" / "systemd"
WEFT = str(Path(sys.executable).with_name("weft"))
MAX_EXPOSURE = 3.0
has_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
KINDS = pytest.mark.parametrize("kind", UnitKind)


def _plan(kind: UnitKind, *, is_system: bool = True, arguments: tuple[str, ...] = ()) -> UnitPlan:
    return UnitPlan(kind=kind, is_system=is_system, program=WEFT, arguments=arguments)


def _analyzed(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, check=False)


def _verified(plan: UnitPlan, folder: Path, text: str) -> str:
    """What `systemd-analyze verify` has against a unit."""
    file = folder / plan.file_name.replace("@", "@box")
    file.write_text(text)
    # Without a folder of its own at run time, the manager of a user says so and ends with 0.
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "SYSTEMD_LOG_COLOR": "0"}
    scope = [] if plan.is_system else ["--user"]
    ended = subprocess.run(
        ["systemd-analyze", "verify", *scope, file], capture_output=True, text=True, check=False, env=environment
    )
    return ended.stderr


def _exposure(folder: Path, text: str) -> float:
    file = folder / "weft-x.service"
    file.write_text(text)
    said = _analyzed("security", "--offline=true", "--no-pager", file).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found is not None, said
    return float(found[1])


def test_deployed_units_match_the_code(tmp_path: Path) -> None:
    main(str(tmp_path))
    written = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*.service")}
    shipped = {str(file.relative_to(SHIPPED)): file.read_text() for file in SHIPPED.rglob("*.service")}
    assert written == shipped


@has_systemd
@KINDS
@pytest.mark.parametrize("is_system", [True, False], ids=["system", "user"])
def test_systemd_accepts_every_unit(kind: UnitKind, is_system: bool, tmp_path: Path) -> None:
    plan = _plan(kind, is_system=is_system, arguments=("--home", "/with a space"))
    assert _verified(plan, tmp_path, plan.text()) == ""


@has_systemd
@pytest.mark.parametrize("is_system", [True, False], ids=["system", "user"])
def test_systemd_complaint_about_a_unit_is_detected(is_system: bool, tmp_path: Path) -> None:
    plan = _plan(UnitKind.ROUTER, is_system=is_system)
    assert _verified(plan, tmp_path, plan.text().replace("Restart=", "Restrat="))
    assert _verified(plan, tmp_path, plan.text().replace(WEFT, "/none/weft"))


@has_systemd
@KINDS
def test_system_unit_has_low_exposure(kind: UnitKind, tmp_path: Path) -> None:
    assert _exposure(tmp_path, _plan(kind).text()) < MAX_EXPOSURE
    assert _exposure(tmp_path, _plan(kind, is_system=False).text()) > MAX_EXPOSURE, "the negative control"


def test_arguments_reach_the_command_as_typed() -> None:
    text = _plan(UnitKind.GATEWAY, arguments=("--config", "/a b/weft.yaml", "$HOME", 'say "hi"')).text()
    assert f'ExecStart={WEFT} serve gateway --config "/a b/weft.yaml" $$HOME "say \\"hi\\""' in text


def test_percent_sign_in_an_argument_is_not_a_specifier() -> None:
    assert "ExecStart=%h/.local/bin/weft serve router 100%%" in (
        UnitPlan(kind=UnitKind.ROUTER, is_system=False, program="%h/.local/bin/weft", arguments=("100%",)).text()
    )


def test_runners_share_a_template_and_have_names() -> None:
    plan = UnitPlan(kind=UnitKind.RUNNER, is_system=True, instance="gpu-0")
    assert (plan.file_name, plan.unit) == ("weft-runner@.service", "weft-runner@gpu-0.service")
    assert "serve runner --runner %i" in plan.text()
    with pytest.raises(WeftError, match="is for the kind runner"):
        UnitPlan(kind=UnitKind.ROUTER, is_system=True, instance="gpu-0")
    with pytest.raises(WeftError, match="NAME"):
        UnitPlan(kind=UnitKind.RUNNER, is_system=True, instance="../../etc")


def test_argument_with_a_line_break_is_refused() -> None:
    with pytest.raises(WeftError, match="printable"):
        _plan(UnitKind.MESH, arguments=("--home", "x\nExecStartPre=/bin/evil"))
