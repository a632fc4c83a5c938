"""A mesh that asks for keys, and its keys."""

import subprocess

from mesh_process import WEFT, MeshProcess, user_environment


def weft(mesh: MeshProcess, *arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [*WEFT, *arguments, "--home", str(mesh.home)], capture_output=True, text=True, check=False,
        env=user_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def new_key(mesh: MeshProcess, *arguments: str) -> str:
    """A new key: its text."""
    return weft(mesh, "keys", "create", "-o", "name", *arguments)


def revoke(mesh: MeshProcess, key: str) -> None:
    """Makes a key useless."""
    weft(mesh, "keys", "revoke", key.split("_")[1])
