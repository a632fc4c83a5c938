"""Ids of responses and of the items in them. An item's id holds that of its response, so that it can be found again.

resp_<24 hex digits>, and for its items msg_, rs_, fc_, fco_ or ref_<the same digits>_<place>, where the place of an
input item has an `i` before it: `msg_0f..e1_2` is the third output item, `msg_0f..e1_i0` the first of the input.

A response in the background is a task, and has its digits: `resp_0f..e1` is the task `task-0f..e1`. So any gateway
finds it, with nothing but its id.
"""

import re
import secrets

from weft.durable.tasks import TASK_PREFIX

_HEX_CHARS = 24
_RESPONSE = "resp_"
_ITEM = re.compile(rf"[a-z]{{2,8}}_([0-9a-f]{{{_HEX_CHARS}}})_i?[0-9]{{1,6}}")
_BACKGROUND = re.compile(rf"{_RESPONSE}([0-9a-f]{{{_HEX_CHARS}}})")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def new_response_id() -> str:
    """An id that nobody can guess: 96 random bits."""
    return _RESPONSE + secrets.token_hex(_HEX_CHARS // 2)


def background_response_id(task_id: str) -> str:
    """The id of the response that a task makes."""
    return _RESPONSE + task_id.removeprefix(f"{TASK_PREFIX}-")


def task_of(response_id: str) -> str | None:
    """The task that would make a response; None: none of ours has such an id."""
    found = _BACKGROUND.fullmatch(response_id)
    return None if found is None else f"{TASK_PREFIX}-{found.group(1)}"


def call_id(response_id: str, index: int) -> str:
    """The id of a function call that came without one of its own; `index` is its place among the output items."""
    return f"call_{response_id.removeprefix(_RESPONSE)}_{index}"


def output_item_id(response_id: str, kind: str, index: int) -> str:
    """The id of an output item; `kind` is its type, `index` its place."""
    return f"{_prefix(kind)}_{response_id.removeprefix(_RESPONSE)}_{index}"


def input_item_id(response_id: str, kind: str, index: int) -> str:
    """The id of an input item that came without one."""
    return f"{_prefix(kind)}_{response_id.removeprefix(_RESPONSE)}_i{index}"


def response_of(item_id: str) -> str | None:
    """The id of the response an item belongs to; None for an item that is none of ours."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else _RESPONSE + found.group(1)


def _prefix(kind: str) -> str:
    return _PREFIXES.get(kind, "item")
