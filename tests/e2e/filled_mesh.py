"""A mesh with one of each thing that its databases keep, and what it shows of them.

python tests/e2e/filled_mesh.py FOLDER, run with the tree of a release, writes the databases of that release into FOLDER
as SQL, with what the release itself showed of them. `test_previous_databases` opens them with the tree of today.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import yaml
from mesh_process import COLD_WEFT, WEFT, MeshProcess, fake_runner, running_mesh, user_environment, write_config

DATABASES = ("registry", "router")
PEPPER = "key-pepper"
WAIT_SECONDS = 30.0
ASLEEP = "m-asleep"
ABSENT = "m-absent"
DECLARED = (
    {
        "kind": "model",
        "name": ASLEEP,
        "poolName": "sleepers",
        "operations": ["chat"],
        "contextTokens": 4096,
        "digest": "sha256:" + "ab" * 32,
        "skills": ["text", "tools"],
        "wake": {
            "byMesh": {
                "type": "http",
                "url": "http://127.0.0.1:9/wake",
                "method": "PUT",
                "headers": {"X-Profile": "räum"},
            },
            "maxWaitSeconds": 7.5,
        },
    },
    {
        "kind": "model",
        "name": "m-card",
        "wake": {"byMesh": {"type": "wake_on_lan", "macAddress": "00:11:22:33:44:55", "port": 7}},
    },
    {"kind": "model", "name": ABSENT},
    {"kind": "model", "name": "m-program", "wake": {"byMesh": {"type": "command", "argv": ["true", "--now"]}}},
    {
        "kind": "agent",
        "name": "scholar",
        "model": ASLEEP,
        "description": "Reads \u2013 and answers.",
        "systemPrompt": "Answer briefly.\nCite nothing.",
        "defaultParams": {"temperature": 0.25, "max_tokens": 64, "stop": ["END"], "logit_bias": {"7": -1.5}},
        "platformPrompt": True,
        "tools": ["search"],
        "maxToolIterations": 3,
        "signals": ["NEEDS_HIGHER_REASONER"],
        "stopOnDecisionRequest": False,
        "repetition": "warn",
        "parseTextToolCalls": False,
    },
    {"kind": "agent", "name": "pooled", "pool": "pool"},
    {
        "kind": "route",
        "name": "ladder",
        "candidates": ["m-a", ASLEEP],
        "budgetSeconds": 30,
        "keepAlive": "5m",
        "pinPrimary": True,
    },
)
_WEFT = COLD_WEFT if __name__ == "__main__" else WEFT
"""As a program, this may run beside an older tree than that of the warm server."""
_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def kept_config(folder: Path) -> Path:
    """A mesh with one runner."""
    return write_config(folder, fake_runner("a"))


def weft(home: Path, *arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [*_WEFT, *arguments, "--home", str(home)],
        env=user_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"weft {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def fill(mesh: MeshProcess, folder: Path) -> None:
    """Make one of each thing that is kept."""
    declared = folder / "declared.yaml"
    declared.write_text(yaml.safe_dump_all(DECLARED))
    weft(mesh.home, "apply", "-f", str(declared))
    weft(mesh.home, "config", "set", "allowCloudFallback=false")
    weft(mesh.home, "keys", "create", "--tenant", "team-a", "--role", "user", "--description", "Ann's notebook")
    with httpx2.Client(base_url=mesh.url, timeout=WAIT_SECONDS) as client:
        _fill_tasks(client)
        _fill_batch(client)
        first = _sent(client.post("/v1/responses", json={"model": "m-a", "input": "Hello", "max_output_tokens": 8}))
        again = {"model": "m-a", "input": "Again", "previous_response_id": first["id"], "max_output_tokens": 8}
        _sent(client.post("/v1/responses", json=again))
        background = {"model": "m-a", "input": "Later", "background": True, "max_output_tokens": 8}
        later = _sent(client.post("/v1/responses", json=background))
        _until(client, f"/v1/responses/{later['id']}", "status", "incomplete")
    weft(mesh.home, "models", "flush", "--tenant", "team-a")
    weft(mesh.home, "unload", "m-a")
    weft(mesh.home, "load", "m-a", "--ctx", "2048")


def _fill_tasks(client: httpx2.Client) -> None:
    done = _sent(
        client.post("/api/v1/inference-tasks", json={"model": "m-a", "body": _CHAT}, headers={"Idempotency-Key": "k-1"})
    )
    _until(client, f"/api/v1/inference-tasks/{done['id']}", "state", "completed")
    vectors = {"model": "m-a", "endpoint": "/v1/embeddings", "body": {"input": ["one", "two"]}}
    embedded = _sent(client.post("/api/v1/inference-tasks", json=vectors))
    _until(client, f"/api/v1/inference-tasks/{embedded['id']}", "state", "completed")
    long = {"messages": [{"role": "user", "content": "word " * 2_100}]}
    failed = _sent(client.post("/api/v1/inference-tasks", json={"model": "m-a", "body": long, "max_attempts": 1}))
    _until(client, f"/api/v1/inference-tasks/{failed['id']}", "state", "failed")
    for _ in range(2):
        waiting = {"model": ABSENT, "body": _CHAT}
        pending = _sent(client.post("/api/v1/inference-tasks", json=waiting))
    _sent(client.post(f"/api/v1/inference-tasks/{pending['id']}/cancel"))


def _fill_batch(client: httpx2.Client) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m-a", **_CHAT},
        }
        for number in range(3)
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    file = _sent(client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)}))
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = _sent(client.post("/v1/batches", json={**asked, "metadata": {"of": "the release"}}))
    _until(client, f"/v1/batches/{batch['id']}", "status", "completed")


def shown(mesh: MeshProcess) -> dict[str, Any]:
    """All that the mesh shows of what it keeps; what changes with the moment is left out."""
    home = mesh.home
    found: dict[str, Any] = {
        kind: list(yaml.safe_load_all(weft(home, "get", kind, "-o", "yaml"))) for kind in ("models", "agents", "routes")
    }
    for name, command in {
        "keys": ("keys", "list"),
        "operations": ("mesh", "operation", "list"),
        "settings": ("config", "get"),
    }.items():
        found[name] = json.loads(weft(home, *command, "-o", "json"))
    found["audit"] = json.loads(weft(home, "mesh", "audit", "list", "-o", "json"))
    found["verdict"] = weft(home, "mesh", "audit", "verify")
    with httpx2.Client(base_url=mesh.url, timeout=WAIT_SECONDS) as client:
        tasks = _sent(client.get("/api/v1/inference-tasks"))["data"]
        found["tasks"] = [_sent(client.get(f"/api/v1/inference-tasks/{task['id']}")) for task in tasks]
        found["files"] = _sent(client.get("/v1/files"))["data"]
        found["contents"] = {file["id"]: client.get(f"/v1/files/{file['id']}/content").text for file in found["files"]}
        found["batches"] = _sent(client.get("/v1/batches"))["data"]
        ids = [row[0] for row in _rows(home, "router", "SELECT id FROM responses ORDER BY id")]
        found["responses"] = [_sent(client.get(f"/v1/responses/{id_}")) for id_ in ids]
        found["inputs"] = [_sent(client.get(f"/v1/responses/{id_}/input_items")) for id_ in ids]
    return found


def _rows(home: Path, database: str, statement: str) -> list[Any]:
    with sqlite3.connect(f"file:{home}/state/{database}.db?mode=ro", uri=True) as connection:
        return connection.execute(statement).fetchall()


def _sent(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code < httpx2.codes.BAD_REQUEST, response.text
    found: dict[str, Any] = response.json()
    return found


def _until(client: httpx2.Client, path: str, field: str, value: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while (found := _sent(client.get(path)))[field] != value:
        assert time.monotonic() < deadline, f"{path} is {found}"
        time.sleep(0.05)


def dump(home: Path, folder: Path) -> None:
    """Write the databases as SQL, and the secret that hashes of keys are made with."""
    shutil.copyfile(home / "state" / PEPPER, folder / PEPPER)
    for name in DATABASES:
        with sqlite3.connect(home / "state" / f"{name}.db") as connection:
            (folder / f"{name}.sql").write_text("\n".join(connection.iterdump()) + "\n")


def restore(folder: Path, home: Path, passed_seconds: int) -> None:
    """Make a home with these databases, all their times later by `passed_seconds`: nothing has expired."""
    (home / "state").mkdir(parents=True, mode=0o700)
    shutil.copyfile(folder / PEPPER, home / "state" / PEPPER)
    (home / "state" / PEPPER).chmod(0o600)
    for name in DATABASES:
        with sqlite3.connect(home / "state" / f"{name}.db") as connection:
            connection.executescript((folder / f"{name}.sql").read_text())
            for table, column in _times(connection):
                connection.execute(_LATER.format(table=table, column=column), {"seconds": passed_seconds})


_LATER = """
    UPDATE {table} SET {column} = CASE typeof({column})
        WHEN 'text' THEN strftime('%Y-%m-%d %H:%M:%S', {column}, '+' || :seconds || ' seconds') || substr({column}, 20)
        WHEN 'real' THEN CASE WHEN {column} > 0 THEN {column} + :seconds ELSE {column} END
        ELSE {column} END
"""
_FIXED = "audit_entries"
"""Each entry has the hash of the one before it."""


def _times(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [
        (table, column)
        for table in tables
        if table != _FIXED
        for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))
        if column.endswith("_at")
    ]


def main(folder: Path) -> None:
    """Write the databases of the tree that this runs with."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        home, config = Path(scratch) / "home", kept_config(Path(scratch))
        with running_mesh(home, "--config", str(config), weft=COLD_WEFT) as mesh:
            fill(mesh, Path(scratch))
            kept = {"seconds": int(time.time()), "shown": shown(mesh)}
            (folder / "shown.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        dump(home, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
