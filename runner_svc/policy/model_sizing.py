"""Chooses context, slots and location for a load without configuration, from the model's file and the available memory.

`choose_size` is for models that are served only by name or source. All memory figures are estimates of
`policy/memory_estimate.py`, and each choice comes with a reason. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from runner_svc.policy.memory_estimate import (
    CONTEXT_STEP,
    SIZE_FACTORS,
    EngineHabits,
    FileKind,
    KnownModel,
    MemoryEstimate,
    MemorySettings,
    context_bytes,
    estimate_memory,
    largest_context,
    settings_for,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import size_words

MAX_CHOSEN_CONTEXT_TOKENS = 32_768
"""Longest context that is chosen automatically. Modern models are trained for four times as much, but few conversations
use it, and it would take most of a device."""
MAX_HOST_CONTEXT_TOKENS = 8_192
"""The same on processors, which need minutes to process a prompt of this length."""
GOOD_CONTEXT_TOKENS = 8_192
"""Context for which fewer slots and less spare memory for other models are accepted."""
MIN_CHOSEN_CONTEXT_TOKENS = 2_048
"""Shortest context that is chosen: the default in weft.yaml."""
UNTRAINED_CONTEXT_TOKENS = 4_096
"""Longest context for a model whose file does not state its training context."""
ROUND_CONTEXT_TOKENS = 1_024
"""Larger contexts that are limited by memory are rounded down to a multiple of this."""
SLOT_STEPS = (4, 2, 1)
"""Numbers of slots to try; the first is the default in weft.yaml."""
HOST_SLOT_STEPS = (2, 1)
"""The same on processors, which barely gain from computing several slots in parallel."""
CACHE_SHARE = 0.5
"""Share of the memory left by the weights that the cache may take. The rest is for other models, unless a good context
in one slot needs it."""


class Location(StrEnum):
    """Where a model computes."""

    ACCELERATORS = "accelerators"
    SPLIT = "split"
    """Some layers on accelerators, the others in host memory."""
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of one accelerator."""

    name: str
    total_bytes: int
    reserved_bytes: int = 0
    """Memory that is never leased."""

    @property
    def grantable_bytes(self) -> int:
        """Returns the total memory that leases can take, used or free."""
        return max(0, self.total_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """The memory of a machine that is available to a runner's models."""

    devices: tuple[DeviceMemory, ...] = ()
    host_bytes: int | None = None
    """Host memory that a model may take; None: unknown, no limit."""

    @property
    def largest_device_bytes(self) -> int:
        """The largest possible lease on one device."""
        return max((device.grantable_bytes for device in self.devices), default=0)

    @property
    def all_devices_bytes(self) -> int:
        """The largest possible lease over all devices."""
        return sum(device.grantable_bytes for device in self.devices)

    @property
    def most_bytes(self) -> int | None:
        """Memory of all devices and the host, an upper bound for weights; None: unknown."""
        return None if self.host_bytes is None else self.all_devices_bytes + self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLocations:
    """Where an engine can compute. The defaults are those of llama.cpp's server."""

    on_host: bool = True
    """Whether it can run without an accelerator."""
    in_layers: bool = True
    """Whether it can split layers between accelerators and host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSize:
    """Sizes requested by the caller; None: choose."""

    context_tokens: int | None = None
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another quantization of the same model."""

    source: str
    """Source to pull, such as "hf:Qwen/Qwen3-8B-GGUF:Q3_K_M"."""
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """The model to size."""

    known: KnownModel
    trained_context_tokens: int = 0
    """0: unknown."""
    variants: tuple[Variant, ...] = ()
    """Other known quantizations in its repository."""
    habits: EngineHabits = field(default_factory=EngineHabits)
    locations: EngineLocations = field(default_factory=EngineLocations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSize:
    """The chosen size of a load and its reasons."""

    context_tokens: int
    """Context of one slot."""
    slots: int
    location: Location
    gpu_layers: int
    """Layers on accelerators; -1: all."""
    device_bytes: int = 0
    host_bytes: int = 0
    reasons: tuple[str, ...] = ()
    """One sentence each for context, slots and location."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A place, its memory, and the limits that apply there."""

    location: Location
    device_bytes: int
    host_bytes: int | None
    words: str
    """The memory as part of a sentence."""

    @property
    def slot_steps(self) -> tuple[int, ...]:
        """Numbers of slots to try, highest first."""
        return HOST_SLOT_STEPS if self.location is Location.HOST else SLOT_STEPS

    @property
    def max_context_tokens(self) -> int:
        """Longest context that is chosen here."""
        return MAX_HOST_CONTEXT_TOKENS if self.location is Location.HOST else MAX_CHOSEN_CONTEXT_TOKENS

    @property
    def budget_bytes(self) -> int | None:
        """Memory limit of the whole model if it is in one place."""
        return self.host_bytes if self.location is Location.HOST else self.device_bytes


@dataclass(frozen=True, slots=True)
class _Fit:
    """A size that fits a room."""

    room: _Room
    context_tokens: int
    slots: int
    gpu_layers: int = -1
    share: float = 1.0
    """Share of the memory left by the weights that its cache could take."""


def choose_size(model: SizedModel, memory: MachineMemory, asked: AskedSize | None = None) -> ChosenSize:
    """Returns the size of a load: on accelerators if it fits, else split, else in host memory.

    Raises INSUFFICIENT_MEMORY with the required and available memory, and the quantization that would fit.
    """
    asked = asked or AskedSize()
    fit = next(_fits(model, memory, asked), None)
    if fit is None:
        raise _too_large(model, memory, asked)
    settings = _settings(model, fit.context_tokens, fit.slots)
    whole = _need(model, settings)
    on_devices = 0 if fit.room.location is Location.HOST else _need(model, replace(settings, gpu_layers=fit.gpu_layers))
    return ChosenSize(
        context_tokens=fit.context_tokens,
        slots=fit.slots,
        location=fit.room.location,
        gpu_layers=0 if fit.room.location is Location.HOST else fit.gpu_layers,
        device_bytes=on_devices,
        host_bytes=0 if fit.room.location is Location.ACCELERATORS else whole - on_devices,
        reasons=(
            _context_reason(model, asked, fit),
            _slots_reason(model, asked, fit),
            _place_reason(model, memory, fit),
        ),
    )


def _fits(model: SizedModel, memory: MachineMemory, asked: AskedSize) -> Iterator[_Fit]:
    """Yields the sizes that fit, best first."""
    rooms = _rooms(memory)
    for room in rooms:
        yield from _good_fits(model, room, asked)
    for room in rooms[-1:]:
        yield from _least_fits(model, room, asked)
    if rooms and model.locations.in_layers:
        yield from _split_fits(model, rooms[-1], memory, asked)
    if model.locations.on_host:
        host = _host_room(memory)
        yield from _good_fits(model, host, asked)
        yield from _least_fits(model, host, asked)


def _rooms(memory: MachineMemory) -> list[_Room]:
    """Returns the accelerator rooms: the largest device alone, which is faster than several, then all together."""
    largest, everything = memory.largest_device_bytes, memory.all_devices_bytes
    if not largest:
        return []
    name = max(memory.devices, key=lambda device: device.grantable_bytes).name
    alone = _Room(location=Location.ACCELERATORS, device_bytes=largest, host_bytes=None, words=_of(largest, name))
    if everything == largest:
        return [alone]
    words = _of(everything, f"{len(memory.devices)} accelerators")
    return [alone, replace(alone, device_bytes=everything, words=words)]


def _host_room(memory: MachineMemory) -> _Room:
    words = "the host's memory, whose size is unknown"
    if memory.host_bytes is not None:
        words = _of(memory.host_bytes, "the host's memory")
    return _Room(location=Location.HOST, device_bytes=0, host_bytes=memory.host_bytes, words=words)


def _good_fits(model: SizedModel, room: _Room, asked: AskedSize) -> Iterator[_Fit]:
    """Yields sizes with a good context: most slots first within CACHE_SHARE, then one slot with all the memory."""
    good = _good_context(model, room, asked)
    for slots in _slot_steps(model, room, asked):
        context = _context_within(model, room, asked, slots, CACHE_SHARE)
        if context >= good:
            yield _Fit(room, context, slots, share=CACHE_SHARE)
    slots = _slot_steps(model, room, asked)[-1]
    if _context_within(model, room, asked, slots, 1.0) >= good:
        yield _Fit(room, good, slots)


def _least_fits(model: SizedModel, room: _Room, asked: AskedSize) -> Iterator[_Fit]:
    """Yields the size with the longest context that fits at all, with as few slots as possible."""
    slots = _slot_steps(model, room, asked)[-1]
    context = _context_within(model, room, asked, slots, 1.0)
    if context >= min(MIN_CHOSEN_CONTEXT_TOKENS, _wanted_context(model, room, asked)):
        yield _Fit(room, context, slots)


def _split_fits(model: SizedModel, devices: _Room, memory: MachineMemory, asked: AskedSize) -> Iterator[_Fit]:
    """Yields the size with the most layers on accelerators, for a good context, else for the shortest one."""
    shape = model.known.shape
    if shape is None:
        return
    room = replace(devices, location=Location.SPLIT, host_bytes=memory.host_bytes)
    slots = _slot_steps(model, room, asked)[-1]
    good = _good_context(model, room, asked)
    for tokens in (good, min(good, MIN_CHOSEN_CONTEXT_TOKENS) if asked.context_tokens is None else good):
        settings = _settings(model, tokens, slots)
        whole = _need(model, settings)
        for layers in range(shape.layers, 0, -1):
            on_devices = _need(model, replace(settings, gpu_layers=layers))
            has_room = memory.host_bytes is None or whole - on_devices <= memory.host_bytes
            if on_devices <= room.device_bytes and has_room:
                yield _Fit(room, tokens, slots, layers)
                break


def _slot_steps(model: SizedModel, room: _Room, asked: AskedSize) -> tuple[int, ...]:
    if asked.slots is not None:
        return (asked.slots,)
    # Without a header, the memory of another slot is unknown.
    return (1,) if model.known.shape is None else room.slot_steps


def _wanted_context(model: SizedModel, room: _Room, asked: AskedSize) -> int:
    """Returns the context if memory were unlimited."""
    if asked.context_tokens is not None:
        return asked.context_tokens
    trained = model.trained_context_tokens or UNTRAINED_CONTEXT_TOKENS
    if model.known.shape is None:
        trained = min(trained, UNTRAINED_CONTEXT_TOKENS)
    return min(trained, room.max_context_tokens)


def _good_context(model: SizedModel, room: _Room, asked: AskedSize) -> int:
    """Returns the context that is good enough; a requested one is never shortened."""
    wanted = _wanted_context(model, room, asked)
    return wanted if asked.context_tokens is not None else min(GOOD_CONTEXT_TOKENS, wanted)


def _context_within(model: SizedModel, room: _Room, asked: AskedSize, slots: int, share: float) -> int:
    """Returns the longest context, up to the wanted one, with which the model fits a room; 0: it does not fit.

    `share` is the share of the memory left by the weights that its cache may take.
    """
    wanted, budget = _wanted_context(model, room, asked), room.budget_bytes
    if budget is None:
        return wanted
    if model.known.shape is None:
        return wanted if _need(model, _settings(model, wanted, slots)) <= budget else 0
    least = _settings(model, CONTEXT_STEP, slots)
    bare = _need(model, least)
    fits = largest_context(model.known, least, bare + int((budget - bare) * share)) if bare <= budget else 0
    if fits >= wanted:
        return wanted
    if asked.context_tokens is not None:
        return 0
    return fits - fits % ROUND_CONTEXT_TOKENS if fits > ROUND_CONTEXT_TOKENS else fits


def _settings(model: SizedModel, context_tokens: int, slots: int) -> MemorySettings:
    return settings_for(context_tokens, slots, {}, model.habits)


def _need(model: SizedModel, settings: MemorySettings) -> int:
    """Returns the estimated memory; 0 if it cannot be estimated."""
    found = estimate_memory(model.known, settings)
    return 0 if found is None else found.bytes


def _context_reason(model: SizedModel, asked: AskedSize, fit: _Fit) -> str:
    trained, context = model.trained_context_tokens, fit.context_tokens
    if asked.context_tokens is not None:
        beyond = f"; the model was trained for {trained}" if 0 < trained < context else ""
        return f"context {context}: as requested{beyond}"
    of = f" of {trained}" if trained > context else ""
    if model.known.shape is None:
        return f"context {context}{of}: the size of its KV cache is not in the file's header"
    return f"context {context}{of}: {_context_bound(model, asked, fit)}"


def _context_bound(model: SizedModel, asked: AskedSize, fit: _Fit) -> str:
    """Returns what limits a context that was not requested."""
    cache, trained = _cache_words(model, fit), model.trained_context_tokens
    if fit.context_tokens == trained:
        return f"the full training context; {cache}"
    if fit.room.location is Location.SPLIT:
        return f"{cache}; a longer one would leave fewer layers on accelerators"
    if fit.context_tokens < _wanted_context(model, fit.room, asked):
        return f"{cache} {_memory_bound(model, fit)}"
    if not trained:
        return f"the file does not state the training context; {cache}"
    return f"the longest default {_where(fit)}; {cache}"


def _where(fit: _Fit) -> str:
    return "on processors" if fit.room.location is Location.HOST else "on accelerators"


def _cache_words(model: SizedModel, fit: _Fit) -> str:
    if model.known.shape is None:
        return ""
    size = context_bytes(model.known.shape, _settings(model, fit.context_tokens, fit.slots))
    return f"{size_words(size)} of KV cache"


def _memory_bound(model: SizedModel, fit: _Fit) -> str:
    shape = model.known.shape
    weights = f"{size_words(0 if shape is None else shape.weight_bytes)} of weights"
    if fit.share < 1.0:
        return f"are at most half of what {weights} leave of {fit.room.words}"
    return f"fit beside {weights} in {fit.room.words}"


def _slots_reason(model: SizedModel, asked: AskedSize, fit: _Fit) -> str:
    slots = _slot_words(fit.slots)
    if asked.slots is not None:
        return f"{slots}: as requested"
    if model.known.shape is None:
        return f"{slots}: the memory of more slots is not in the file's header"
    usual = fit.room.slot_steps[0]
    if fit.slots == usual:
        where = "on processors" if fit.room.location is Location.HOST else "on accelerators"
        return f"{slots}: the default number {where}"
    if fit.room.location is Location.SPLIT:
        return f"{slots}: more would leave fewer layers on accelerators"
    return f"{slots}: with more, each would have a context of less than {GOOD_CONTEXT_TOKENS} tokens"


def _slot_words(slots: int) -> str:
    return "1 slot" if slots == 1 else f"{slots} slots"


def _place_reason(model: SizedModel, memory: MachineMemory, fit: _Fit) -> str:
    settings = _settings(model, fit.context_tokens, fit.slots)
    whole = _need(model, settings)
    needs = f"about {size_words(whole)}" if whole else "an unknown amount of memory"
    match fit.room.location:
        case Location.ACCELERATORS:
            return f"all layers on accelerators: {needs} in {fit.room.words}"
        case Location.SPLIT:
            layers = 0 if model.known.shape is None else model.known.shape.layers
            on_devices = _need(model, replace(settings, gpu_layers=fit.gpu_layers))
            return (
                f"{fit.gpu_layers} of {layers} layers on accelerators: {size_words(on_devices)} in {fit.room.words}; "
                f"the other {size_words(whole - on_devices)} are in the host's memory"
            )
        case Location.HOST:
            return f"in the host's memory{_why_host(memory)}: {needs} in {fit.room.words}"


def _why_host(memory: MachineMemory) -> str:
    there_is = memory.all_devices_bytes
    return f", since accelerators have {size_words(there_is)}" if there_is else ", without an accelerator"


def _of(size: int, where: str) -> str:
    return f"{size_words(size)} of {where}"


def _too_large(model: SizedModel, memory: MachineMemory, asked: AskedSize) -> WeftError:
    """Returns the error for a model that fits nowhere."""
    room = _largest_room(model, memory)
    context = min(MIN_CHOSEN_CONTEXT_TOKENS, _wanted_context(model, room, AskedSize()))
    least = _settings(model, asked.context_tokens or context, asked.slots or 1)
    found = estimate_memory(model.known, least)
    need = 0 if found is None else found.bytes
    parts = "" if found is None else _parts(found)
    size = f"{least.slots} x {least.context_tokens} tokens{parts}"
    lack = f"{model.known.name} needs {size_words(need)} for {size}; available: {_there_is(model, memory)}"
    there_are = _bytes_there(model, memory)
    return WeftError(
        Reason.INSUFFICIENT_MEMORY,
        "; ".join([lack, *_what_fits(model, memory, asked)]),
        metadata={"model": model.known.name, "needed_bytes": str(need), "memory_bytes": str(there_are)},
    )


def _largest_room(model: SizedModel, memory: MachineMemory) -> _Room:
    rooms = _rooms(memory)
    return rooms[-1] if rooms and not model.locations.on_host else _host_room(memory)


def _bytes_there(model: SizedModel, memory: MachineMemory) -> int:
    """Returns the maximum memory that one load of the model could get."""
    host = (memory.host_bytes or 0) if model.locations.on_host else 0
    both = model.locations.in_layers and bool(host)
    return memory.all_devices_bytes + host if both else max(memory.all_devices_bytes, host)


def _there_is(model: SizedModel, memory: MachineMemory) -> str:
    devices = f"{size_words(memory.all_devices_bytes)} on accelerators" if memory.devices else "no accelerators"
    if not model.locations.on_host:
        return f"{devices}, which its engine needs"
    return f"{size_words(memory.host_bytes or 0)} in the host's memory, {devices}"


def _parts(found: MemoryEstimate) -> str:
    parts = ", ".join(f"{part.name} {size_words(part.bytes)}" for part in found.parts if part.bytes)
    return f" ({parts})" if parts else ""


def _what_fits(model: SizedModel, memory: MachineMemory, asked: AskedSize) -> list[str]:
    """Returns alternatives: a smaller size than requested, else a smaller quantization."""
    if asked != AskedSize():
        smaller = next(_fits(model, memory, AskedSize()), None)
        if smaller is not None:
            return [f"a context of {smaller.context_tokens} tokens in {_slot_words(smaller.slots)} fits"]
    fitting = largest_fitting(model, memory)
    if fitting is not None:
        return [f"{fitting.source} ({size_words(fitting.file_bytes)}) would fit"]
    return ["none of its smaller quantizations fits either"] if model.variants else []


def require_memory_for(weights: Variant, most_bytes: int, variants: Sequence[Variant]) -> None:
    """Raises INSUFFICIENT_MEMORY if the weights alone exceed all memory, so that the model is not even pulled.

    `variants` are all quantizations in its repository; the error names the largest one that fits.
    """
    if weights.file_bytes <= most_bytes:
        return
    smaller = [variant for variant in variants if variant.file_bytes * SIZE_FACTORS[FileKind.GGUF] <= most_bytes]
    fitting = max(smaller, key=lambda variant: variant.file_bytes, default=None)
    lack = (
        f"{weights.source} needs {size_words(weights.file_bytes)} for its weights alone; available: "
        f"{size_words(most_bytes)} on accelerators and in the host's memory together"
    )
    raise WeftError(Reason.INSUFFICIENT_MEMORY, f"{lack}; {_would_fit(fitting, has_others=len(variants) > 1)}")


def _would_fit(fitting: Variant | None, *, has_others: bool) -> str:
    if fitting is not None:
        return f"{fitting.source} ({size_words(fitting.file_bytes)}) would fit"
    return "none of its quantizations fits" if has_others else "nothing was pulled"


def largest_fitting(model: SizedModel, memory: MachineMemory) -> Variant | None:
    """Returns the largest other quantization that fits; None: none fits or is known."""
    for variant in sorted(model.variants, key=lambda each: -each.file_bytes):
        if next(_fits(with_weights(model, variant.file_bytes), memory, AskedSize()), None) is not None:
            return variant
    return None


def with_weights(model: SizedModel, file_bytes: int) -> SizedModel:
    """Returns the model with weights of another size."""
    known = model.known
    shape = None if known.shape is None else replace(known.shape, weight_bytes=file_bytes)
    return replace(model, known=replace(known, shape=shape, file_bytes=file_bytes))
