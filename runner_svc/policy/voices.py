"""Chooses a voice by the engine's names, configured aliases, and OpenAI's voice names. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from runner_svc.policy.parameters import ParameterWarning
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.values.names import close_names, is_token

FIELD = "voice"
SPEAKER_MARK = "/"
"""Separates a voice and a speaker, as in `en_US-libritts-high/p3922`."""
MAX_LISTED = 20
"""Maximum number of voices in an error."""
MAX_SHOWN_CHARS = 64
MAX_VOICE_CHARS = 128
MAX_PUBLISHED = 512
"""Maximum number of voices that the mesh shows per model; their names have at most MAX_PUBLISHED_CHARS."""
MAX_PUBLISHED_CHARS = 64
OPENAI_VOICES = frozenset(
    {
        *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
        *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
    }
)
"""Names that OpenAI clients send if their user has not chosen a voice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownVoice:
    """A voice of an engine."""

    name: str
    language: str = ""
    """Its language, such as `en-GB`; empty: unknown."""
    aliases: tuple[str, ...] = ()
    """Its other names."""
    speakers: tuple[str, ...] = ()
    """Its speakers; empty: it has only one."""
    fault: str = ""
    """Why it is unusable; empty: it is usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenVoice:
    """The voice of one request."""

    name: str
    speaker: str = ""
    """Empty: the voice's first speaker."""
    warning: ParameterWarning | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceCatalog:
    """A model's voices and the names that requests may use for them."""

    voices: Sequence[KnownVoice]
    default: str = ""
    """The voice of requests without one; empty: the first usable voice."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Configured names of voices."""

    def checked(self) -> "VoiceCatalog":
        """Returns this catalog. Raises INVALID_ARGUMENT naming the setting that refers to an unknown voice."""
        if self.default:
            self._named(self.default, "default_voice")
        for alias, name in self.aliases.items():
            self._named(name, f"voice_aliases.{alias}")
        if not self.default and not self.usable:
            raise invalid_field("voices", "; ".join(f"{voice.name}: {voice.fault}" for voice in self.voices[:3]))
        return self

    @property
    def published(self) -> tuple[str, ...]:
        """Names of the usable voices as the mesh shows them, default first."""
        usual = self._default()
        first = f"{usual.name}{SPEAKER_MARK}{usual.speaker}" if usual.speaker else usual.name
        names = (first, *self.aliases, *(voice.name for voice in self.usable))
        return tuple(dict.fromkeys(name for name in names if is_token(name, MAX_PUBLISHED_CHARS)))[:MAX_PUBLISHED]

    @property
    def usable(self) -> Sequence[KnownVoice]:
        """The voices that can be used."""
        return [voice for voice in self.voices if not voice.fault]

    def choose(self, name: str) -> ChosenVoice:
        """Returns the voice of a request. Raises INVALID_ARGUMENT naming `voice`."""
        if not name:
            return self._default()
        if (meant := self.aliases.get(name)) is not None:
            return self._named(meant, FIELD)
        if name.lower() in OPENAI_VOICES and self._found(name) is None:
            chosen = self._default()
            message = f"{name} is a voice of OpenAI, which this model does not have: {chosen.name} speaks instead"
            return ChosenVoice(
                name=chosen.name,
                speaker=chosen.speaker,
                warning=ParameterWarning(field=FIELD, message=message),
            )
        return self._named(name, FIELD)

    def _default(self) -> ChosenVoice:
        return self._named(self.default, FIELD) if self.default else ChosenVoice(name=self.usable[0].name)

    def _named(self, name: str, setting: str) -> ChosenVoice:
        if (voice := self._found(name)) is not None:
            return ChosenVoice(name=_usable(voice, setting).name)
        base, mark, rest = name.partition(SPEAKER_MARK)
        if mark and (voice := self._found(base)) is not None:
            return ChosenVoice(name=_usable(voice, setting).name, speaker=_speaker(voice, rest, setting))
        message = f"this model has no voice {name[:MAX_SHOWN_CHARS]!r}"
        raise _unknown(setting, message, name, [voice.name for voice in self.usable])

    def _found(self, name: str) -> KnownVoice | None:
        """Returns the voice with this name, else the first that matches case-insensitively; None: there is none."""
        low = name.casefold()
        for has_name in (
            lambda voice: name == voice.name,
            lambda voice: name in voice.aliases,
            lambda voice: low in (voice.name.casefold(), *map(str.casefold, voice.aliases)),
        ):
            found = next(filter(has_name, self.voices), None)
            if found is not None:
                return found
        return None


def _usable(voice: KnownVoice, setting: str) -> KnownVoice:
    if voice.fault:
        raise invalid_field(setting, f"{voice.name} cannot be used: {voice.fault}")
    return voice


def _speaker(voice: KnownVoice, name: str, setting: str) -> str:
    if name not in voice.speakers:
        message = f"{voice.name} has no speaker {name[:MAX_SHOWN_CHARS]!r}"
        raise _unknown(setting, message, name, voice.speakers)
    return name


def _unknown(setting: str, message: str, name: str, names: Iterable[str]) -> FieldError:
    listed = list(names)
    close = close_names(name, listed)
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    known = f"it has {', '.join(listed[:MAX_LISTED])}{more}" if listed else "it has only one"
    return invalid_field(setting, "; ".join(filter(None, (message, close, known))))
