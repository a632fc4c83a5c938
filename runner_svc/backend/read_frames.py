"""Puts together the frames of what an engine has sent so far; most of it is text."""

from weft.api.common.v1 import event_pb2
from weft.dispatch.frames import MAX_JOINED_CHARS, MAX_JOINED_TEXTS, Frame


class ReadFrames:
    """The frames of one read. Consecutive texts of a choice become one event, where that is wanted."""

    def __init__(self, *, whole: bool, joins: bool = False) -> None:
        """`whole`: the answer is not streamed to its caller, so its texts become one.

        `joins`: a delta may join texts and say their lengths, up to MAX_JOINED_TEXTS and MAX_JOINED_CHARS per frame.
        """
        self._whole = whole
        self._joins = joins
        self._frames: list[Frame] = []
        self._frame: Frame = []
        self._choice = 0
        self._texts: list[str] = []
        """Texts of `_choice` that follow the events of the present frame and are no event yet."""

    @property
    def present(self) -> Frame:
        """The frame that is put together."""
        if self._texts:
            self._end_texts()
        return self._frame

    def add_text(self, choice: int, text: str) -> list[str] | None:
        """Add a text; returns the list to which texts of the same choice may be appended that follow immediately.

        None: it was not added, because it may continue the text of an event that is there.
        """
        if self._texts and choice != self._choice:
            self._end_texts()
        texts = self._texts
        if not texts:
            if self._whole and self._frame:
                return None
            self._choice = choice
        texts.append(text)
        return texts

    def add(self, events: Frame) -> None:
        """Add events to the present frame."""
        if events:
            frame = self.present
            frame += events

    def add_alone(self, events: Frame) -> None:
        """Add a separate frame."""
        self._end_frame()
        self._frames.append(events)

    def all(self) -> list[Frame]:
        """Returns the frames, in order."""
        self._end_frame()
        return self._frames

    def _end_frame(self) -> None:
        if self.present:
            self._frames.append(self._frame)
            self._frame = []

    def _end_texts(self) -> None:
        """Make events of the texts."""
        texts, self._texts = self._texts, []
        if self._whole:
            self._add_delta("".join(texts), ())
        elif not self._joins:
            for text in texts:
                self._add_delta(text, ())
        elif len(texts) <= MAX_JOINED_TEXTS and len(text := "".join(texts)) <= MAX_JOINED_CHARS:
            self._add_delta(text, texts)
        else:
            self._add_within_limits(texts)

    def _add_within_limits(self, texts: list[str]) -> None:
        """Add texts in several frames, as few as the limits allow."""
        part: list[str] = []
        chars = 0
        for text in texts:
            if part and (len(part) == MAX_JOINED_TEXTS or chars + len(text) > MAX_JOINED_CHARS):
                self._add_delta("".join(part), part)
                self._frames.append(self._frame)
                self._frame, part, chars = [], [], 0
            part.append(text)
            chars += len(text)
        self._add_delta("".join(part), part)

    def _add_delta(self, text: str, pieces: "list[str] | tuple[()]") -> None:
        event = event_pb2.InferenceEvent()
        delta = event.delta
        delta.text = text
        if self._choice:
            delta.index = self._choice
        if len(pieces) > 1:
            delta.piece_lengths.extend(map(len, pieces))
        self._frame.append(event)
