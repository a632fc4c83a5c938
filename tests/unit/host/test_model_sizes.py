"""The size of a model that is asked for by its source: from the header of its file and the memory of the machine."""

from runner_svc.model_store.found import FoundFiles
from runner_svc.policy.memory_estimate import GIBIBYTE
from runner_svc.policy.model_sizing import AskedSize, DeviceMemory, EngineLocations, MachineMemory
from runner_svc.runtimes.table import require_runtime, usable_names
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.kernel.models.model_source import parse_source
from weft_app.compose.demo import demo_model_path
from weft_app.compose.model_sizes import asked_size, size_by_memory

HOST = MachineMemory(host_bytes=16 * GIBIBYTE)


Sized = tuple[added_model_pb2.ModelSizing, tuple[str, ...]]


async def sized(memory: MachineMemory, **parameters: int) -> Sized:
    options = load_pb2.LoadOptions()
    for name, value in parameters.items():
        options.parameters[name].integer = value
    source, files = parse_source("hf:acme/smol", "source"), FoundFiles(path=demo_model_path())
    return await size_by_memory(source, files, require_runtime("llama_server"), memory, options)


async def test_demo_model_gets_its_full_context_and_the_cpu_slot_count() -> None:
    sizing, reasons = await sized(HOST)
    assert sizing == added_model_pb2.ModelSizing(context_tokens=8192, slots=2)
    assert reasons[:2] == (
        "context 8192: the full training context; 360 MiB of KV cache",
        "2 slots: the default number on processors",
    )


async def test_gpu_layers_are_set_only_if_they_differ_from_the_engine_default() -> None:
    def card(mebibytes: int) -> MachineMemory:
        return MachineMemory(
            devices=(DeviceMemory(name="card", total_bytes=mebibytes * 1024**2),), host_bytes=16 * GIBIBYTE
        )

    assert not (await sized(card(8192)))[0].HasField("gpu_layers"), "as many as there are"
    assert (await sized(card(220)))[0].gpu_layers > 0, "some of them"
    host = (await sized(card(16)))[0]
    assert (host.HasField("gpu_layers"), host.gpu_layers) == (True, 0)


async def test_requested_load_size_is_used() -> None:
    sizing, _ = await sized(HOST, context_tokens=1024, slots=3)
    assert (sizing.context_tokens, sizing.slots) == (1024, 3)
    assert asked_size(load_pb2.LoadOptions()) == AskedSize()


def test_gguf_only_engines_compute_in_layers_and_exllamav3_on_accelerators_only() -> None:
    places = {name: require_runtime(name).locations for name in usable_names() if require_runtime(name).formats}
    assert places["llama_server"] == EngineLocations()
    assert {name for name, place in places.items() if place.in_layers} == {"llama_server", "llama_cpp_python"}
    assert {name for name, place in places.items() if not place.on_host} == {"exllamav3"}
