"""Labels of requests for conditions of routes: those of the caller, and those that labelers of other packages add.

A labeler is a function from a prompt to labels, such as its difficulty. Another package adds one with an entry point:

    [project.entry-points."weft.labelers"]
    difficulty = "my_package:labels_of"

It is called for every chat and completion that is sent to a route, in the process that has the prompt, and must return
within a millisecond or so: other requests wait meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import entry_points

from weft.api.common.v1 import chat_pb2, completion_pb2
from weft.dispatch.payload_description import Payload
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.requests.placement_request import label_set
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import AUTO_MODEL, ROUTE_PREFIX, is_name, is_token

log = get_logger("weft.labelers")

ENTRY_POINT_GROUP = "weft.labelers"
MAX_LABELS = 16
"""Maximum labels of all labelers for a request."""
MAX_VALUE_CHARS = 128

Labeler = Callable[[str], Mapping[str, str]]
"""Returns labels for a prompt: the texts of its messages, each after its role and a colon, separated by blank lines."""


class Labelers:
    """The installed labelers, imported for the first request to a route."""

    def labels(self, context: RequestContext, payload: Payload) -> frozenset[str]:
        """Returns the labels of a request, as KEY=VALUE; those of its caller take precedence.

        Only a request to a route has others than those of its coding agent.
        """
        if not (context.model.startswith(ROUTE_PREFIX) or context.model == AUTO_MODEL):
            return label_set(context.labels) if context.labels else frozenset()
        added: dict[str, str] = {}
        if self._installed and (prompt := _text_of(payload)):
            for name, labeler in self._installed:
                added = {**_labeled(name, labeler, prompt, MAX_LABELS - len(added)), **added}
        return label_set({**added, **context.labels, **context.metadata})

    @cached_property
    def _installed(self) -> Sequence[tuple[str, Labeler]]:
        found: list[tuple[str, Labeler]] = []
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: each.name):
            try:
                found.append((point.name, point.load()))
            except Exception:
                log.exception("a labeler cannot be imported, requests get no labels from it", labeler=point.name)
        return found


def _labeled(name: str, labeler: Labeler, prompt: str, most: int) -> Mapping[str, str]:
    try:
        found = dict(labeler(prompt))
        if len(found) <= most and all(is_name(key) and is_token(found[key], MAX_VALUE_CHARS) for key in found):
            return found
        log.error("a labeler returned labels that are too many or malformed", labeler=name)
    except Exception:
        log.exception("a labeler failed, the request gets no labels from it", labeler=name)
    return {}


_ROLES = {number: name.removeprefix("ROLE_").lower() for name, number in chat_pb2.Role.items()}


def _text_of(payload: Payload) -> str:
    match payload:
        case chat_pb2.ChatPayload():
            texts = ((each.role, "".join(part.text for part in each.content)) for each in payload.messages)
            return "\n\n".join(f"{_ROLES[role]}: {text}" for role, text in texts if text)
        case completion_pb2.CompletionPayload():
            return "\n\n".join(prompt.text for prompt in payload.prompts)
        case _:
            return ""
