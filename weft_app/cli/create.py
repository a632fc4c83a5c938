"""`weft models create`: a model of a provider, made by options instead of a document."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import typer

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import require_name
from weft_app.cli.declare import post_apply
from weft_app.cli.mesh_api import connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, NamedFormat
from weft_app.cli.output import print_outcome


def create_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model in the mesh.")],
    *,
    url: Annotated[str, typer.Option(help="Base URL of the provider, such as https://api.example.com/v1.")],
    api_key_ref: Annotated[
        str, typer.Option(metavar="secret/NAME", help="Secret with the provider's API key. Default: no key.")
    ] = "",
    api: Annotated[Literal["openai", "anthropic"], typer.Option(help="API of the provider.")] = "openai",
    upstream_model: Annotated[str, typer.Option(help="The provider's name of the model. Default: NAME.")] = "",
    pool: Annotated[str, typer.Option(help="Pool of the model.")] = "",
    embeddings: Annotated[bool, typer.Option("--embeddings", help="The model also serves embeddings.")] = False,
    skills: Annotated[
        list[str] | None, typer.Option("--skill", help="text, image, audio or tools; repeatable. Default: unknown.")
    ] = None,
    tier: Annotated[str, typer.Option(help="Tier of the model, such as fast or heavy.")] = "",
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="Label for selectors, as KEY=VALUE; repeatable."),
    ] = None,
    owner: Annotated[str, typer.Option(help="Owner. Default: the caller's key.")] = "",
    context_tokens: Annotated[int, typer.Option(min=0, help="Context length in tokens; 0: unknown.")] = 0,
    slots: Annotated[int, typer.Option(min=0, help="Maximum number of concurrent requests; 0: 4.")] = 0,
    timeout_seconds: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait in seconds until an answer begins; 0: 120.")
    ] = 0,
    max_retries: Annotated[int, typer.Option(min=0, help="Maximum number of retries if the provider is busy.")] = 0,
    home: HomeOption = DEFAULT_HOME,
    output: Annotated[NamedFormat, typer.Option("--output", "-o", help="Output format.")] = NamedFormat.TABLE,
) -> None:
    """Create a model that the mesh itself serves from a provider, without a runner in weft.yaml.

    Requests need a permit to go there, as to every remote model. `weft apply` changes it.

    Example: weft models create frontier --url https://api.example.com/v1 --api-key-ref secret/example-key
    """
    require_name(name, "NAME")
    provider = {
        "url": url,
        "api": api,
        "upstreamModel": upstream_model,
        "apiKeyRef": api_key_ref,
        "slots": slots,
        "timeoutSeconds": timeout_seconds,
        "maxRetries": max_retries,
    }
    given: dict[str, Any] = {
        "kind": "model",
        "name": name,
        "provider": {field: value for field, value in provider.items() if value},
        "operations": ["chat", "embedding"] if embeddings else ["chat"],
        "poolName": pool,
        "skills": skills,
        "contextTokens": context_tokens,
        "tier": tier,
        "owner": owner,
        "labels": labels_of(labels or (), "--label"),
    }
    document = {field: value for field, value in given.items() if value}
    with connect(home) as mesh:
        (planned,) = post_apply(mesh, [document], dry_run=True)
        if planned["outcome"] != "created":
            raise WeftError(
                Reason.ALREADY_EXISTS,
                f"the model {name} already exists; to change it, use weft get model {name} -o yaml, then weft apply",
                metadata={"model": name},
            )
        (result,) = post_apply(mesh, [document])
    print_outcome(output, f"model/{name} created", f"model/{name}", result)


def labels_of(words: Iterable[str], option: str) -> dict[str, str]:
    """Parses labels KEY=VALUE. Raises INVALID_ARGUMENT for another form or a duplicate key."""
    found: dict[str, str] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key or not value:
            raise invalid_field(option, f"{word[:64]!r} must be KEY=VALUE, such as team=a")
        if key in found:
            raise invalid_field(option, f"{key[:64]!r} is set twice")
        found[key] = value
    return found
