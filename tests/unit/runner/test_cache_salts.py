"""Salts: stable per tenant, different between tenants, changed by a flush, and as fields of a request."""

import stat
from pathlib import Path
from typing import Any

import pytest
from kit.engine_settings import engine_settings

from runner_svc.backend.port import CacheIsolation, CacheUse
from runner_svc.cache import model_cache
from runner_svc.cache.model_cache import SaltStore
from runner_svc.openai_upstream.openai_request import add_cache_use
from runner_svc.policy.cache_directory import Partition
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel

A, B, A_TAGGED, AMBIGUOUS = Partition("a"), Partition("b"), Partition("a", "tag"), Partition("atag")


def test_each_tenant_and_tag_has_its_own_stable_salt() -> None:
    book = SaltStore(None)
    found = [book.salt_of(partition) for partition in (A, B, A_TAGGED, AMBIGUOUS)]
    assert len(set(found)) == len(found)
    assert found == [book.salt_of(partition) for partition in (A, B, A_TAGGED, AMBIGUOUS)]
    assert all(salt != "a" and len(salt) == 64 for salt in found)


def test_private_request_has_a_new_salt_each_time() -> None:
    book = SaltStore(None)
    assert book.salt_of(None) != book.salt_of(None)


def test_two_runners_have_different_salts_for_one_tenant() -> None:
    assert SaltStore(None).salt_of(A) != SaltStore(None).salt_of(A)


def test_salt_key_survives_restarts_and_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "state" / "salts.json"
    first = SaltStore(file).salt_of(A)
    assert SaltStore(file).salt_of(A) == first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("scope", "changed"),
    [
        ({"tenant": "a"}, {A, A_TAGGED}),
        ({"tenant": "a", "tag": "tag"}, {A_TAGGED}),
        ({"tag": "tag"}, {A_TAGGED}),
        ({}, {A, B, A_TAGGED, AMBIGUOUS}),
    ],
)
def test_flush_changes_the_matching_salts_and_survives_restarts(
    tmp_path: Path, scope: dict[str, str], changed: set[Partition]
) -> None:
    file = tmp_path / "salts.json"
    book = SaltStore(file)
    everybody = (A, B, A_TAGGED, AMBIGUOUS)
    before = {partition: book.salt_of(partition) for partition in everybody}
    book.forget(**scope)
    after = {partition: SaltStore(file).salt_of(partition) for partition in everybody}
    assert {partition for partition in everybody if before[partition] != after[partition]} == changed


@pytest.mark.parametrize(
    "content", [b"", b"no json", b'{"key": "\xff"}', b'{"key": 5}', b'{"key": "YQ==", "forgotten": []}']
)
def test_corrupt_file_gives_new_salts_without_an_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "salts.json"
    file.write_bytes(content)
    assert len(SaltStore(file).salt_of(A)) == 64


def test_salts_that_cannot_be_stored_last_as_long_as_the_runner(tmp_path: Path) -> None:
    """On a full disk the runner did not start. A flush, which the next start would forget, still fails."""
    file = tmp_path / "state"
    file.touch()
    book = SaltStore(file / "salts.json")
    assert book.salt_of(A) == book.salt_of(A)
    with pytest.raises(OSError, match=r"directory|exists"):
        book.forget("a")


def test_flush_beyond_its_bound_changes_every_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "MAX_FORGOTTEN", 2)
    book = SaltStore(None)
    before = book.salt_of(B)
    for tenant in ("x", "y"):
        book.forget(tenant)
    assert book.salt_of(B) == before
    book.forget("z")
    assert book.salt_of(B) != before


@pytest.mark.parametrize(
    ("use", "has_slots", "added"),
    [
        (CacheUse(), True, {}),
        (CacheUse(slot=0), True, {"id_slot": 0}),
        (CacheUse(slot=3, fresh=True), True, {"id_slot": 3, "cache_prompt": False}),
        (CacheUse(slot=3, fresh=True), False, {}),
        (CacheUse(salt="abc"), False, {"cache_salt": "abc"}),
    ],
)
def test_each_server_gets_its_own_request_fields(use: CacheUse, has_slots: bool, added: dict[str, Any]) -> None:
    body: dict[str, Any] = {}
    add_cache_use(body, use, has_slots=has_slots)
    assert body == added


@pytest.mark.parametrize(("knows_salt", "isolation"), [(True, CacheIsolation.SALT), (False, CacheIsolation.NONE)])
def test_attached_server_isolates_only_if_it_supports_salts(knows_salt: bool, isolation: CacheIsolation) -> None:
    config = engine_settings(OpenAiHttpModel, url="http://127.0.0.1:1", upstream_model="m", cache_salt=knows_salt)
    assert AttachedServer(*config).cache_isolation is isolation
