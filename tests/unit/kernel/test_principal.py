"""Who calls: keys, scopes, and that a wrong id is checked as a wrong secret is."""

import hmac
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kit.calls import calls_of

from weft.kernel.access.principal import (
    DEFAULT_SCOPES,
    LOCAL,
    MAX_SCOPES,
    USE_MODELS,
    Access,
    KeyRing,
    KeyVerifier,
    Resource,
    Role,
    authenticate,
    kept_access,
    key_digest,
    key_text,
    parse_scope,
    parse_scopes,
    service_principal,
)
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SOON, EARLIER = NOW + timedelta(seconds=1), NOW - timedelta(seconds=1)
PEPPER = b"p" * 32
NEW, OLD, OTHER = "a1" * 32, "b2" * 32, "c3" * 32
KEY_ID = "k3y000000001"
KEY = KeyVerifier(
    key_id=KEY_ID, tenant="team-a", access=parse_scopes(DEFAULT_SCOPES, "scopes"), digest=key_digest(PEPPER, NEW)
)
OLD_DIGEST = key_digest(PEPPER, OLD)


def ring(*keys: KeyVerifier) -> KeyRing:
    return KeyRing(pepper=PEPPER, keys={key.key_id: key for key in keys})


def refusal(keys: KeyRing, presented: str | None) -> WeftError:
    with pytest.raises(WeftError) as refused:
        authenticate(keys, presented, NOW)
    assert refused.value.reason is Reason.UNAUTHENTICATED
    return refused.value


def test_valid_key_is_a_principal_with_name_tenant_and_access() -> None:
    found = authenticate(ring(KEY), key_text(KEY_ID, NEW), NOW)
    assert (found.name, found.tenant, found.names_tenants) == (f"key:{KEY_ID}", "team-a", False)
    assert found.access == KEY.access


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        pytest.param(replace(KEY, expires_at=SOON), NEW, id="it expires later"),
        pytest.param(replace(KEY, previous_digest=OLD_DIGEST, previous_expires_at=SOON), NEW, id="new after rotation"),
        pytest.param(replace(KEY, previous_digest=OLD_DIGEST, previous_expires_at=SOON), OLD, id="old within grace"),
        pytest.param(replace(KEY, previous_digest=OLD_DIGEST, previous_expires_at=NOW), NEW, id="new after grace"),
    ],
)
def test_valid_keys_are_accepted(key: KeyVerifier, secret: str) -> None:
    assert authenticate(ring(key), key_text(KEY_ID, secret), NOW).name == f"key:{KEY_ID}"


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        pytest.param(KEY, OTHER, id="another secret"),
        pytest.param(KEY, OLD, id="no earlier secret"),
        pytest.param(replace(KEY, expires_at=NOW), NEW, id="expired now"),
        pytest.param(replace(KEY, expires_at=EARLIER), NEW, id="expired earlier"),
        pytest.param(replace(KEY, previous_digest=OLD_DIGEST, previous_expires_at=NOW), OLD, id="old after grace"),
        pytest.param(replace(KEY, previous_digest=OLD_DIGEST), OLD, id="old without grace"),
        pytest.param(
            replace(KEY, expires_at=NOW, previous_digest=OLD_DIGEST, previous_expires_at=SOON), OLD, id="old, expired"
        ),
        pytest.param(replace(KEY, digest=b""), NEW, id="no digest"),
        pytest.param(replace(KEY, digest=b"", previous_expires_at=SOON), "", id="no digest, no secret"),
        pytest.param(replace(KEY, key_id="another00000"), NEW, id="revoked: no such key"),
    ],
)
def test_expired_keys_and_wrong_secrets_are_refused(key: KeyVerifier, secret: str) -> None:
    assert refusal(ring(key), key_text(KEY_ID, secret)).message == "the key is not valid"


GOOD = key_text(KEY_ID, NEW)


@pytest.mark.parametrize(
    "presented",
    [
        pytest.param("nonsense", id="no key at all"),
        pytest.param("sk-" + NEW, id="another maker's key"),
        pytest.param(GOOD.replace("weft_", "wjt_"), id="a join token's prefix"),
        pytest.param(GOOD.upper(), id="upper case"),
        pytest.param(GOOD.replace("weft", "Weft"), id="upper case prefix"),
        pytest.param(key_text(KEY_ID, NEW.upper()), id="upper case secret"),
        pytest.param(GOOD[:-1], id="a character too few"),
        pytest.param(GOOD + "0", id="a character too many"),
        pytest.param(GOOD + "\n", id="a line break"),
        pytest.param(" " + GOOD, id="a space"),
        pytest.param(f'"{GOOD}"', id="quotes"),
        pytest.param(f"'{GOOD}'", id="single quotes"),
        pytest.param(f"{GOOD}' OR '1'='1", id="sql"),
        pytest.param(f"weft_{KEY_ID}_' OR 1=1; DROP TABLE api_keys; --", id="sql as a secret"),
        pytest.param(f"weft_{KEY_ID}_", id="no secret"),
        pytest.param(f"weft__{NEW}", id="no id"),
        pytest.param(NEW, id="a secret alone"),
        pytest.param("w" * 65_536, id="64 KB"),
        pytest.param(GOOD + "0" * 65_536, id="64 KB after a good key"),
        pytest.param(GOOD.replace("1", "\N{ARABIC-INDIC DIGIT ONE}"), id="digits of another script"),
        pytest.param("weft_" + KEY_ID + "\0_" + NEW, id="a NUL"),
        pytest.param("\udcff" + GOOD, id="bytes that are no text"),
    ],
)
def test_malformed_key_is_refused_without_a_reason_or_echo(presented: str) -> None:
    assert authenticate(ring(KEY), GOOD, NOW), "the key they are made from is good"
    assert refusal(ring(KEY), presented).message == "the key is not valid"


@pytest.mark.parametrize("presented", [None, ""])
def test_missing_key_error_explains_how_to_send_one(presented: str | None) -> None:
    message = refusal(ring(KEY), presented).message
    assert "Authorization: Bearer" in message
    assert "x-api-key" in message


def test_empty_ring_accepts_no_key() -> None:
    refusal(KeyRing(), GOOD)
    # HMAC with an empty key is known to everybody; it opens nothing without a verifier.
    refusal(KeyRing(keys={}), key_text(KEY_ID, "0" * 64))


def test_pepper_of_another_registry_invalidates_every_secret() -> None:
    refusal(KeyRing(pepper=b"q" * 32, keys={KEY_ID: KEY}), GOOD)


class Recorder:
    """The calls of the functions that take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        for name in ("digest", "compare_digest"):
            monkeypatch.setattr(hmac, name, self._recorded(name, getattr(hmac, name)))

    def _recorded(self, name: str, real: Any) -> Any:
        def call(first: bytes, second: bytes, *rest: Any) -> Any:
            self.calls.append((name, len(second)))
            return real(first, second, *rest)

        return call

    def of(self, keys: KeyRing, presented: str) -> list[tuple[str, int]]:
        self.calls.clear()
        refusal(keys, presented)
        return list(self.calls)


def test_wrong_id_costs_the_same_work_as_a_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Recorder(monkeypatch)
    wrong_secret = work.of(ring(KEY), key_text(KEY_ID, OTHER))
    assert ("digest", 64) in wrong_secret, "the secret is hashed"
    assert work.of(ring(KEY), key_text("nobody000000", OTHER)) == wrong_secret
    rotated = replace(KEY, previous_digest=OLD_DIGEST, previous_expires_at=SOON)
    assert work.of(ring(rotated), key_text(KEY_ID, OTHER)) == wrong_secret
    assert work.of(ring(replace(KEY, expires_at=EARLIER)), GOOD) == wrong_secret


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("models:view", {"models:view"}),
        ("inference:create", {"inference:create", "inference:view"}),
        ("inference:edit", {"inference:edit", "inference:view"}),
        ("keys:*", {"keys:view", "keys:create", "keys:edit"}),
        ("mesh:create", {"mesh:create", "mesh:view"}),
        ("*:view", {f"{resource.value}:view" for resource in Resource if resource is not Resource.MESH}),
        (
            "*:*",
            {
                f"{resource.value}:{role.value}"
                for resource in Resource
                for role in Role
                if resource is not Resource.MESH
            },
        ),
    ],
)
def test_scope_expands_to_its_permissions(scope: str, allowed: set[str]) -> None:
    assert {str(access) for access in parse_scope(scope, "scopes")} == allowed


@pytest.mark.parametrize(
    "scope",
    [
        *("", ":", "*", "models", "models:", ":view", "models:VIEW", "Models:view", "models:view:edit", "model:view"),
        *(" models:view", "models:view\n", "*:delete", "'; DROP TABLE api_keys; --", "x" * 65_536),
    ],
)
def test_invalid_scope_is_refused_with_its_field_and_the_valid_ones(scope: str) -> None:
    with pytest.raises(FieldError) as refused:
        parse_scopes(["models:view", scope], "scopes")
    assert refused.value.field == "scopes[1]"
    assert "inference" in refused.value.message
    assert len(refused.value.message) < 512


def test_number_of_scopes_is_bounded() -> None:
    assert parse_scopes(["models:view"] * MAX_SCOPES, "scopes")
    with pytest.raises(FieldError) as refused:
        parse_scopes(["models:view"] * (MAX_SCOPES + 1), "scopes")
    assert refused.value.field == "scopes"


def test_unknown_stored_scope_allows_nothing_and_does_not_affect_others() -> None:
    assert kept_access(["future:view", "models:view", "*:destroy"]) == parse_scopes(["models:view"], "scopes")
    assert kept_access(["future:*"]) == kept_access([]) == frozenset()


def test_key_without_scopes_may_only_use_and_list_models() -> None:
    access = {str(each) for each in parse_scopes(DEFAULT_SCOPES, "scopes")}
    assert access == {"inference:create", "inference:edit", "inference:view", "models:view"}


def test_missing_scope_error_names_it() -> None:
    found = authenticate(ring(KEY), GOOD, NOW)
    found.require(Access(Resource.MODELS, Role.VIEW))
    with pytest.raises(WeftError) as refused:
        found.require(Access(Resource.KEYS, Role.CREATE))
    assert refused.value.reason is Reason.PERMISSION_DENIED
    assert "keys:create" in refused.value.message
    assert not found.may(Access(Resource.KEYS, Role.CREATE))


def test_local_callers_and_mesh_services_have_every_permission() -> None:
    for known in (LOCAL, service_principal("router-1")):
        assert all(known.may(Access(resource, role)) for resource in Resource for role in Role)
        assert known.names_tenants
    assert service_principal("router-1").name == "service:router-1"


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("models/team-a:view", {"models/team-a:view"}),
        ("models/team-*:edit", {"models/team-*:view", "models/team-*:edit"}),
        ("inference/qwen3:8b:create", {"inference/qwen3:8b:view", "inference/qwen3:8b:create"}),
        ("operations/q*:*", {"operations/q*:view", "operations/q*:create", "operations/q*:edit"}),
    ],
)
def test_scope_may_be_limited_to_a_name_or_prefix(scope: str, allowed: set[str]) -> None:
    assert {str(access) for access in parse_scope(scope, "scopes")} == allowed


@pytest.mark.parametrize(
    ("scope", "word"),
    [
        ("models/:view", "team-*"),
        ("models/*:view", "team-*"),
        ("models/a*b:view", "team-*"),
        ("models/a**:view", "team-*"),
        ("models/[a-z]:view", "team-*"),
        ("models/.*:view", "team-*"),
        ("models/a//b:view", "team-*"),
        (f"models/{'x' * 129}:view", "team-*"),
        ("keys/abc:view", "leave '/abc' out"),
        ("secrets/abc:create", "inference, models, operations"),
        ("mesh/abc:create", "leave"),
        ("*/abc:view", "leave"),
    ],
)
def test_invalid_name_limit_or_one_for_an_unnamed_resource_is_refused(scope: str, word: str) -> None:
    with pytest.raises(FieldError) as refused:
        parse_scope(scope, "scopes")
    assert word in refused.value.message
    assert kept_access([scope]) == frozenset(), "a stored one allows nothing"


def test_named_permissions_apply_only_to_their_names() -> None:
    limited = authenticate(
        ring(replace(KEY, access=parse_scopes(["models/team-*:edit", "models/b:view"], "s"))), GOOD, NOW
    )
    edit, view = Access(Resource.MODELS, Role.EDIT), Access(Resource.MODELS, Role.VIEW)
    assert [name for name in ("team-", "team-a", "teams", "team", "b", "") if limited.may_name(edit, name)] == [
        "team-",
        "team-a",
    ]
    assert limited.may_name(view, "b")
    assert not limited.may(edit)
    assert limited.may(edit._replace(name="team-a-*")), "what a key may pass on to another"
    assert not limited.may(edit._replace(name="te*"))
    assert limited.names_for(view) == ("b", "team-*")
    assert limited.names_for(Access(Resource.KEYS, Role.VIEW)) == ()
    assert LOCAL.names_for(view) is None
    limited.require_some(edit)
    limited.require_name(edit, "team-b")
    refusals: tuple[Callable[[], None], ...] = (
        lambda: limited.require(edit),
        lambda: limited.require_name(edit, "b"),
        lambda: limited.require_some(Access(Resource.INFERENCE, Role.CREATE)),
        lambda: limited.require_name(Access(Resource.OPERATIONS, Role.EDIT), "team-a"),
    )
    for refused in refusals:
        with pytest.raises(WeftError) as found:
            refused()
        assert found.value.reason is Reason.PERMISSION_DENIED
    with pytest.raises(WeftError, match="lacks the scope models/b:edit"):
        limited.require_name(edit, "b")


def test_unlimited_scope_includes_every_name() -> None:
    whole = authenticate(ring(replace(KEY, access=parse_scopes(["models:edit", "models/x:view"], "s"))), GOOD, NOW)
    edit = Access(Resource.MODELS, Role.EDIT)
    assert whole.may_name(edit, "anything")
    assert whole.names_for(edit) is None
    assert whole.may(edit._replace(name="team-*"))


def test_looking_up_an_access_calls_nothing_of_python() -> None:
    assert calls_of(lambda: LOCAL.may(USE_MODELS)) == ["may"]
