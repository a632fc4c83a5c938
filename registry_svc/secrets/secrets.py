"""Secrets: create, list, update, delete, and their values for internal use.

Values are decrypted when they are used. Logs, errors and messages to callers never contain them.
"""

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.provider_models import ChangeEvent, require_private, users_of
from registry_svc.secrets.cipher import SETTING, SecretCipher, UnreadableSecretError, make_keys, read_keys
from weft.api.registry.v1 import secret_service_pb2 as pb
from weft.api.registry.v1 import secret_service_pb2_grpc
from weft.documents.kinds.tenant import webhook_secret
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import Principal
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.unknown_names import SECRET, unknown_name
from weft.sql.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSecret:
    """An encrypted secret, with the columns of `secrets`."""

    name: str
    version: int
    """Number of its value, from 1."""
    key_id: str
    """The key that it is encrypted with."""
    sealed: bytes = field(repr=False)
    created_at: datetime
    updated_at: datetime
    """When it got its current value."""


class SqlSecretStore:
    """Stores encrypted secrets. Writes are durable when the call returns.

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    async def load(self) -> tuple[StoredSecret, ...]:
        """Returns all secrets, sorted by name."""
        rows = await self._database.read(lambda tx: tx.rows("SELECT * FROM secrets"))
        # Not with ORDER BY: PostgreSQL sorts by the locale of the database.
        return tuple(sorted((StoredSecret(**row._asdict()) for row in rows), key=lambda secret: secret.name))

    async def save(self, changed: Sequence[StoredSecret]) -> None:
        """Stores or replaces secrets, all or none."""
        if not changed:
            return
        rows = [asdict(secret) for secret in changed]
        await self._database.run(lambda tx: tx.replace("secrets", "name", *rows))

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes secrets. Ignores unknown names."""
        await self._database.run(lambda tx: tx.delete("secrets", "name", names))


log = get_logger("weft.registry.secrets")

MAX_VALUE_CHARS = 8_192
MAX_LISTED_NAMES = 10
MAX_SECRETS = 1_000
SIGNING_PREFIX = "whsec_"
MIN_SIGNING_BYTES, MAX_SIGNING_BYTES = 24, 64
"""As in the specification of Standard Webhooks."""


def require_value(value: str) -> str:
    """Returns a valid value of a secret. Raises INVALID_ARGUMENT, without quoting it."""
    is_text = value.isascii() and value.isprintable() and value == value.strip()
    if not is_text or not 1 <= len(value) <= MAX_VALUE_CHARS:
        raise invalid_field(
            "value", f"must be 1 to {MAX_VALUE_CHARS:,} printable ASCII characters, without a space at either end"
        )
    return value


def is_signing_secret(value: str) -> bool:
    """Whether a value can sign events for webhooks."""
    try:
        key = b64decode(value.removeprefix(SIGNING_PREFIX), validate=True)
    except ValueError:
        return False
    return value.startswith(SIGNING_PREFIX) and MIN_SIGNING_BYTES <= len(key) <= MAX_SIGNING_BYTES


class Secrets:
    """The secrets of one registry. The core serializes their writes with all others."""

    def __init__(self, core: RegistryCore, store: SqlSecretStore, change_event: ChangeEvent) -> None:
        """`change_event` is rung at every change."""
        self._core = core
        self._store = store
        self._config = core.config.secrets
        self._secrets: dict[str, StoredSecret] = {}
        self._cipher = SecretCipher(())
        self._change_event = change_event

    async def start(self) -> None:
        """Loads the secrets, once the core has started. Encrypts those with an earlier key again.

        Raises INVALID_ARGUMENT if the keys in the file cannot decrypt a secret.
        """
        stored = await self._store.load()
        path = self._config.key_file
        self._cipher = SecretCipher(() if path is None else read_keys(path))
        try:
            values = {secret.name: self._value_of(secret) for secret in stored}
        except UnreadableSecretError:
            if not self._config.delete_all_if_key_lost:
                raise self._lost_keys(len(stored)) from None
            await self._store.delete([secret.name for secret in stored])
            log.warning("all secrets deleted: their keys are lost", count=len(stored))
            return
        self._secrets = {secret.name: secret for secret in stored}
        earlier = [secret for secret in stored if secret.key_id != self._cipher.key_id]
        await self._keep([self._sealed(secret, values[secret.name]) for secret in earlier])
        if stored:
            log.info("secrets ready", count=len(stored), encrypted_again=len(earlier))

    async def require_keys_of(self, store: SqlSecretStore) -> None:
        """Raises INVALID_ARGUMENT if the keys in the file cannot decrypt a secret of a store."""
        stored, path = await store.load(), self._config.key_file
        cipher = SecretCipher(() if path is None else read_keys(path))
        try:
            for secret in stored:
                cipher.open(secret.name, secret.version, secret.key_id, secret.sealed)
        except UnreadableSecretError:
            raise self._lost_keys(len(stored)) from None

    def all(self) -> list[pb.Secret]:
        """Returns all secrets, sorted by name, without their values."""
        self._core.require_open()
        return [self._shown(self._secrets[name]) for name in sorted(self._secrets)]

    def has(self, name: str) -> bool:
        """Whether a secret exists."""
        return name in self._secrets

    @property
    def is_empty(self) -> bool:
        """Whether there are no secrets."""
        return not self._secrets

    def cipher(self) -> SecretCipher:
        """Returns what encrypts; creates the key file for the first value. Raises UNSUPPORTED_OPERATION without one."""
        if not self._cipher.key_id:
            path = self._config.key_file
            if path is None:
                raise WeftError(
                    Reason.UNSUPPORTED_OPERATION,
                    "this registry has no key file, so it can store neither secrets nor captures",
                )
            self._cipher = SecretCipher(make_keys(path))
        return self._cipher

    def has_key(self, key_id: str) -> bool:
        """Whether a key in the file decrypts what was encrypted with this one."""
        return self._cipher.has_key(key_id)

    def value(self, name: str) -> str:
        """Returns the value of a secret; empty if it does not exist."""
        found = self._secrets.get(name)
        return "" if found is None else self._value_of(found)

    def webhook(self, tenant: str) -> pb.GetWebhookResponse:
        """Returns the webhook of a tenant. Raises NOT_FOUND without its secret, INVALID_ARGUMENT for another secret."""
        self._core.require_open()
        record = self._core.mesh.documents[ResourceKind.TENANT].declared(tenant)
        name = "" if record is None else webhook_secret(record.manifest)
        if record is None or not name:
            return pb.GetWebhookResponse()
        value = self._value_of(self._require(name))
        # Other secrets, such as keys of providers, never sign anything.
        if not is_signing_secret(value):
            low, high = MIN_SIGNING_BYTES, MAX_SIGNING_BYTES
            words = f"the value of the secret {name!r} must be {SIGNING_PREFIX} and base64 of {low} to {high} bytes"
            raise invalid_field("webhook.secret_ref", words)
        return pb.GetWebhookResponse(url=record.manifest.webhook.url, secret=value)

    async def create(self, request: pb.CreateSecretRequest, by: Principal) -> pb.Secret:
        """Stores a new secret. Raises ALREADY_EXISTS, TOO_MANY_RESOURCES, INVALID_ARGUMENT."""
        value = require_value(request.value)
        return await self._core.write(lambda: self._create(request.name, value, by))

    async def update(self, request: pb.UpdateSecretRequest, by: Principal) -> pb.Secret:
        """Gives a secret a new value. Raises NOT_FOUND, INVALID_ARGUMENT."""
        value = require_value(request.value)
        return await self._core.write(lambda: self._update(request.name, value, by))

    async def delete(self, request: pb.DeleteSecretRequest, by: Principal) -> None:
        """Deletes a secret. Raises NOT_FOUND, and RESOURCE_IN_USE while it is used, unless forced."""
        await self._core.write(lambda: self._delete(request, by))

    async def _create(self, name: str, value: str, by: Principal) -> pb.Secret:
        if name in self._secrets:
            raise WeftError(
                Reason.ALREADY_EXISTS,
                f"there is a secret {name!r} already; `weft keys secret rotate {name}` gives it a new value",
                metadata={"secret": name},
            )
        require_room("secrets", len(self._secrets), 1, MAX_SECRETS)
        now, cipher = self._core.clock.utc_now(), self.cipher()
        key_id, sealed = cipher.key_id, cipher.seal(name, 1, value)
        secret = StoredSecret(name=name, version=1, key_id=key_id, sealed=sealed, created_at=now, updated_at=now)
        await self._keep([secret])
        log.info("secret created", name=name, by=by.name)
        return self._shown(secret)

    async def _update(self, name: str, value: str, by: Principal) -> pb.Secret:
        earlier = self._require(name)
        version = earlier.version + 1
        secret = self._sealed(replace(earlier, version=version, updated_at=self._core.clock.utc_now()), value)
        await self._keep([secret])
        log.info("secret updated", name=name, version=version, by=by.name)
        return self._shown(secret)

    async def _delete(self, request: pb.DeleteSecretRequest, by: Principal) -> None:
        name = self._require(request.name).name
        users = users_of(name, self._core)
        if users and not request.force:
            listed = ", ".join(users[:MAX_LISTED_NAMES])
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"the secret {name!r} is in use by: {listed}; delete them or point them elsewhere, or delete it "
                "with force (`--force`, or `?force=true` over HTTP)",
                metadata={"secret": name, "models": ",".join(users[:MAX_LISTED_NAMES])},
            )
        await self._store.delete([name])
        del self._secrets[name]
        self._change_event.set()
        log.info("secret deleted", name=name, by=by.name, used_by=len(users))

    async def _keep(self, changed: Sequence[StoredSecret]) -> None:
        await self._store.save(changed)
        self._secrets |= {secret.name: secret for secret in changed}
        self._change_event.set()

    def _sealed(self, secret: StoredSecret, value: str) -> StoredSecret:
        sealed = self._cipher.seal(secret.name, secret.version, value)
        return replace(secret, key_id=self._cipher.key_id, sealed=sealed)

    def _value_of(self, secret: StoredSecret) -> str:
        return self._cipher.open(secret.name, secret.version, secret.key_id, secret.sealed)

    def _shown(self, secret: StoredSecret) -> pb.Secret:
        return pb.Secret(
            name=secret.name,
            version=secret.version,
            create_time=stamp_of(secret.created_at),
            update_time=stamp_of(secret.updated_at),
            used_by=users_of(secret.name, self._core),
        )

    def _require(self, name: str) -> StoredSecret:
        found = self._secrets.get(name)
        if found is None:
            raise unknown_name(SECRET, name)
        return found

    def _lost_keys(self, count: int) -> WeftError:
        return invalid_field(
            SETTING,
            f"{self._config.key_file or 'it'} is not there, or does not hold the key that the {count} secrets in the "
            "database were encrypted with. Restore the file from a backup; if it is lost, set "
            "registry.secrets.delete_all_if_key_lost for one start, and create the secrets again",
        )


Context = grpc.aio.ServicerContext[Any, Any]


class SecretServicer(AnsweringServicer, secret_service_pb2_grpc.SecretServiceServicer):
    """See SecretService in the contract."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    @override
    async def CreateSecret(self, request: pb.CreateSecretRequest, context: Context) -> pb.CreateSecretResponse:
        check_message(request)
        return pb.CreateSecretResponse(secret=await self._secrets.create(request, caller()))

    @override
    async def ListSecrets(self, request: pb.ListSecretsRequest, context: Context) -> pb.ListSecretsResponse:
        del request
        return pb.ListSecretsResponse(secrets=self._secrets.all())

    @override
    async def UpdateSecret(self, request: pb.UpdateSecretRequest, context: Context) -> pb.UpdateSecretResponse:
        check_message(request)
        return pb.UpdateSecretResponse(secret=await self._secrets.update(request, caller()))

    @override
    async def DeleteSecret(self, request: pb.DeleteSecretRequest, context: Context) -> pb.DeleteSecretResponse:
        check_message(request)
        await self._secrets.delete(request, caller())
        return pb.DeleteSecretResponse()

    @override
    async def GetWebhook(self, request: pb.GetWebhookRequest, context: Context) -> pb.GetWebhookResponse:
        require_private(context)
        return self._secrets.webhook(request.tenant)
