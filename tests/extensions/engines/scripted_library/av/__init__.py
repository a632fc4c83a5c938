"""A stand-in for PyAV: a recording is a line of JSON, such as {"seconds": 4, "rate": 16000, "channels": 1}.

`stated` is the length that its head tells, `bad` how many packets are broken, `late_channels` the channels of its last
packet. All else is no recording, as for the real one.
"""

import io
import json
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from numpy import Samples

from av import error

__all__ = ["AudioResampler", "error", "open"]

PACKET_SECONDS = 10


class _Container:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        codec = SimpleNamespace(sample_rate=facts["rate"], channels=facts["channels"])
        stated = facts.get("stated", facts["seconds"])
        sound = SimpleNamespace(codec_context=codec, duration=stated or None, time_base=Fraction(1))
        self.streams = SimpleNamespace(audio=[sound] if facts["channels"] else [])
        self.duration = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def demux(self, _: Any) -> Iterator["_Packet"]:
        for number in range(int(self.facts.get("bad", 0))):
            yield _Packet(self.facts, number, 0, is_bad=True)
        left, number = float(self.facts["seconds"]), 0
        while left > 0:
            yield _Packet(self.facts, number, min(left, PACKET_SECONDS))
            left, number = left - PACKET_SECONDS, number + 1


class _Packet:
    def __init__(self, facts: dict[str, Any], number: int, seconds: float, *, is_bad: bool = False) -> None:
        self._facts, self._number, self._seconds, self._is_bad = facts, number, seconds, is_bad

    def decode(self) -> list[Any]:
        if self._is_bad:
            raise error.InvalidDataError("Invalid data found when processing input")
        channels = self._facts["channels"]
        if (self._number + 1) * PACKET_SECONDS >= self._facts["seconds"]:
            channels = self._facts.get("late_channels", channels)
        layout = SimpleNamespace(name=f"{channels} channels", nb_channels=channels)
        return [
            SimpleNamespace(
                format=SimpleNamespace(name="s16"),
                layout=layout,
                sample_rate=self._facts["rate"],
                pts=0,
                seconds=self._seconds,
                peak=self._facts.get("peak", 0.5),
            )
        ]


class AudioResampler:
    def __init__(self, *, format: str, layout: str, rate: int) -> None:  # noqa: A002
        assert (format, layout) == ("s16", "mono")
        self._rate = rate

    def resample(self, frame: Any) -> list[Any]:
        if frame is None:
            return []
        assert frame.pts is None
        samples = Samples(round(frame.seconds * self._rate), frame.peak)
        return [SimpleNamespace(to_ndarray=lambda: samples)]


def open(file: io.BytesIO, *, mode: str, options: dict[str, str], metadata_errors: str) -> _Container:  # noqa: A001
    assert (mode, metadata_errors) == ("r", "ignore")
    assert options["protocol_whitelist"] == "none"
    try:
        facts = json.loads(file.read())
    except ValueError:
        raise error.InvalidDataError("Invalid data found when processing input: '<none>'") from None
    return _Container(facts)
