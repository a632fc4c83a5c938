"""Models. Runners publish them, and operators' declarations override that; central models have a provider instead."""

from urllib.parse import urlsplit

from weft.api.registry.v1 import model_pb2, wake_pb2
from weft.documents.kind import DeclaredKind
from weft.documents.resource_kinds import ResourceKind
from weft.documents.selectors import to_canonical_tags
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.address import is_loopback
from weft.kernel.values.names import CENTRAL_RUNNER, SECRET_PREFIX, is_name, require_no_id
from weft.wake.recipes import set_defaults

_CHAT, _COMPLETION = model_pb2.MODEL_OPERATION_CHAT, model_pb2.MODEL_OPERATION_COMPLETION
_EMBEDDING = model_pb2.MODEL_OPERATION_EMBEDDING
_OFFERED = {
    model_pb2.ModelProvider.API_OPENAI: frozenset({_CHAT, _EMBEDDING}),
    model_pb2.ModelProvider.API_ANTHROPIC: frozenset({_CHAT}),
}


def secret_of(manifest: model_pb2.ModelManifest) -> str:
    """Returns the name of a central model's secret; empty: none."""
    return manifest.provider.api_key_ref.removeprefix(SECRET_PREFIX)


def require_secret_ref(reference: str, field: str) -> None:
    """Raises INVALID_ARGUMENT unless a text refers to a secret by its name."""
    if not (reference.startswith(SECRET_PREFIX) and is_name(reference.removeprefix(SECRET_PREFIX))):
        raise invalid_field(field, "must be secret/NAME, a secret of `weft keys secret create`")


def to_canonical_provider(declaration_runner: str, manifest: model_pb2.ModelManifest, field: str) -> str:
    """Converts the manifest of a central model to its stored form; returns the runner that serves it.

    Raises INVALID_ARGUMENT naming the field.
    """
    provider, where = manifest.provider, f"{field}.provider"
    if declaration_runner not in ("", CENTRAL_RUNNER):
        raise invalid_field(where, "cannot be combined with `runner`: the mesh itself serves the model")
    if manifest.HasField("wake"):
        raise invalid_field(f"{field}.wake", "cannot be combined with `provider`: a provider does not sleep")
    provider.url = _valid_url(provider.url, f"{where}.url")
    if provider.api_key_ref:
        require_secret_ref(provider.api_key_ref, f"{where}.api_key_ref")
    if not provider.api:
        provider.api = model_pb2.ModelProvider.API_OPENAI
    if provider.api == model_pb2.ModelProvider.API_ANTHROPIC and provider.token_limit_name:
        raise invalid_field(f"{where}.token_limit_name", "is for providers with OpenAI's interface")
    if provider.upstream_model == manifest.name:
        provider.upstream_model = ""
    # Without listed operations a document means chat and completion, but chat providers have no text completions.
    offered = _OFFERED[provider.api]
    manifest.operations[:] = [each for each in manifest.operations if each != _COMPLETION] or [_CHAT]
    if not offered.issuperset(manifest.operations):
        words = sorted(model_pb2.ModelOperation.Name(each).removeprefix("MODEL_OPERATION_").lower() for each in offered)
        raise invalid_field(f"{field}.operations", f"of a model with this provider may be {', '.join(words)}")
    if provider.platform_prompt and _CHAT not in manifest.operations:
        raise invalid_field(f"{where}.platform_prompt", "is only for chat models; omit it")
    manifest.remote = True
    return CENTRAL_RUNNER


def _valid_url(url: str, field: str) -> str:
    """Returns the URL without a trailing slash."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise invalid_field(field, "must be an http or https URL") from None
    if parts.username is not None or parts.password is not None:
        raise invalid_field(field, "must not contain a user or a password: the key is a secret, see api_key_ref")
    if parts.query or parts.fragment:
        raise invalid_field(field, "must end with its path")
    if parts.scheme != "https" and not is_loopback(host):
        raise invalid_field(field, "must be https, or http on loopback, because the key and all prompts are sent there")
    return url.rstrip("/")


def check_manifest(manifest: model_pb2.ModelManifest, field: str, *, published: bool) -> None:
    """Checks the manifest of a model; see `DeclaredKind.check`. `published`: it comes from a runner."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    require_no_id(manifest.pool_name, f"{field}.pool_name")
    manifest.DiscardUnknownFields()
    manifest.operations[:] = sorted(set(manifest.operations))
    manifest.skills[:] = sorted(set(manifest.skills))
    if manifest.HasField("wake"):
        _check_wake(manifest.wake, f"{field}.wake", published=published)
        set_defaults(manifest.wake)
    to_canonical_tags(manifest, field)
    if manifest.HasField("provider") and published:
        raise invalid_field(f"{field}.provider", "a runner publishes no provider; an operator declares it with apply")


def _check_wake(wake: wake_pb2.Wake, field: str, *, published: bool) -> None:
    """Raises INVALID_ARGUMENT naming the field of an invalid wake plan, or one that runners may not publish."""
    if not wake.by_runner and not wake.HasField("by_mesh"):
        raise invalid_field(field, "must say who wakes it: by_runner, by_mesh or both")
    recipe, field = wake.by_mesh, f"{field}.by_mesh"
    # Routers substitute variables: a publisher could have the router's secrets sent to any URL.
    if published and any("${" in value for value in recipe.http.headers.values()):
        raise invalid_field(
            f"{field}.http.headers",
            "runners may not publish recipes that use variables of a router; an "
            "operator must declare this recipe with apply",
        )
    if not recipe.HasField("command"):
        return
    # Routers run the command: a publisher could run programs on another machine.
    if published:
        raise invalid_field(
            f"{field}.command",
            "runners may not publish recipes that run a program on a router; an "
            "operator must declare this recipe with apply",
        )
    if not recipe.command.argv[0]:
        raise invalid_field(f"{field}.command.argv", "must be a program and its arguments")


def check_model(model: model_pb2.ModelDeclaration, field: str) -> None:
    """Checks the declaration of a model; see `DeclaredKind.check`."""
    where = f"{field}.manifest"
    check_manifest(model.manifest, where, published=False)
    if model.manifest.HasField("provider"):
        model.runner = to_canonical_provider(model.runner, model.manifest, where)


def _names(model: model_pb2.ModelDeclaration) -> list[str]:
    """Returns the model's name and its pool, since pool members serve each other's requests."""
    return [name for name in (model.manifest.name, model.manifest.pool_name) if name]


KIND = DeclaredKind(
    kind=ResourceKind.MODEL,
    declared=model_pb2.ModelDeclaration,
    record=model_pb2.Model,
    summary="A model.",
    check=check_model,
    names=_names,
)
