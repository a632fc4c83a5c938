"""The credential of a joined machine, which is derived from its secret, differently for each mesh."""

import hmac
import re
import secrets
from pathlib import Path

from registry_svc.store.owner_file import create_owner_file, read_owner_file
from weft.kernel.errors.error_tree import invalid_field
from weft_app.compose.home import WeftHome
from weft_app.compose.join_address import JoinAddress, Trust

SECRET_BYTES = 32
ID_CHARS = 12
_SECRET = re.compile(rb"[0-9a-f]{%d}" % (2 * SECRET_BYTES))
_FIELD = "--home"


def machine_credential(secret: str, mesh: str = "") -> str:
    """Returns the credential for a mesh, such that no mesh can use it at another."""

    def part(purpose: str) -> str:
        return hmac.new(secret.encode(), f"{purpose} {mesh}".encode(), "sha256").hexdigest()

    return f"wjm_{part('id')[:ID_CHARS]}_{part('secret')}"


def credential_in(home: WeftHome, addresses: tuple[JoinAddress, ...], trust: Trust) -> str:
    """Returns the credential of this home's machine for a mesh. Creates the secret if there is none.

    The mesh is known by the fingerprint of its certificate, else by the names in its addresses.
    """
    mesh = trust.fingerprint or ",".join(sorted({address.host for address in addresses}))
    return machine_credential(_secret(home.state / "machine"), mesh)


def _secret(file: Path) -> str:
    content = read_owner_file(file, _FIELD, max_bytes=2 * SECRET_BYTES)
    if content is None:
        content = create_owner_file(file, secrets.token_hex(SECRET_BYTES).encode(), _FIELD)
    if not _SECRET.fullmatch(content):
        raise invalid_field(_FIELD, f"{file} is damaged; delete it, and join with a new token")
    return content.decode()
