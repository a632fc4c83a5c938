"""`weft keys sign` and `weft keys approve`: tokens that permit one operation, once, for a few minutes, and their keys.

`sign` makes a token with one signature; `approve` shows what a token permits and adds another one.
"""

import json
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.operations.v1.operation_service_pb2_grpc import OperationServiceStub
from weft.kernel.errors import WeftError, invalid_field, missing_package
from weft.kernel.file_replacement import replace_file
from weft.kernel.names import require_name
from weft.kernel.reasons import Reason
from weft.signing.strict_json import MAX_TOKEN_BYTES, MalformedToken
from weft.signing.tokens import (
    MAX_SIGNERS,
    MAX_TEXT_CHARS,
    Claims,
    in_words,
    make_op_token,
    make_payload,
    read_payload,
    read_shared_key,
)
from weft_app.cli import verbs
from weft_app.cli.grpc_calls import call_registry
from weft_app.cli.options import DEFAULT_HOME, HomeOption, note
from weft_app.cli.output import safe_text, say

if TYPE_CHECKING:
    from weft.signing.signatures import SignedBytes


MAX_LIFETIME_SECONDS = 300


AudienceOption = Annotated[
    str, typer.Option("--audience", metavar="ID", help="Without a mesh: id of the registry that will accept the token.")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="VERSION", help="Without a mesh: version of the registry's policy.")
]


def signing_rules(
    home: Path, audience: str, policy: str, lifetime_seconds: int = MAX_LIFETIME_SECONDS
) -> pb.GetGovernanceResponse:
    """Returns the rules of the mesh on `home`, or those of the options, which list no signers.

    Raises INVALID_ARGUMENT if only one of the options is given, and UNSUPPORTED_OPERATION if the registry accepts no
    signatures.
    """
    for option, text in (("--audience", audience), ("--policy", policy)):
        if bool(audience or policy) and not 0 < len(text) <= MAX_TEXT_CHARS:
            raise invalid_field(option, f"must be given with the other, 1 to {MAX_TEXT_CHARS} characters")
    if audience:
        rules = pb.GetGovernanceResponse(audience=audience, policy_version=policy)
        rules.token_lifetime.FromSeconds(lifetime_seconds)
        return rules
    found: pb.GetGovernanceResponse = call_registry(
        home, OperationServiceStub, "GetGovernance", pb.GetGovernanceRequest()
    )
    if found.mode == pb.GetGovernanceResponse.MODE_SHARED_KEY:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "the registry requires a shared key; sign with --shared-key")
    if found.mode != pb.GetGovernanceResponse.MODE_SIGNATURES:
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION, "the registry requires no signatures, so there is nothing to sign"
        )
    return found


def _require_signer(rules: pb.GetGovernanceResponse, key_id: str) -> None:
    """Raises INVALID_ARGUMENT if the signature is known not to count."""
    if rules.signers and key_id not in rules.signers:
        raise invalid_field(
            "--as", f"{key_id} is not a signer of this registry; the signers are {', '.join(rules.signers)}"
        )


app = typer.Typer()


@app.command("new-key")
def new_key(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file of the private key.")],
) -> None:
    """Create a signing key: the private half goes into a file that is never overwritten, the public half is printed.

    Example: weft keys sign new-key --out alice.pem
    """
    public = _signatures().new_key_file(out, "--out")
    say(f'public_key: "{public}"\n')
    note(f"the private key is in {out}; give the registry's operator the line above, and keep the file secret")


def _signatures() -> Any:
    """Imports what signs, as every command starts fast. Raises UNSUPPORTED_OPERATION without its library."""
    try:
        return import_module("weft.signing.signatures")
    except ImportError as error:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, missing_package("signatures need", "joserfc")) from error


def _make_token(
    action: operation_pb2.OperationAction,
    *,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Your private key.")] = None,
    key_id: Annotated[
        str, typer.Option("--as", metavar="ID", help="Your key id in the registry's configuration.")
    ] = "",
    shared_key: Annotated[
        Path | None,
        typer.Option(
            "--shared-key", metavar="FILE", help="The key shared with the registry, instead of a private key."
        ),
    ] = None,
    signers: Annotated[
        list[str] | None,
        typer.Option("--signer", metavar="ID", help="With --shared-key: name of a signer (repeatable)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Output file of the token. Default: standard output.")
    ] = None,
    audience: AudienceOption = "",
    policy: PolicyOption = "",
    lifetime: Annotated[
        int,
        typer.Option(
            "--lifetime", min=1, max=MAX_LIFETIME_SECONDS, help="Without a mesh: lifetime of the token in seconds."
        ),
    ] = MAX_LIFETIME_SECONDS,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    if (key is None) == (shared_key is None):
        raise invalid_field("--key", "or --shared-key must be given, and not both")
    if shared_key is not None:
        if key_id or audience or policy:
            raise invalid_field(
                "--shared-key", "can only be combined with --signer; a shared key has no --as, audience or policy"
            )
        _hand_over(_shared_key_token(action, shared_key, tuple(dict.fromkeys(signers or ()))), out)
        return
    assert key is not None, "one of the two is there"
    if signers:
        raise invalid_field("--signer", "is only for --shared-key; with --key, use --as")
    require_name(key_id, "--as")
    now = int(time.time())
    signatures = _signatures()
    private = signatures.read_private_key(key, "--key")
    rules = signing_rules(home, audience, policy, lifetime)
    _require_signer(rules, key_id)
    _hand_over(signatures.sign(make_payload(action, rules, now=now), private, key_id).as_text(), out)
    _say_what_is_missing(rules, out)


def _shared_key_token(action: operation_pb2.OperationAction, file: Path, signers: tuple[str, ...]) -> str:
    if not 0 < len(signers) <= MAX_SIGNERS:
        raise invalid_field("--signer", f"must name 1 to {MAX_SIGNERS} signers")
    for signer in signers:
        require_name(signer, "--signer")
    key = read_shared_key(file, "--shared-key")
    token = make_op_token(action, signers=signers, issued_at=int(time.time()), key=key)
    return json.dumps(token, indent=2, ensure_ascii=True) + "\n"


_PERMITS = (
    (
        verbs.load,
        "Permit a load with exactly these options. Then run `weft load` with the same options and the token.",
        "load qwen --ctx 8192",
    ),
    (verbs.unload, "Permit an unload.", "unload qwen"),
    (verbs.pull, "Permit a pull to the home of a runner.", "pull hf:Qwen/Qwen3-8B-GGUF:Q4_K_M --runner gpu-0"),
    (verbs.remove, "Permit the removal of a model that was loaded from a source.", "remove qwen3-8b-q4_k_m"),
    (verbs.flush, "Permit dropping cached prefixes.", "flush --tenant acme"),
)
for _verb, _text, _example in _PERMITS:
    _help = f"{_text}\n\nExample: weft keys sign {_example} --key alice.pem --as alice --out op.json"
    app.command(_verb.__name__)(verbs.command(_verb, _make_token, _help))


def _hand_over(text: str, out: Path | None) -> None:
    """Prints a token, or replaces the file atomically by it. Raises INVALID_ARGUMENT naming --out."""
    if out is None:
        say(text)
        return
    if len(text) > MAX_TOKEN_BYTES:
        raise invalid_field("--out", f"the token would be larger than {MAX_TOKEN_BYTES // 1024} KiB")
    if not out.parent.is_dir():
        raise invalid_field("--out", f"{out} cannot be written: there is no folder {out.parent}")
    try:
        replace_file(out, text.encode())
    except OSError as error:
        raise invalid_field("--out", f"{out} cannot be written: {error.strerror}") from error


def _say_what_is_missing(rules: pb.GetGovernanceResponse, out: Path | None) -> None:
    seconds, missing = rules.token_lifetime.seconds, rules.required_signers - 1
    if missing > 0:
        file = "FILE" if out is None else out
        note(f"{missing} more signatures are needed within {seconds} s: weft keys approve {file} --key KEY --as ID")
    elif rules.required_signers:
        note(f"valid once, for {seconds} s")
    else:
        note(f"other signers have {seconds} s: weft keys approve FILE --key KEY --as ID")


def approve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Token from `weft keys sign`.")],
    *,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Your private key.")],
    key_id: Annotated[str, typer.Option("--as", metavar="ID", help="Your key id in the registry's configuration.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file of the token. Default: the same file.")
    ] = None,
    audience: AudienceOption = "",
    policy: PolicyOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show what a token permits, as read from the signed action, and add your signature.

    Example: weft keys approve op.json --key bob.pem --as bob
    """
    signatures = _signatures()
    signed, claims = _read(file)
    private = signatures.read_private_key(key, "--key")
    rules = signing_rules(home, audience, policy)
    _require_signer(rules, require_name(key_id, "--as"))
    signers = [signature.key_id for signature in signed.signatures]
    if key_id in signers:
        raise invalid_field("--as", f"{key_id} has already signed it; each signer counts once")
    now = int(time.time())
    _require_good(claims, rules, now)
    _show(claims, signers, rules, now)
    if not yes:
        typer.confirm(f"Sign as {key_id}?", abort=True, err=True)
    agreed = signatures.sign(signed.payload_bytes, private, key_id, beside=signed.signatures)
    _hand_over(agreed.as_text(), out or file)
    missing = rules.required_signers - len(set(signers)) - 1
    say(f"signed; signatures still needed: {missing}\n" if missing > 0 else "signed\n")


def _read(file: Path) -> "tuple[SignedBytes, Claims]":
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise invalid_field("FILE", f"{file} cannot be read: {error.strerror}") from error
    if len(content) > MAX_TOKEN_BYTES or not content.isascii():
        raise invalid_field("FILE", f"{file} is larger than {MAX_TOKEN_BYTES // 1024} KiB or is no text")
    try:
        signed: SignedBytes = _signatures().read_signed(content.decode("ascii"))
        return signed, read_payload(signed.payload_bytes)
    except MalformedToken as error:
        raise invalid_field("FILE", f"{file} {error}") from error


def _require_good(claims: Claims, rules: pb.GetGovernanceResponse, now: int) -> None:
    lifetime_seconds = rules.token_lifetime.seconds
    if claims.audience != rules.audience:
        raise invalid_field("FILE", "is for another registry")
    if claims.policy_version != rules.policy_version:
        raise invalid_field("FILE", "was made under another version of the policy; request a new one")
    if claims.expires_at - claims.issued_at > lifetime_seconds:
        raise invalid_field("FILE", f"is valid for longer than the registry's {lifetime_seconds} s")
    if now >= claims.expires_at:
        raise invalid_field("FILE", f"expired {now - claims.expires_at} s ago; request a new one")


def _show(claims: Claims, signers: list[str], rules: pb.GetGovernanceResponse, now: int) -> None:
    until = datetime.fromtimestamp(claims.expires_at, UTC)
    needed = f" of {rules.required_signers}" if rules.required_signers else ""
    lines = [
        f"allows once, until {until:%H:%M:%S} UTC ({claims.expires_at - now} s from now), on {claims.audience}:",
        *(f"  {line}" for line in in_words(claims.action)),
        f"signatures, as stated in the token: {', '.join(signers)} ({len(set(signers))}{needed})",
    ]
    say("".join(f"{safe_text(line)}\n" for line in lines))
