"""The detector of voices: those that the switch `voices` has, in seconds, in each piece."""

from numpy import Samples

from faster_whisper import RATE, SWITCHES


def get_speech_timestamps(audio: Samples) -> list[dict[str, int]]:
    found = [(round(begin * RATE), round(end * RATE)) for begin, end in SWITCHES.get("voices", [])]
    return [{"start": begin, "end": min(end, len(audio))} for begin, end in found if begin < len(audio)]
