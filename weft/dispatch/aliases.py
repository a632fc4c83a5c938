"""Resolution of aliases. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from weft.api.common.v1 import chat_pb2, completion_pb2, tokenize_pb2
from weft.api.registry.v1.alias_pb2 import AliasManifest
from weft.api.router.v1.task_pb2 import TaskSpec
from weft.dispatch.agents import ResolvedRequest, named, resolve
from weft.dispatch.fleet import FleetView
from weft.dispatch.presets import apply_preset
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.values.fast_dataclass import fast_dataclass
from weft.kernel.values.names import ANY, AUTO_MODEL, KIND_PREFIXES, ascii_name, is_resource_id, matches


@fast_dataclass()
class AskedName:
    """The model of a request."""

    model: str
    """The resolved target: the name of a model or a pool, `agent/` or `route/` and a name, or `auto`."""
    alias: str = ""
    """The alias that the request named; empty: it named `model` directly."""
    preset: AliasManifest | None = None
    """That alias, if it changes its requests."""


def asked_name(view: FleetView, text: str, tenant: str) -> AskedName:
    """Resolves the `model` of a tenant's request: an id to its name, an alias to its target.

    Resources take precedence over aliases. An alias never refers to another alias, so one step is enough.
    """
    model = named(view, ascii_name(text))
    if model in view.models or model == AUTO_MODEL or model.startswith(KIND_PREFIXES) or is_resource_id(model):
        return AskedName(model)
    found = alias_for((each.manifest for each in view.aliases.values()), model, tenant)
    # Pools are checked last because that scans all models.
    if found is None or any(known.pool == model for known in view.models.values()):
        return AskedName(model)
    return AskedName(found.target, model, found if _has_preset(found) else None)


def resolve_names(view: FleetView, context: RequestContext, payload: Any) -> ResolvedRequest | None:
    """Returns a request with the preset of its alias, then as `resolve`; None: unchanged. Raises as `resolve`."""
    alias = context.preset
    if context.task_id and context.asked_model:
        alias = asked_name(view, context.asked_model, context.tenant).preset
    if alias is None:
        return resolve(view, context, payload) if "/" in context.model else None
    prepared = type(payload)()
    prepared.CopyFrom(payload)
    chat = prepared.chat if isinstance(prepared, tokenize_pb2.TokenizePayload) else prepared
    is_text = isinstance(chat, chat_pb2.ChatPayload | completion_pb2.CompletionPayload)
    # Parameters for answers must not cut the summary of a conversation.
    is_summary = context.compaction is not None and not context.compaction.pass_count
    changed = apply_preset(chat, alias, f"alias/{alias.name}") if is_text and not is_summary else []
    found = resolve(view, context, prepared) if "/" in context.model else None
    found = found or ResolvedRequest(context=context, payload=prepared)
    return replace(found, changed=(*changed, *found.changed), provider_headers=alias.provider_headers)


def _has_preset(alias: AliasManifest) -> bool:
    params = alias.default_params.ByteSize() or alias.forced_params.ByteSize() or alias.removed_params
    return bool(params or alias.provider_headers)


def exact_aliases(view: FleetView, tenant: str) -> list[AskedName]:
    """Returns the tenant's aliases of single names, sorted, without those that a resource of the mesh hides."""
    manifests = [each.manifest for each in view.aliases.values()]
    names = {each.pattern for each in manifests if is_exact(each) and each.tenant in ("", tenant)}
    names -= {name for model in view.models.values() for name in (model.name, model.pool)}
    found = ((name, alias_for(manifests, name, tenant)) for name in sorted(names))
    return [AskedName(alias.target, name) for name, alias in found if alias is not None]


def name_asked_model(view: FleetView, spec: TaskSpec, tenant: str) -> None:
    """Sets a task's model to the resolved target, and records the alias that the task named."""
    asked = asked_name(view, spec.model, tenant)
    spec.model = asked.model
    if asked.alias:
        spec.asked_model = asked.alias


def alias_for(aliases: Iterable[AliasManifest], name: str, tenant: str) -> AliasManifest | None:
    """Returns the alias that matches a name for a tenant; None: none does.

    A tenant's own alias takes precedence over a general one, then an exact pattern, then the longest pattern.
    """
    matching = (each for each in aliases if each.tenant in ("", tenant) and matches(each.pattern, name))
    return max(matching, key=_rank, default=None)


def is_exact(alias: AliasManifest) -> bool:
    """Whether an alias matches exactly one name."""
    return not alias.pattern.endswith(ANY)


def _rank(alias: AliasManifest) -> tuple[bool, bool, int, str]:
    return bool(alias.tenant), is_exact(alias), len(alias.pattern), alias.name
