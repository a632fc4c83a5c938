"""The file of deploy/compose against the schema of Compose."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from weft_app.config.loader import load_config

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
CHECK = ROOT / ".venv-deploy" / "bin" / "check-jsonschema"
FOLDER = ROOT / "deploy" / "compose"
FILE = FOLDER / "compose.yaml"
LAPTOPS = FOLDER / "laptops.yaml"


def _faults(file: Path) -> str:
    command = [str(CHECK), "--builtin-schema", "vendor.compose-spec", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout if ended.returncode else ""


@pytest.mark.parametrize("file", [FILE, LAPTOPS], ids=lambda file: file.name)
def test_file_is_valid_compose(file: Path) -> None:
    assert _faults(file) == ""


def test_laptops_reach_the_relay_and_publisher_ports_of_each_router(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "weft.yaml", tmp_path / "weft.yaml")
    shutil.copy(FOLDER / "laptops.weft.yaml", tmp_path / "weft.local.yaml")
    loaded = load_config(tmp_path / "weft.yaml")
    inside = {text.rpartition(":")[2] for text in (loaded.relay.listen, loaded.publishers.listen) if text}
    outside = []
    services, known = yaml.safe_load(LAPTOPS.read_text())["services"], yaml.safe_load(FILE.read_text())["services"]
    for name in ("router-1", "router-2"):
        assert name in known
        pairs = [port.split(":") for port in services[name]["ports"]]
        assert {container for _, container in pairs} == inside, name
        outside += [host for host, _ in pairs]
        mounts = [volume.split(":")[1] for volume in services[name]["volumes"]]
        assert mounts == ["/etc/weft/weft.local.yaml", str(Path(loaded.relay.certificate_file or "").parent)]
    assert len(set(outside)) == len(outside) == 4


def test_unknown_compose_field_is_detected(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("read_only:", "readonly:"))
    assert "readonly" in _faults(wrong)
