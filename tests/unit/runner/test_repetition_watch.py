"""The repetition watch over the choices of one turn: one warning for each."""

from kit.failures import fails

from runner_svc.chat.turn import RepetitionWatch
from weft.api.common.v1 import event_pb2
from weft.kernel.reasons import Reason

LINE = "The lantern keeper counts the ships.\n"


def _frame(*choices: int, lines: int = 1) -> list[event_pb2.InferenceEvent]:
    deltas = [event_pb2.Delta(index=choice, text=LINE) for choice in choices for _ in range(lines)]
    return [event_pb2.InferenceEvent(delta=delta) for delta in deltas]


def test_two_looping_choices_in_one_frame_are_both_reported() -> None:
    watch = RepetitionWatch(kills=False)
    found = [watch.look(_frame(0, 1, lines=40)), *(watch.look(_frame(0, 1)) for _ in range(40))]
    assert [warning is not None for warning in found[:2]] == [True, True]
    assert not any(found[2:])


def test_interleaved_choices_do_not_hide_a_loop() -> None:
    watch = RepetitionWatch(kills=True)
    other = event_pb2.InferenceEvent(delta=event_pb2.Delta(index=1, text="Another one."))
    with fails(Reason.REPEATED_LINE_LOOP):
        watch.look([*_frame(0), other] * 40)


def test_events_without_text_are_ignored() -> None:
    watch = RepetitionWatch(kills=True)
    usage = event_pb2.InferenceEvent()
    usage.usage.prompt_tokens = 1
    assert watch.look([usage, event_pb2.InferenceEvent(delta=event_pb2.Delta())]) is None
