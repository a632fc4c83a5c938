"""What a registry asks of those who sign: asked of the registry, or said on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weft.client._channel import mesh_address
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.signing.claims import MAX_TEXT_CHARS, Terms

CALL_TIMEOUT_SECONDS = 5.0
MAX_LIFETIME_SECONDS = 300

AudienceOption = Annotated[
    str, typer.Option("--audience", metavar="ID", help="Without a mesh: the id of the registry that it is for.")
]
PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="VERSION", help="Without a mesh: the version of the registry's policy.")
]
LifetimeOption = Annotated[
    int,
    typer.Option(
        "--lifetime", min=1, max=MAX_LIFETIME_SECONDS, help="Without a mesh: how many seconds the token is good."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningRules:
    """What is known of a registry's rules."""

    terms: Terms
    signers: tuple[str, ...] = ()
    """Those whose agreement counts; empty: nobody was asked."""
    required_signers: int = 0
    """How many must agree; 0: nobody was asked."""

    def require_signer(self, key_id: str) -> None:
        """Raises INVALID_ARGUMENT when it is known that this agreement counts for nothing."""
        if self.signers and key_id not in self.signers:
            raise invalid_field("--as", f"{key_id} is no signer of this registry; they are {', '.join(self.signers)}")


def signing_rules(home: Path, audience: str, policy: str, lifetime_seconds: int = MAX_LIFETIME_SECONDS) -> SigningRules:
    """The rules of the mesh on `home`, or those that the options say.

    Raises INVALID_ARGUMENT where only one of them is given, and UNSUPPORTED_OPERATION when the registry takes no
    signatures.
    """
    for option, text in (("--audience", audience), ("--policy", policy)):
        if bool(audience or policy) and not 0 < len(text) <= MAX_TEXT_CHARS:
            raise invalid_field(option, f"must be given with the other, 1 to {MAX_TEXT_CHARS} characters")
    if audience:
        terms = Terms(audience=audience, lifetime_seconds=lifetime_seconds, policy_version=policy)
        return SigningRules(terms=terms)
    return _asked(mesh_address(home, "registry"))


def _asked(target: str) -> SigningRules:
    import grpc  # noqa: PLC0415 - every command starts fast

    from weft.api.operations.v1 import operation_service_pb2 as pb  # noqa: PLC0415
    from weft.api.operations.v1.operation_service_pb2_grpc import OperationServiceStub  # noqa: PLC0415
    from weft.client._channel import open_mesh_channel  # noqa: PLC0415
    from weft.kernel.rpc import error_from_call  # noqa: PLC0415

    with open_mesh_channel(target) as channel:
        try:
            found = OperationServiceStub(channel).GetGovernance(pb.GetGovernanceRequest(), timeout=CALL_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
    if found.mode == pb.GetGovernanceResponse.MODE_SHARED_KEY:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "the registry asks for a shared key; sign with --shared-key")
    if found.mode != pb.GetGovernanceResponse.MODE_SIGNATURES:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "the registry asks for no signatures; there is nothing to sign")
    terms = Terms(
        audience=found.audience,
        # Whole seconds, rounded down: longer than what the registry takes would be refused.
        lifetime_seconds=found.token_lifetime.seconds,
        policy_version=found.policy_version,
    )
    return SigningRules(terms=terms, signers=tuple(found.signers), required_signers=found.required_signers)
