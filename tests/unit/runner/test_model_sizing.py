"""The size of a model that nobody configured: context, slots and place follow from its file and the memory there is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.policy.memory_estimate import (
    GIBIBYTE,
    MEBIBYTE,
    FileKind,
    KnownModel,
    ModelShape,
    estimate_memory,
    settings_for,
)
from runner_svc.policy.model_sizing import (
    GOOD_CONTEXT_TOKENS,
    MAX_CHOSEN_CONTEXT_TOKENS,
    MAX_HOST_CONTEXT_TOKENS,
    MIN_CHOSEN_CONTEXT_TOKENS,
    AskedSize,
    ChosenSize,
    DeviceMemory,
    EngineLocations,
    Location,
    MachineMemory,
    SizedModel,
    Variant,
    choose_size,
    require_memory_for,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

# Qwen3-8B at Q4_K_M: 36 layers, 8 heads of keys and values of 128 numbers: 144 KiB of cache per token.
EIGHT_B = SizedModel(
    known=KnownModel(
        name="hf:Qwen/Qwen3-8B-GGUF:Q4_K_M",
        shape=ModelShape(
            weight_bytes=5_027_000_000,
            keys_per_token=36 * 8 * 128,
            values_per_token=36 * 8 * 128,
            layers=36,
            heads=32,
            embedding_length=4096,
            vocabulary=151_936,
        ),
        file_bytes=5_027_783_488,
        file_kind=FileKind.GGUF,
    ),
    trained_context_tokens=40_960,
)
SMALL = replace(
    EIGHT_B,
    known=KnownModel(
        name="smollm2-135m",
        shape=ModelShape(
            weight_bytes=96_576_768,
            keys_per_token=30 * 3 * 64,
            values_per_token=30 * 3 * 64,
            layers=30,
            heads=9,
            embedding_length=576,
            vocabulary=49_152,
        ),
        file_bytes=100 * MEBIBYTE,
        file_kind=FileKind.GGUF,
    ),
    trained_context_tokens=8_192,
)


def machine(*gpus: float, host: float | None = 30, reserve: float = 0.5) -> MachineMemory:
    """Returns a machine by the GiB of its accelerators and of its host."""
    return MachineMemory(
        devices=tuple(
            DeviceMemory(name=f"GPU {index}", total_bytes=int(gib * GIBIBYTE), reserved_bytes=int(reserve * GIBIBYTE))
            for index, gib in enumerate(gpus)
        ),
        host_bytes=None if host is None else int(host * GIBIBYTE),
    )


@pytest.mark.parametrize(
    ("model", "memory", "expected"),
    [
        # Small enough for anything: all that it was trained for.
        (SMALL, machine(24), (8192, 4, Location.ACCELERATORS, -1)),
        (SMALL, machine(), (8192, 2, Location.HOST, 0)),
        (SMALL, machine(host=None), (8192, 2, Location.HOST, 0)),
        # The cap, four slots, in less than half of the memory beside the weights.
        (EIGHT_B, machine(80), (MAX_CHOSEN_CONTEXT_TOKENS, 4, Location.ACCELERATORS, -1)),
        # Half of what the weights leave bounds the context.
        (EIGHT_B, machine(24), (16_384, 4, Location.ACCELERATORS, -1)),
        # Fewer slots before a context that is not good.
        (EIGHT_B, machine(12), (11_264, 2, Location.ACCELERATORS, -1)),
        # The whole of the memory before a context that is not good.
        (EIGHT_B, machine(7.5), (8_192, 1, Location.ACCELERATORS, -1)),
        # A short context before a part of it computes on processors.
        (EIGHT_B, machine(6.5), (6_144, 1, Location.ACCELERATORS, -1)),
        # What one device cannot take is spread over two.
        (EIGHT_B, machine(4, 4), (8_192, 1, Location.ACCELERATORS, -1)),
        # Then as many layers as fit.
        (EIGHT_B, machine(4), (8_192, 1, Location.SPLIT, 19)),
        # No layer at all fits.
        (EIGHT_B, machine(0.8), (8_192, 2, Location.HOST, 0)),
        (EIGHT_B, machine(host=8), (8_192, 1, Location.HOST, 0)),
        (EIGHT_B, machine(host=5.9), (6_144, 1, Location.HOST, 0)),
    ],
)
def test_size_is_derived_from_model_and_memory(
    model: SizedModel, memory: MachineMemory, expected: tuple[int, int, Location, int]
) -> None:
    chosen = choose_size(model, memory)
    assert (chosen.context_tokens, chosen.slots, chosen.location, chosen.gpu_layers) == expected
    require_within(chosen, model, memory)


def require_within(chosen: ChosenSize, model: SizedModel, memory: MachineMemory) -> None:
    """The checker: what was chosen takes no more than there is, by the estimate of a load with these settings."""
    load = settings_for(chosen.context_tokens, chosen.slots, {}, model.habits)
    whole = estimate_memory(model.known, load)
    on_devices = estimate_memory(model.known, replace(load, gpu_layers=chosen.gpu_layers))
    assert whole is not None
    assert on_devices is not None
    assert chosen.device_bytes == on_devices.bytes
    assert on_devices.bytes <= memory.all_devices_bytes
    if memory.host_bytes is not None and chosen.location is not Location.ACCELERATORS:
        assert whole.bytes - on_devices.bytes <= memory.host_bytes
    if chosen.location is Location.ACCELERATORS:
        assert chosen.gpu_layers == -1


def size_or_refusal(model: SizedModel, memory: MachineMemory, asked: AskedSize) -> ChosenSize | WeftError:
    try:
        return choose_size(model, memory, asked)
    except WeftError as error:
        return error


SHAPES = st.builds(
    ModelShape,
    weight_bytes=st.integers(MEBIBYTE, 400 * GIBIBYTE),
    keys_per_token=st.integers(0, 200_000),
    values_per_token=st.integers(0, 200_000),
    layers=st.integers(1, 130),
    heads=st.integers(1, 128),
    embedding_length=st.integers(64, 16_384),
    vocabulary=st.integers(100, 260_000),
)
MODELS = st.builds(
    lambda shape, file_bytes, trained, projector, locations: SizedModel(
        known=KnownModel(
            name="any", shape=shape, file_bytes=file_bytes, file_kind=FileKind.GGUF, projector_bytes=projector
        ),
        trained_context_tokens=trained,
        locations=locations,
    ),
    st.none() | SHAPES,
    st.integers(MEBIBYTE, 400 * GIBIBYTE),
    st.integers(0, 2_000_000),
    st.integers(0, 2 * GIBIBYTE),
    st.builds(EngineLocations, on_host=st.booleans(), in_layers=st.booleans()),
)
MACHINES = st.builds(
    lambda gpus, host, reserve: machine(*gpus, host=host, reserve=reserve),
    st.lists(st.floats(0.1, 200), max_size=4),
    st.none() | st.floats(0, 600),
    st.floats(0, 2),
)
ASKED = st.builds(
    AskedSize,
    context_tokens=st.none() | st.integers(16, 300_000),
    slots=st.none() | st.integers(1, 64),
)


@given(model=MODELS, memory=MACHINES, asked=ASKED)
def test_chosen_size_fits_and_keeps_requested_values(
    model: SizedModel, memory: MachineMemory, asked: AskedSize
) -> None:
    chosen = size_or_refusal(model, memory, asked)
    if isinstance(chosen, WeftError):
        assert chosen.reason is Reason.INSUFFICIENT_MEMORY
        return
    require_within(chosen, model, memory)
    assert asked.context_tokens in (None, chosen.context_tokens)
    assert asked.slots in (None, chosen.slots)
    assert chosen.context_tokens <= (asked.context_tokens or MAX_CHOSEN_CONTEXT_TOKENS)
    assert chosen.location is not Location.HOST or model.locations.on_host
    assert chosen.location is not Location.SPLIT or model.locations.in_layers
    assert len(chosen.reasons) == 3


@pytest.mark.parametrize(
    ("memory", "sentences"),
    [
        (
            machine(80),
            (
                "context 32768 of 40960: the longest default on accelerators; 18 GiB of KV cache",
                "4 slots: the default number on accelerators",
                "all layers on accelerators: about 23.1 GiB in 79.5 GiB of GPU 0",
            ),
        ),
        (
            machine(12),
            (
                (
                    "context 11264 of 40960: 3.1 GiB of KV cache are at most half of what 4.7 GiB of weights leave of "
                    "11.5 GiB of GPU 0"
                ),
                "2 slots: with more, each would have a context of less than 8192 tokens",
                "all layers on accelerators: about 8.1 GiB in 11.5 GiB of GPU 0",
            ),
        ),
        (
            machine(6.5),
            (
                "context 6144 of 40960: 864 MiB of KV cache fit beside 4.7 GiB of weights in 6 GiB of GPU 0",
                "1 slot: with more, each would have a context of less than 8192 tokens",
                "all layers on accelerators: about 5.9 GiB in 6 GiB of GPU 0",
            ),
        ),
        (
            machine(4),
            (
                "context 8192 of 40960: 1.1 GiB of KV cache; a longer one would leave fewer layers on accelerators",
                "1 slot: more would leave fewer layers on accelerators",
                (
                    "19 of 36 layers on accelerators: 3.3 GiB in 3.5 GiB of GPU 0; the other 2.8 GiB are in the host's "
                    "memory"
                ),
            ),
        ),
        (
            machine(),
            (
                "context 8192 of 40960: the longest default on processors; 2.2 GiB of KV cache",
                "2 slots: the default number on processors",
                "in the host's memory, without an accelerator: about 7.3 GiB in 30 GiB of the host's memory",
            ),
        ),
    ],
)
def test_each_choice_has_an_explanation(memory: MachineMemory, sentences: tuple[str, ...]) -> None:
    assert choose_size(EIGHT_B, memory).reasons == sentences


def test_requested_size_is_used_and_a_context_beyond_training_is_reported() -> None:
    chosen = choose_size(SMALL, machine(24), AskedSize(context_tokens=16_384, slots=3))
    assert (chosen.context_tokens, chosen.slots) == (16_384, 3)
    assert chosen.reasons[:2] == (
        "context 16384: as requested; the model was trained for 8192",
        "3 slots: as requested",
    )


def test_model_without_a_header_gets_one_slot_and_a_short_context() -> None:
    blind = replace(EIGHT_B, known=replace(EIGHT_B.known, shape=None))
    chosen = choose_size(blind, machine(24))
    assert (chosen.context_tokens, chosen.slots, chosen.location) == (4096, 1, Location.ACCELERATORS)
    assert chosen.reasons[0] == "context 4096 of 40960: the size of its KV cache is not in the file's header"


def test_accelerator_only_engine_is_not_placed_on_cpu() -> None:
    for_gpus = replace(EIGHT_B, locations=EngineLocations(on_host=False, in_layers=False))
    with pytest.raises(WeftError, match=r"available: no accelerators, which its engine needs"):
        choose_size(for_gpus, machine())
    with pytest.raises(WeftError, match=r"available: 2.5 GiB on accelerators, which its engine needs"):
        choose_size(for_gpus, machine(3))


def test_model_that_fits_nowhere_is_refused_with_its_needs_and_a_fitting_quantization() -> None:
    known = replace(
        EIGHT_B,
        variants=(
            Variant(source="hf:Qwen/Qwen3-8B-GGUF:Q8_0", file_bytes=8 * GIBIBYTE),
            Variant(source="hf:Qwen/Qwen3-8B-GGUF:Q3_K_M", file_bytes=4 * GIBIBYTE),
            Variant(source="hf:Qwen/Qwen3-8B-GGUF:Q2_K", file_bytes=3 * GIBIBYTE),
        ),
    )
    with fails(Reason.INSUFFICIENT_MEMORY) as refused:
        choose_size(known, machine(host=4))
    assert refused.value.message == (
        "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M needs 5.3 GiB for 1 x 2048 tokens (weights 4.7 GiB, context 288 MiB, "
        "compute 365 MiB); available: 4 GiB in the host's memory, no accelerators; "
        "hf:Qwen/Qwen3-8B-GGUF:Q2_K (3 GiB) would fit"
    )
    assert refused.value.metadata["memory_bytes"] == str(4 * GIBIBYTE)
    with pytest.raises(WeftError, match="none of its smaller quantizations fits either"):
        choose_size(known, machine(host=1))


def test_requested_size_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(WeftError, match=r"; a context of 6144 tokens in 1 slot fits$"):
        choose_size(EIGHT_B, machine(6.5, host=1), AskedSize(context_tokens=40_000))


def test_cpu_context_is_shorter_than_on_accelerators_but_usable() -> None:
    on_host = choose_size(EIGHT_B, machine(host=600))
    assert on_host.context_tokens == MAX_HOST_CONTEXT_TOKENS
    for gib in range(55, 120):
        context = choose_size(EIGHT_B, machine(host=gib / 10)).context_tokens
        assert MIN_CHOSEN_CONTEXT_TOKENS <= context <= GOOD_CONTEXT_TOKENS


def test_weights_larger_than_all_memory_are_refused_before_the_pull() -> None:
    variants = [
        Variant(source=f"hf:acme/big:{name}", file_bytes=gib * GIBIBYTE)
        for name, gib in (("Q8_0", 34), ("Q4_K_M", 18), ("Q2_K", 12), ("IQ1_M", 7))
    ]
    require_memory_for(variants[1], 18 * GIBIBYTE, variants)
    with fails(Reason.INSUFFICIENT_MEMORY) as refused:
        require_memory_for(variants[1], 14 * GIBIBYTE, variants)
    assert refused.value.message == (
        "hf:acme/big:Q4_K_M needs 18 GiB for its weights alone; available: 14 GiB on accelerators and in the host's "
        "memory together; hf:acme/big:Q2_K (12 GiB) would fit"
    )
    with pytest.raises(WeftError, match=r"; none of its quantizations fits$"):
        require_memory_for(variants[1], 2 * GIBIBYTE, variants)
    with pytest.raises(WeftError, match=r"; nothing was pulled$"):
        require_memory_for(variants[1], 2 * GIBIBYTE, ())


def test_total_memory_is_the_sum_of_devices_and_host_if_known() -> None:
    assert machine(4, 8, host=16, reserve=1).most_bytes == 26 * GIBIBYTE
    assert machine(4, host=None).most_bytes is None
