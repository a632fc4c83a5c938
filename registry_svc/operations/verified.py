"""What checking an authorization gives: facts, and how it is refused."""

from dataclasses import dataclass
from typing import Protocol

from registry_svc.operations.policy.governance import Validity
from weft.api.operations.v1 import operation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """An authorization that is real and is for the action; whether it is good now and enough is judged after it."""

    signers: tuple[str, ...]
    """Who is named as agreeing, each once; of those that count, only whom the proof is for."""
    nonce: str
    validity: Validity


class Verifier(Protocol):
    """Checks one kind of authorization."""

    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        """The facts. Raises Refused, and MalformedToken for what is not in form."""
        ...
