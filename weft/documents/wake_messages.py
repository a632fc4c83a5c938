"""Wake documents to and from the wire, by way of the plan they stand for."""

from typing import Any, assert_never

from weft.api.registry.v1 import wake_pb2
from weft.documents.wake_document import (
    CommandRecipeDocument,
    HttpRecipeDocument,
    RecipeDocument,
    WakeDocument,
    WakeOnLanRecipeDocument,
)
from weft.wake.messages import plan_message, plan_of
from weft.wake.recipes import CommandRecipe, HttpRecipe, Recipe, WakeOnLanRecipe, WakePlan


def wake_message(document: WakeDocument) -> wake_pb2.Wake:
    """What `document` says, on the wire."""
    plan = WakePlan(
        by_runner=document.by_runner,
        by_mesh=_recipe(document.by_mesh) if document.by_mesh is not None else None,
        max_wait_seconds=document.max_wait_seconds,
    )
    return plan_message(plan)


def wake_document(message: wake_pb2.Wake) -> WakeDocument:
    """What `message` says, as a document."""
    plan = plan_of(message)
    return WakeDocument.model_construct(
        by_runner=plan.by_runner,
        by_mesh=_recipe_document(plan.by_mesh) if plan.by_mesh is not None else None,
        max_wait_seconds=plan.max_wait_seconds,
    )


def _recipe(document: RecipeDocument) -> Recipe:
    match document:
        case HttpRecipeDocument():
            return HttpRecipe(url=document.url, method=document.method, headers=document.headers)
        case CommandRecipeDocument():
            return CommandRecipe(argv=document.argv)
        case WakeOnLanRecipeDocument():
            return WakeOnLanRecipe(
                mac_address=document.mac_address, broadcast_address=document.broadcast_address, port=document.port
            )
    assert_never(document)


def _recipe_document(recipe: Recipe) -> RecipeDocument:
    match recipe:
        case HttpRecipe(url=url, method=method, headers=headers):
            http: dict[str, Any] = {"type": "http", "url": url, "method": method, "headers": dict(headers)}
            return HttpRecipeDocument.model_construct(**http)
        case CommandRecipe(argv=argv):
            return CommandRecipeDocument.model_construct(type="command", argv=argv)
        case WakeOnLanRecipe():
            return WakeOnLanRecipeDocument.model_construct(
                type="wake_on_lan",
                mac_address=recipe.mac_address,
                broadcast_address=recipe.broadcast_address,
                port=recipe.port,
            )
    assert_never(recipe)
