"""`weft approve`: adds a second signature to a signed operation."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name
from weft.signing.actions import in_words
from weft.signing.strict_json import MalformedToken
from weft.signing.tokens import Claims, read_payload
from weft_app.cli.options import DEFAULT_HOME, HomeOption, reporting
from weft_app.cli.output import safe_text, say
from weft_app.cli.sign import (
    AudienceOption,
    PolicyOption,
    SigningRules,
    no_library,
    read_token_text,
    signing_rules,
    write_token_text,
)

if TYPE_CHECKING:
    from weft.signing.signatures import SignedBytes


def approve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Token from `weft sign`.")],
    *,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Your private key.")],
    key_id: Annotated[str, typer.Option("--as", metavar="ID", help="Your key id in the registry's configuration.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Output file of the token. Default: the same file.")
    ] = None,
    audience: AudienceOption = "",
    policy: PolicyOption = "",
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show what a token permits, from the signed action itself, and add your signature.

    Example: weft approve op.json --key bob.pem --as bob
    """
    with reporting():
        try:
            from weft.signing.signatures import read_private_key, sign  # noqa: PLC0415 - see `no_library`
        except ImportError as error:
            raise no_library() from error
        signed, claims = _read(file)
        private = read_private_key(key, "--key")
        rules = signing_rules(home, audience, policy)
        rules.require_signer(require_name(key_id, "--as"))
        signers = [signature.key_id for signature in signed.signatures]
        if key_id in signers:
            raise invalid_field("--as", f"{key_id} has signed it already; one signer counts once")
        now = int(time.time())
        _require_good(claims, rules, now)
        _show(claims, signers, rules, now)
        if not yes:
            typer.confirm(f"Agree as {key_id}?", abort=True, err=True)
        agreed = sign(signed.payload_bytes, private, key_id, beside=signed.signatures)
        write_token_text(out or file, agreed.as_text(), "--out")
        _say_what_is_missing(len(set(signers)) + 1, rules)


def _read(file: Path) -> "tuple[SignedBytes, Claims]":
    from weft.signing.signatures import read_signed  # noqa: PLC0415 - every command starts fast

    text = read_token_text(file, "FILE")
    try:
        signed = read_signed(text)
        return signed, read_payload(signed.payload_bytes)
    except MalformedToken as error:
        raise invalid_field("FILE", f"{file} {error}") from error


def _require_good(claims: Claims, rules: SigningRules, now: int) -> None:
    terms = rules.terms
    if claims.audience != terms.audience:
        raise invalid_field("FILE", "is made out to another registry than this one")
    if claims.policy_version != terms.policy_version:
        raise invalid_field("FILE", "was made under another version of the policy; ask for a new one")
    if claims.expires_at - claims.issued_at > terms.lifetime_seconds:
        raise invalid_field("FILE", f"is good for longer than the registry's {terms.lifetime_seconds} s")
    if now >= claims.expires_at:
        raise invalid_field("FILE", f"expired {now - claims.expires_at} s ago; ask for a new one")


def _show(claims: Claims, signers: list[str], rules: SigningRules, now: int) -> None:
    until = datetime.fromtimestamp(claims.expires_at, UTC)
    needed = f" of {rules.required_signers}" if rules.required_signers else ""
    lines = [
        f"allows once, until {until:%H:%M:%S} UTC ({claims.expires_at - now} s from now), on {claims.audience}:",
        *(f"  {line}" for line in in_words(claims.action)),
        f"signatures, by the token's own account: {', '.join(signers)} ({len(set(signers))}{needed})",
    ]
    say("".join(f"{safe_text(line)}\n" for line in lines))


def _say_what_is_missing(agreed: int, rules: SigningRules) -> None:
    if rules.required_signers > agreed:
        say(f"agreed; {rules.required_signers - agreed} more must agree\n")
    else:
        say("agreed\n")
