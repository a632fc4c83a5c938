"""Items about compaction: the trigger that asks for a summary, and the sealed summary. Pure."""

from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from gateway.answers.compaction import CompactionPlan, Summary, SummarySeal, summary_text
from gateway.responses.output import Item, OutputItems
from gateway.responses.schema import InputItem, ResponsesRequest
from gateway.sealed_texts import unreadable
from weft.api.common.v1 import event_pb2
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason

TRIGGER = "compaction_trigger"
COMPACTION = "compaction"
KINDS = frozenset({COMPACTION, "compaction_summary", "context_compaction"})
"""The item and its former names."""
_SYSTEM = frozenset({"system", "developer"})

Entries = Sequence[tuple[str, InputItem]]
"""Items with their paths in the request."""


def is_compaction(items: Sequence[InputItem]) -> bool:
    """Whether the request asks to compact the conversation: if its input ends with the trigger."""
    return bool(items) and items[-1].kind == TRIGGER


def remaining(entries: Entries, seal: SummarySeal | None) -> Entries:
    """Returns the items that the model reads, the newest summary opened in the place of what it covers.

    System messages remain, and the user's, unless the summary stands for them too. Raises INVALID_ARGUMENT naming the
    field of a summary that cannot be opened, and of a trigger that is not last.
    """
    kinds = [item.kind for _, item in entries]
    last = max(
        (index for index, kind in enumerate(kinds) if kind in KINDS and _is_sealed(entries[index][1])), default=-1
    )
    if TRIGGER in kinds[last + 1 :]:
        index = kinds.index(TRIGGER, last + 1)
        if index < len(kinds) - 1:
            raise invalid_field(f"{entries[index][0]}.type", f"must be the last item, as it is '{TRIGGER}'")
        if seal is None:
            raise FieldError(f"{entries[index][0]}.type", "cannot be used here", Reason.UNSUPPORTED_OPERATION)
        entries = entries[:-1]
    if last < 0:
        return entries
    field, item = entries[last]
    if seal is None:
        raise unreadable(f"{field}.encrypted_content")
    summary = seal.open(item.encrypted_content, f"{field}.encrypted_content")
    roles = _SYSTEM if summary.whole else _SYSTEM | {"user"}
    opened = InputItem.model_construct(type=COMPACTION, text=summary.text)
    kept = [entry for entry in entries[:last] if entry[1].kind == "message" and entry[1].role in roles]
    return [*kept, (field, opened), *entries[last + 1 :]]


def _is_sealed(item: InputItem) -> bool:
    """Whether its content is sealed; other services also write summaries as text."""
    return item.encrypted_content is not None


def user_messages(entries: Entries) -> Iterable[InputItem]:
    """Returns the user's messages, which stay beside a summary."""
    return (item for _, item in entries if item.kind == "message" and item.role == "user")


def compaction_plan(request: ResponsesRequest) -> CompactionPlan | None:
    """Returns when the conversation is compacted before its answer; None: never."""
    wanted = [entry for entry in request.context_management or () if entry.type == COMPACTION]
    thresholds = [entry.compact_threshold for entry in wanted if entry.compact_threshold is not None]
    return CompactionPlan(threshold=min(thresholds, default=None)) if wanted else None


class SummaryItems(OutputItems):
    """The output of a response that compacts its conversation: one item, the sealed summary."""

    def __init__(self, response_id: str, seal: Callable[[Summary], str]) -> None:
        self._seal = seal
        super().__init__(response_id, logprobs=False)

    @override
    def begin_again(self) -> None:
        super().begin_again()
        self._pieces: list[str] = []

    @override
    def add(self, delta: event_pb2.Delta) -> None:
        if delta.text:
            if not self.items:
                self._begin_item(COMPACTION, fields={"encrypted_content": ""})
            self._pieces.append(delta.text)
        if delta.finish_reason:
            self.finish_reason = delta.finish_reason

    @override
    def close(self) -> None:
        """Completes the item. Raises BACKEND_PROTOCOL_ERROR if the model wrote no text."""
        text = summary_text(self._pieces, is_cut=self.finish_reason == event_pb2.FINISH_REASON_LENGTH)
        item: Item = self.items[0]
        item.extra = {"encrypted_content": self._seal(Summary(text))}
        self._end(item, "completed")

    @override
    def incomplete_reason(self) -> str | None:
        return None
