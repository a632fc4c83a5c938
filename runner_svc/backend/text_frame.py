"""Frames of an engine's text, which is by far most of what it sends."""

from weft.api.common.v1 import event_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.dispatch.frames import Frame


class TextFrame(list[event_pb2.InferenceEvent]):
    """A frame that begins with text of one choice, and that text beside the messages.

    Reading a field of a message costs a multiple of reading an attribute, and several parts of the runner look at each
    text: they look at `texts`, and at the messages of `others` alone.
    """

    __slots__ = ("_response", "choice", "texts")

    def __init__(self, choice: int) -> None:
        super().__init__()
        self._response = generation_service_pb2.GenerateResponse()
        """The message in which the texts are made, so that they need not be copied into it."""
        self.choice = choice
        self.texts: list[str] = []
        """The texts of the first events, in order. These events are nothing but text of the choice."""

    def add_text(self, text: str) -> None:
        """Append a text; nothing but texts may precede it."""
        event = self._response.events.add()
        delta = event.delta
        delta.text = text
        if self.choice:
            delta.index = self.choice
        self.append(event)
        self.texts.append(text)

    def as_response(self) -> generation_service_pb2.GenerateResponse:
        """Returns the message with the events of the frame. Nothing may be appended afterwards."""
        response = self._response
        response.events.extend(self[len(response.events) :])
        return response


def texts_of(frame: Frame) -> list[str]:
    """Returns the texts with which a frame is known to begin; empty: unknown, or none."""
    return frame.texts if type(frame) is TextFrame else []


def others_of(frame: Frame) -> Frame:
    """Returns the events of a frame after its `texts_of`."""
    return frame[len(frame.texts) :] if type(frame) is TextFrame else frame


class ReadFrames:
    """Puts together the frames of what an engine has sent at once."""

    def __init__(self, *, whole: bool) -> None:
        """`whole`: the answer is not streamed to its caller, so its texts become one."""
        self._whole = whole
        self._frames: list[Frame] = []
        self._frame: Frame = []
        self._joined: list[str] = []
        """Texts of an unstreamed answer that become one: the first event of the present frame."""

    @property
    def present(self) -> Frame:
        """The frame that is put together."""
        frame = self._frame
        if self._joined and type(frame) is TextFrame:
            frame.add_text("".join(self._joined))
            self._joined = []
        return frame

    def add_text(self, choice: int, text: str) -> bool:
        """Add a text where nothing but texts of the same choice precedes it; returns whether that is so."""
        frame = self._frame
        if not frame and not self._joined:
            frame = self._frame = TextFrame(choice)
        if type(frame) is not TextFrame or frame.choice != choice or len(frame) != len(frame.texts):
            return False
        if self._whole:
            self._joined.append(text)
        else:
            frame.add_text(text)
        return True

    def add(self, events: Frame) -> None:
        """Add events to the present frame."""
        if events:
            frame = self.present
            frame += events

    def add_alone(self, events: Frame) -> None:
        """Add a frame of its own."""
        if self.present:
            self._frames.append(self._frame)
        self._frames.append(events)
        self._frame = []

    def all(self) -> list[Frame]:
        """Returns the frames, in order."""
        if self.present:
            self._frames.append(self._frame)
        return self._frames
