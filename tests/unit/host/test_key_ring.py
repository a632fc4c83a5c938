"""What becomes of a ring with each step of the watch."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.common.v1.priority_pb2 import PRIORITY_CEILING_LOW
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.access.principal import KeyRing, KeyVerifier, parse_scopes
from weft.kernel.requests.request_values import Priority
from weft_app.compose.key_ring import apply_watch

NOW, LATER = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)
VIEW = parse_scopes(["models:view"], "scopes")


def stamp(moment: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(moment)
    return message


def told(key_id: str, *, digest: bytes = b"d" * 32) -> pb.KeyVerifier:
    return pb.KeyVerifier(key=pb.Key(id=key_id, tenant="team-a", scopes=["models:view"]), digest=digest)


def known(key_id: str, digest: bytes = b"d" * 32) -> KeyVerifier:
    return KeyVerifier(key_id=key_id, tenant="team-a", access=VIEW, digest=digest)


def ring_of(*keys: KeyVerifier) -> KeyRing:
    return KeyRing(pepper=b"p", keys={key.key_id: key for key in keys})


def snapshot(*keys: pb.KeyVerifier) -> pb.WatchKeysResponse:
    return pb.WatchKeysResponse(snapshot=pb.KeySnapshot(pepper=b"p", keys=keys))


def test_snapshot_replaces_every_key() -> None:
    before = KeyRing(pepper=b"earlier", keys={"gone": known("gone")})
    assert apply_watch(before, snapshot(told("a"), told("b"))) == ring_of(known("a"), known("b"))
    assert apply_watch(before, snapshot()) == ring_of()


def test_key_keeps_the_highest_priority_of_its_requests() -> None:
    limited = told("a")
    limited.key.max_priority = PRIORITY_CEILING_LOW
    found = apply_watch(ring_of(), snapshot(limited, told("b")))
    assert [found.keys[name].principal.max_priority for name in "ab"] == [Priority.LOW, Priority.HIGH]


def test_change_adds_or_replaces_one_key_without_mutating_the_previous_ring() -> None:
    before = ring_of(known("a"))
    after = apply_watch(before, pb.WatchKeysResponse(changed=told("b")))
    assert after == ring_of(known("a"), known("b"))
    replaced = apply_watch(after, pb.WatchKeysResponse(changed=told("a", digest=b"new")))
    assert replaced == ring_of(known("a", b"new"), known("b"))
    assert before == ring_of(known("a")), "whoever checks a key by it is not disturbed"


def test_removal_drops_one_key_and_ignores_an_unknown_one() -> None:
    before = ring_of(known("a"), known("b"))
    assert apply_watch(before, pb.WatchKeysResponse(removed="a")) == ring_of(known("b"))
    assert apply_watch(before, pb.WatchKeysResponse(removed="c")) == before


def test_unknown_change_kind_is_ignored() -> None:
    assert apply_watch(ring_of(known("a")), pb.WatchKeysResponse()) == ring_of(known("a"))


def test_times_and_the_previous_secret_are_copied() -> None:
    changed = told("a")
    changed.key.expire_time.CopyFrom(stamp(LATER))
    changed.previous_digest = b"old"
    changed.previous_expire_time.CopyFrom(stamp(NOW))
    (verifier,) = apply_watch(ring_of(), pb.WatchKeysResponse(changed=changed)).keys.values()
    assert (verifier.expires_at, verifier.previous_digest, verifier.previous_expires_at) == (LATER, b"old", NOW)
    (plain,) = apply_watch(ring_of(), pb.WatchKeysResponse(changed=told("a"))).keys.values()
    assert (plain.expires_at, plain.previous_digest, plain.previous_expires_at) == (None, b"", None)
