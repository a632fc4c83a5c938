"""A home and a weft.yaml with what earlier releases had: the mesh starts, names each part, and serves the rest."""

import json
import shutil
import sqlite3
from pathlib import Path

from chats import answers
from mesh_process import fake_runner, run_weft, running_mesh, write_config

OLD = Path(__file__).parents[1] / "corpus" / "removed"
"""Registry of a mesh with two profiles, a workflow, an alias, and an audit entry of a changed log level."""
GOVERNANCE = {"mode": "signatures", "policy_version": "2", "signers": [{"id": "alice", "public_key": "o5IhO2"}]}
NAMED = (
    "registry.governance.signers.*.public_key (weft.yaml line ",
    "registry.governance.policy_version (weft.yaml line ",
    "registry.governance.mode: signatures was removed",
    "its runtime espeak_ng was removed; use: runtime: piper",
    "profiles were removed; use: weft apply -f FILE",
    "Stored and not used: profile/day, profile/night",
)


async def test_mesh_of_an_earlier_release_starts_without_removed_parts_and_keeps_the_rest(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "state").mkdir(parents=True, mode=0o700)
    shutil.copyfile(OLD / "key-pepper", home / "state" / "key-pepper")
    (home / "state" / "key-pepper").chmod(0o600)
    with sqlite3.connect(home / "state" / "registry.db") as registry:
        registry.executescript((OLD / "registry.sql").read_text())
    voice = {"name": "voice", "runtime": "espeak_ng", "models": [{"name": "reader"}]}
    config = write_config(tmp_path, fake_runner("a"), voice, registry={"governance": GOVERNANCE})
    with running_mesh(home, "--config", str(config)) as mesh:
        said = " ".join((await mesh.weft("config", "show", "--config", str(config))).split())
        assert "espeak_ng" not in said
        assert [runner.name for runner in await mesh.runners() if runner.address] == ["a"]
        assert await answers(mesh.url)
        assert "workflow/turbo" in await mesh.weft("get", "workflows", "-o", "name")
        assert "alias/chat" in await mesh.weft("get", "aliases", "-o", "name")
        assert "intact" in await mesh.weft("mesh", "audit", "verify")
        entries = json.loads(await mesh.weft("mesh", "audit", "list", "-o", "json"))["items"]
        assert [each["event"] for each in entries] == ["log_level.changed"]
        code, _, err = await run_weft("load", "m-a", home=mesh.home)
        assert (code, "refused" in err) == (1, True), "a mode that was removed must not open the mesh"
        code, _, err = await run_weft("get", "profiles", home=mesh.home)
        assert (code, "profiles were removed; use: weft apply -f FILE" in err) == (3, True)
    shown = (tmp_path / "home.out").read_text()
    assert [part for part in NAMED if part not in shown] == []
    with sqlite3.connect(home / "state" / "registry.db") as registry:
        kept = registry.execute("SELECT name FROM documents WHERE kind = 'profile' ORDER BY name").fetchall()
    assert kept == [("day",), ("night",)]
