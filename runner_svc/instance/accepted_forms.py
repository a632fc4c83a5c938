"""The form in which an engine accepts requests, learned from its refusals."""

from copy import deepcopy

from runner_svc.policy.answer_room import NO_LIMIT, room_for_answer
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.history import unsupported
from weft.dispatch.history_forms import MAX_FORM_TRIES, NO_FORMS, Form, Forms, in_forms, is_about_form, next_forms
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

_LIMIT = "max_tokens"
_ANSWERED = "the engine answered "
"""Beginning of errors with a status, which is no number of tokens."""
_REFUSALS = frozenset(
    {
        Reason.BACKEND_ERROR,
        Reason.BACKEND_REJECTED,
        Reason.INVALID_ARGUMENT,
        Reason.TEMPLATE_FAILED,
        Reason.MODALITY_UNSUPPORTED,
    }
)
"""Reasons of engines that reject the form of a conversation; many answer 500 if a chat template fails."""
_LONG = frozenset({Reason.CONTEXT_LENGTH_EXCEEDED, Reason.BACKEND_REJECTED})


class AcceptedForms:
    """The request forms that an engine has accepted after a refusal. Later requests are sent in them first."""

    def __init__(self) -> None:
        self.forms = NO_FORMS
        """Empty: it has refused none."""


class FittedRequest:
    """A request, rewritten to the form that its engine is known to accept."""

    def __init__(self, payload: GenerationPayload, accepted: AcceptedForms) -> None:
        self._original = payload
        self._accepted = accepted
        self._known = accepted.forms
        self._tried: set[tuple[Forms, int | None]] = set()
        self._apply(self._known, None)

    def _apply(self, forms: Forms, limit: int | None) -> None:
        """Sets the payload in these forms. `limit`: the lowered limit of the answer; None: the caller's."""
        self._forms, self._limit = forms, limit
        self._tried.add((forms, limit))
        self.payload: GenerationPayload = self._original
        self.warnings: list[warning_pb2.Warning] = []
        """What the caller has to know of the form."""
        if isinstance(self._original, chat_pb2.ChatPayload):
            self.payload, self.warnings = in_forms(self._original, forms)
        if limit is not None:
            self._lower(limit)

    def note_accepted(self) -> None:
        """Records that the engine has accepted the request, so that the next one needs no second try."""
        # The engine may have refused one damaged image: images of later requests are still sent.
        accepted = self._forms - {Form.NO_MEDIA}
        if accepted != self._known:
            self._accepted.forms = accepted

    def adapt(self, error: WeftError) -> bool:
        """Changes the form after a refusal; returns whether the request should be sent again."""
        limit = self._next_limit(error)
        forms = self._next_forms(error) if limit is None else self._forms
        limit = self._limit if limit is None else limit
        if forms is None or (forms, limit) in self._tried or len(self._tried) > MAX_FORM_TRIES:
            return False
        self._apply(forms, limit)
        return True

    def _next_forms(self, error: WeftError) -> Forms | None:
        if error.reason not in _REFUSALS or not isinstance(self._original, chat_pb2.ChatPayload):
            return None
        found = next_forms(self._original, self._forms, error.message)
        if found is None and self._known and is_about_form(error.message):
            # What the engine accepted once may be what it refuses now.
            return NO_FORMS
        return found

    def _next_limit(self, error: WeftError) -> int | None:
        sampling = self.payload.sampling
        if error.reason not in _LONG or not sampling.max_tokens:
            return None
        words = error.message.partition(": ")[2] if error.message.startswith(_ANSWERED) else error.message
        return room_for_answer(words, sampling.max_tokens)

    def _lower(self, limit: int) -> None:
        asked = self._original.sampling.max_tokens
        if self.payload is self._original:
            self.payload = deepcopy(self._original)
        if limit == NO_LIMIT:
            self.payload.sampling.ClearField("max_tokens")
            message = f"{asked} was not used: the engine's context ends the answer before"
        else:
            self.payload.sampling.max_tokens = limit
            message = f"was lowered from {asked} to {limit}: the engine allows no more beside this prompt"
        self.warnings.append(unsupported(_LIMIT, f"{_LIMIT} {message}"))
