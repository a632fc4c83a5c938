"""A log that was changed shows, and where."""

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry_svc.operations.audit_chain import (
    NO_HASH,
    AuditCheck,
    Damage,
    Fault,
    canonical_entry,
    chained,
    detail_json,
    empty_head,
    entry_hash,
    head_of,
)
from registry_svc.operations.audit_log import entry_draft
from weft.api.operations.v1.operation_service_pb2 import AuditEntry, AuditHead

AT = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def draft(number: int, **changes: Any) -> AuditEntry:
    facts: dict[str, Any] = {
        "at": AT + timedelta(seconds=number),
        "event": f"event-{number}",
        "actor": "alice",
        "operation": f"operations/op-{number}",
        "detail": detail_json({"number": number}),
    }
    return entry_draft(**facts | changes)


def changed(entry: AuditEntry, **fields: Any) -> AuditEntry:
    other = AuditEntry()
    other.CopyFrom(entry)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def log(count: int = 6) -> list[AuditEntry]:
    return chained(empty_head(), [draft(number) for number in range(1, count + 1)])


def verdict(entries: list[AuditEntry], kept: AuditHead | None = None) -> Fault | None:
    check = AuditCheck(kept=kept)
    check.read(entries)
    return check.verdict()


def test_untouched_log_verifies_with_and_without_an_external_head() -> None:
    entries = log()
    assert verdict(entries) is None
    assert all(verdict(entries, head_of(entry)) is None for entry in entries)
    assert verdict([]) is None


def test_canonical_form_matches_the_documentation() -> None:
    odd = changed(draft(1, actor='Zoë "Z"\n/', detail='{"a":1}'), sequence=7, previous_hash=NO_HASH)
    assert (
        canonical_entry(odd)
        == (
            '{"actor":"Zoë \\"Z\\"\\n/","detail":"{\\"a\\":1}","event":"event-1","operation":"operations/op-1",'
            '"sequence":7,"time":"2026-01-01T12:00:01.123456Z"}'
        ).encode()
    )
    assert entry_hash(odd) == hashlib.sha256(b"0" * 64 + canonical_entry(odd)).hexdigest()


def test_documented_example_is_the_canonical_form() -> None:
    lines = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8").splitlines()
    (example,) = (line for line in lines if line.startswith('{"actor"'))
    entry = entry_draft(
        at=datetime(2026, 1, 1, 12, tzinfo=UTC),
        event="operation.succeeded",
        actor="Zoë",
        operation="operations/op-1",
        detail=detail_json({"detail": ""}),
    )
    assert canonical_entry(changed(entry, sequence=3)).decode() == example


def test_control_characters_use_the_documented_escapes() -> None:
    odd = draft(1, actor='\x00\x1f\x7f\n\r\t\b\f\u2028"\\/')
    assert b'"actor":"\\u0000\\u001f\x7f\\n\\r\\t\\b\\f\xe2\x80\xa8\\"\\\\/"' in canonical_entry(odd)


def test_equal_times_have_one_form_in_any_zone() -> None:
    moment = (AT + timedelta(seconds=1)).astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert canonical_entry(draft(1, at=moment)) == canonical_entry(draft(1))


def test_details_have_one_form_for_any_key_order() -> None:
    assert detail_json({"b": 1, "a": [True, None, "ü"]}) == detail_json({"a": [True, None, "ü"], "b": 1})
    assert detail_json({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'


def test_non_json_number_is_refused_in_details() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        detail_json({"a": float("nan")})


def replaced(entries: list[AuditEntry], **fields: Any) -> list[AuditEntry]:
    return [*entries[:2], changed(entries[2], **fields), *entries[3:]]


def forged(entries: list[AuditEntry]) -> list[AuditEntry]:
    return replaced(entries, actor="mallory", hash=entry_hash(changed(entries[2], actor="mallory")))


def at_another_time(entries: list[AuditEntry]) -> list[AuditEntry]:
    entries[2].time.CopyFrom(entries[0].time)
    return entries


def renumbered(entries: list[AuditEntry]) -> list[AuditEntry]:
    return [*entries[:2], *(changed(each, sequence=each.sequence - 1) for each in entries[3:])]


@pytest.mark.parametrize(
    ("tamper", "damage", "sequence"),
    [
        (at_another_time, Damage.CHANGED, 3),
        (lambda log: replaced(log, actor="mallory"), Damage.CHANGED, 3),
        (forged, Damage.REWRITTEN, 3),
        (lambda log: log[1:], Damage.MISSING, 1),
        (lambda log: [*log[:4], log[5]], Damage.MISSING, 5),
        (renumbered, Damage.CHANGED, 3),
        (lambda log: [*log[:2], log[3], log[2], *log[4:]], Damage.MISSING, 3),
        (lambda log: [*log[:3], *log[2:]], Damage.MISSING, 4),
    ],
    ids=["time", "actor", "actor and hash", "first gone", "fifth gone", "renumbered", "reordered", "repeated"],
)
def test_tampered_log_is_detected_and_says_where(
    tamper: Callable[[list[AuditEntry]], list[AuditEntry]], damage: Damage, sequence: int
) -> None:
    assert verdict(tamper(log())) == Fault(damage=damage, sequence=sequence)


def test_truncated_log_is_detected_only_with_the_stored_head() -> None:
    entries = log()
    head = head_of(entries[-1])
    assert verdict(entries[:4]) is None
    assert verdict(entries[:4], head) == Fault(damage=Damage.CUT, sequence=5)
    assert verdict([], head) == Fault(damage=Damage.CUT, sequence=1)


def test_recreated_log_is_detected_only_with_the_stored_head() -> None:
    kept = head_of(log()[4])
    forged = chained(empty_head(), [draft(number, actor="mallory") for number in range(1, 8)])
    assert verdict(forged) is None
    assert verdict(forged, kept) == Fault(damage=Damage.REWRITTEN, sequence=5)


def test_log_read_from_the_middle_must_match_the_preceding_hash() -> None:
    entries = log()
    check = AuditCheck(after=head_of(entries[2]))
    check.read(entries[3:])
    assert check.verdict() is None
    other = AuditCheck(after=AuditHead(sequence=3, hash=NO_HASH))
    other.read(entries[3:])
    assert other.verdict() == Fault(damage=Damage.REWRITTEN, sequence=3)


@given(st.data())
def test_any_single_field_change_is_detected(data: st.DataObject) -> None:
    entries = log()
    index = data.draw(st.integers(0, len(entries) - 1))
    entry = entries[index]
    field = data.draw(st.sampled_from(["sequence", "previous_hash", "hash", "event", "actor", "operation", "detail"]))
    if field == "sequence":
        other = changed(entry, sequence=data.draw(st.integers(0, 99).filter(lambda each: each != entry.sequence)))
    elif field in {"hash", "previous_hash"}:
        other = changed(entry, **{field: data.draw(st.integers(0, 2**256 - 1)).to_bytes(32, "big").hex()})
    else:
        other = changed(entry, **{field: data.draw(st.text(max_size=8))})
    assert verdict([*entries[:index], other, *entries[index + 1 :]], head_of(entries[-1])) is not None or other == entry


def test_paged_verification_equals_full_verification() -> None:
    entries = log(10)
    check = AuditCheck(kept=head_of(entries[-1]))
    for start in range(0, 10, 3):
        check.read(entries[start : start + 3])
    assert check.verdict() is None
    assert json.loads(entries[0].detail) == {"number": 1}
