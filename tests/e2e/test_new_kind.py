"""A new kind of resource: one proto and one module, and no other file. See examples/kinds."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from mesh_process import COLD_WEFT, MeshProcess, fake_runner, running_mesh, user_environment, write_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kinds"
PACKAGES = ("gateway", "registry_svc", "router_svc", "runner_svc", "weft_app", "weft_testing", "docs")
PROTOS, GENERATED, KINDS = "protos/weft/api/registry/v1", "weft/api/registry/v1", "weft/documents/kinds"
COMMAND_SECONDS = 120.0
SQUAD = "kind: dataset\nname: squad\nmodel: pool\nurl: https://example.com/squad\n"
_COMPILED = """
from google.protobuf import descriptor_pool, timestamp_pb2
from google.protobuf.internal import builder
from weft.api.common.v1 import document_pb2
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({file!r})
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, "weft.api.registry.v1.dataset_pb2", globals())
"""
"""What protoc writes for a proto."""


def _linked(tree: Path, folder: Path) -> None:
    """Makes a folder whose entries are those of the checkout."""
    (tree / folder).mkdir()
    for entry in (ROOT / folder).iterdir():
        if entry.name != "__pycache__" and not (tree / folder / entry.name).exists():
            (tree / folder / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout with the two files of the example."""
    tree = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        (tree / package).symlink_to(ROOT / package)
    for changed in (PROTOS, GENERATED, KINDS):
        for folder in [*reversed(Path(changed).parents[:-1]), Path(changed)]:
            if (tree / folder).is_symlink():
                (tree / folder).unlink()
            if not (tree / folder).exists():
                _linked(tree, folder)
    for name, place in (("dataset.proto", PROTOS), ("dataset.py", KINDS)):
        (tree / place / name).write_text((EXAMPLE / name).read_text())
    image = tree / "image.binpb"
    buf: list[str | Path] = [Path(sys.executable).with_name("buf"), "build", "protos"]
    subprocess.run([*buf, "--path", f"{PROTOS}/dataset.proto", "-o", image], cwd=tree, check=True)
    from google.protobuf.descriptor_pb2 import FileDescriptorSet  # noqa: PLC0415 - here alone

    files = FileDescriptorSet.FromString(image.read_bytes()).file
    (file,) = (each for each in files if each.name.endswith("dataset.proto"))
    (tree / GENERATED / "dataset_pb2.py").write_text(_COMPILED.format(file=file.SerializeToString()))
    return tree


@pytest.fixture(scope="module")
def mesh(tree: Path) -> Iterator[MeshProcess]:
    home = tree / "home"
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tree))
        patch.chdir(tree)
        config = write_config(tree, fake_runner("a"))
        with running_mesh(home, "--config", str(config), weft=COLD_WEFT) as mesh:
            yield mesh


def _weft(mesh: MeshProcess, *arguments: str, stdin: str = "", **environment: str) -> str:
    tree = mesh.home.parent
    found = subprocess.run(
        [*COLD_WEFT, *arguments],
        cwd=tree,
        env=user_environment() | {"PYTHONPATH": str(tree), "WEFT_HOME": str(mesh.home), "COLUMNS": "200"} | environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.slow("starts a mesh")
def test_new_kind_works_in_commands_and_the_http_api(mesh: MeshProcess, tmp_path: Path) -> None:
    assert _weft(mesh, "apply", "-f", "-", stdin=SQUAD) == "dataset/squad created\n"
    header, row = _weft(mesh, "get", "datasets").splitlines()
    assert header.split() == ["NAME", "MODEL", "URL", "AGE"]
    assert row.split()[:3] == ["squad", "pool", "https://example.com/squad"]
    assert "https://example.com/squad" in _weft(mesh, "describe", "dataset/squad")
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i 's,com/squad,com/squad-2,' \"$1\"\n")
    editor.chmod(0o755)
    assert _weft(mesh, "config", "edit", "dataset/squad", EDITOR=str(editor)) == "dataset/squad configured\n"

    with httpx2.Client(base_url=mesh.url, timeout=COMMAND_SECONDS) as client:
        shown = client.get("/api/v1/datasets/squad").json()
        assert (shown["url"], shown["kind"]) == ("https://example.com/squad-2", "dataset")
        assert shown["status"]["createdAt"]
        with client.stream("GET", "/api/v1/watch", params={"kinds": "dataset"}) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {"))
            assert next(change for change in map(json.loads, lines) if change.get("name") == "squad")
        wrong = client.put("/api/v1/datasets/squad", json={"name": "squad", "model": "none"})
        assert (wrong.status_code, "none" in wrong.text) == (404, True), wrong.text
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/api/v1/datasets", "/api/v1/datasets/{name}"} <= paths.keys()
        assert client.delete("/api/v1/datasets/squad").status_code == 204
    assert _weft(mesh, "get", "datasets", "-o", "name") == ""


@pytest.mark.slow("writes the reference")
def test_reference_includes_the_new_kind(tree: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'docs' / 'site'}"}
    program = "from reference_pages.field_tables import page; print(page())"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "\n## DatasetDocument\n\nA dataset that a model is evaluated with.\n" in found.stdout
    assert "| `url` | string |" in found.stdout
