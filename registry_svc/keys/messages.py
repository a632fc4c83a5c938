"""API keys, from the domain to the wire."""

from collections.abc import Sequence

from registry_svc.keys.domain import ApiKey, KeyChange, KeyChanged, KeyRemoved
from registry_svc.mesh.messages import converted, timestamp
from weft.api.registry.v1 import key_service_pb2 as pb


def key_message(key: ApiKey) -> pb.Key:
    """A key without its secret."""
    return pb.Key(
        id=key.id,
        description=key.description,
        tenant=key.tenant,
        scopes=key.scopes,
        create_time=timestamp(key.created_at),
        expire_time=timestamp(key.expires_at),
        revoke_time=timestamp(key.revoked_at),
        rotate_time=timestamp(key.rotated_at),
    )


def verifier_message(key: ApiKey) -> pb.KeyVerifier:
    """What is needed to check a key; its description is not."""
    return pb.KeyVerifier(
        key=pb.Key(id=key.id, tenant=key.tenant, scopes=key.scopes, expire_time=timestamp(key.expires_at)),
        digest=key.digest,
        previous_digest=key.previous_digest,
        previous_expire_time=timestamp(key.previous_expires_at),
    )


async def snapshot_message(pepper: bytes, keys: Sequence[ApiKey]) -> pb.WatchKeysResponse:
    """The first response of a watch. A large one takes long; the event loop turns meanwhile."""
    return pb.WatchKeysResponse(snapshot=pb.KeySnapshot(pepper=pepper, keys=await converted(keys, verifier_message)))


def change_message(change: KeyChange) -> pb.WatchKeysResponse:
    """Every later response of a watch."""
    match change:
        case KeyChanged(key):
            return pb.WatchKeysResponse(changed=verifier_message(key))
        case KeyRemoved(key_id):
            return pb.WatchKeysResponse(removed=key_id)
