"""Prompts of completions and inputs of embeddings: text or token ids, one or many."""

from typing import TYPE_CHECKING, TypeGuard

from weft.api.common.v1 import completion_pb2
from weft.kernel.errors import invalid_field

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Prompts = str | list[str] | list[int] | list[list[int]]


def fill_prompts(
    target: "RepeatedCompositeFieldContainer[completion_pb2.PromptInput]",
    prompts: Prompts,
    field: str,
    *,
    max_prompts: int,
    allow_empty: bool,
) -> None:
    """Add each prompt to `target`. Raises INVALID_ARGUMENT naming `field` for too many, or an empty one."""
    if isinstance(prompts, str):
        _require_some(prompts, field, allow_empty=allow_empty)
        target.add(text=prompts)
        return
    if _are_tokens(prompts):
        target.add(tokens=completion_pb2.TokenIds(ids=prompts))
        return
    if len(prompts) > max_prompts:
        raise invalid_field(field, f"must have at most {max_prompts} entries")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            _require_some(prompt, f"{field}[{index}]", allow_empty=allow_empty)
            target.add(text=prompt)
        elif isinstance(prompt, list):
            _require_some(prompt, f"{field}[{index}]", allow_empty=False)
            target.add(tokens=completion_pb2.TokenIds(ids=prompt))


def prompt_count(prompts: Prompts) -> int:
    """Returns the number of prompts that `fill_prompts` adds."""
    return 1 if isinstance(prompts, str) or _are_tokens(prompts) else len(prompts)


def _are_tokens(prompts: list[str] | list[int] | list[list[int]]) -> TypeGuard[list[int]]:
    return isinstance(prompts[0], int)


def _require_some(prompt: str | list[int], field: str, *, allow_empty: bool) -> None:
    if not prompt and not allow_empty:
        raise invalid_field(field, "must not be empty")
