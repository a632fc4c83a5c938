"""A mesh whose state moves from SQLite to PostgreSQL: all that it showed before is shown after."""

import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from filled_mesh import fill, kept_config, shown, weft
from mesh_process import WEFT, running_mesh, user_environment
from test_previous_databases import settled

pytestmark = pytest.mark.slow("starts meshes, and a PostgreSQL server")
pytest_plugins = ("database_fixtures",)

DOCUMENT = b"what a caller has uploaded\n" * 100_000


def ran(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*WEFT, *words, "--home", str(home)]
    return subprocess.run(command, env=user_environment(), capture_output=True, text=True, check=False)


def with_databases(config: Path, url: str) -> None:
    document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**document, "registry": {"database_url": url}, "router": {"database_url": url}}))


def seen(mesh: Any) -> dict[str, Any]:
    found: dict[str, Any] = settled(shown(mesh))
    return found


def test_everything_moves_to_postgresql_and_a_home_that_was_not_moved_says_so(
    tmp_path: Path, postgres_url: str
) -> None:
    """After `database_url` was set, every key was unknown, and nothing said why."""
    home, config, dump = tmp_path / "home", kept_config(tmp_path), tmp_path / "mesh.dump"
    at = ("--config", str(config))
    with running_mesh(home, *at) as mesh:
        fill(mesh, tmp_path)
        key = weft(home, "keys", "create", "-o", "name").strip()
        (tmp_path / "value").write_text("hush")
        weft(home, "keys", "secret", "create", "provider", "--from-file", str(tmp_path / "value"))
        with httpx2.Client(base_url=mesh.url, headers={"Authorization": f"Bearer {key}"}) as client:
            sent = client.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a.txt", DOCUMENT)})
        file = sent.json()["id"]
        before = seen(mesh)
        assert "another registry runs on this database" in ran(home, "mesh", "dump", str(dump), *at).stderr
        assert not dump.exists()
    with_databases(config, postgres_url)
    with running_mesh(home, *at):
        pass
    said = (tmp_path / "home.out").read_text()
    for service, held in (("registry", "API keys (2), secrets (1)"), ("router", "tasks (")):
        assert f"{home}/state/{service}.db has {held}" in " ".join(said.split())
    assert "weft mesh dump --from-home" in ran(home, "doctor", *at).stdout
    assert ran(home, "mesh", "dump", str(dump), "--from-home", *at).returncode == 0
    restored = ran(home, "mesh", "restore", str(dump), *at)
    assert restored.returncode == 0, restored.stderr
    again = ran(home, "mesh", "restore", str(dump), *at)
    assert "has API keys (2), secrets (1)" in again.stderr
    assert "--replace" in again.stderr
    assert ran(home, "mesh", "restore", str(dump), "--replace", *at).returncode == 0
    with running_mesh(home, *at) as mesh:
        assert "not used" not in (tmp_path / "home.out").read_text()
        assert seen(mesh) == before
        with httpx2.Client(base_url=mesh.url, headers={"Authorization": f"Bearer {key}"}) as client:
            assert client.get("/v1/models").status_code == httpx2.codes.OK
            assert client.get(f"/v1/files/{file}/content").content == DOCUMENT
        assert "provider" in weft(home, "get", "secrets")
    assert "not used" not in ran(home, "doctor", *at).stdout
    # And to another machine, from PostgreSQL back to files.
    back, elsewhere = tmp_path / "back.dump", tmp_path / "elsewhere"
    assert ran(home, "mesh", "dump", str(back), *at).returncode == 0
    kept_config(tmp_path)
    assert ran(elsewhere, "mesh", "restore", str(back), *at).returncode == 0
    for name in ("key-pepper", "secret-keys", "results.key"):
        assert (elsewhere / "state" / name).read_bytes() == (home / "state" / name).read_bytes()
    with running_mesh(elsewhere, *at) as mesh:
        assert seen(mesh) == before


def test_key_files_that_differ_are_not_overwritten_and_nothing_is_restored(tmp_path: Path) -> None:
    config, dump = kept_config(tmp_path), tmp_path / "mesh.dump"
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        with running_mesh(home, "--config", str(config)):
            weft(home, "keys", "create")
    assert ran(homes[0], "mesh", "dump", str(dump), "--config", str(config)).returncode == 0
    (homes[1] / "state" / "registry.db").unlink()
    (homes[1] / "state" / "router.db").unlink()
    refused = ran(homes[1], "mesh", "restore", str(dump), "--config", str(config))
    assert f"{homes[1]}/state/key-pepper" in refused.stderr
    assert "differ from those in the dump" in refused.stderr
    assert refused.returncode != 0
