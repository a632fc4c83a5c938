"""The credential of a joined machine: its own secret, of which each mesh gets a different part."""

import hmac
import secrets
from pathlib import Path

from weft.kernel.errors import WeftError
from weft.kernel.file_replacement import replace_file
from weft.kernel.reasons import Reason
from weft_app.compose.home import WeftHome
from weft_app.compose.join_address import JoinAddress, Trust

SECRET_BYTES = 32
ID_CHARS = 12


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
    try:
        if not file.exists():
            replace_file(file, secrets.token_hex(SECRET_BYTES).encode())
        return file.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(Reason.INVALID_ARGUMENT, f"{file} cannot be read: {error}") from error
