"""Checks ComfyUI graphs and their inputs, and fills them with the values of a request. Pure."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weft.api.common.v1 import image_pb2
from weft.api.common.v1 import workflow_pb2 as pb
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.text.json_objects import plain_object

MAX_GRAPH_BYTES = 256 * 1024
MAX_NODES = 512
MAX_DEPTH = 32
"""Maximum nesting of values in a graph."""
MAX_SEED = 2**63 - 1
MAX_TEXT_CHARS = 32_000
"""Maximum characters of a text unless its input sets another limit."""
MAX_PIXELS_PER_SIDE = 16_384
_TEXT, _INTEGER, _NUMBER = pb.WORKFLOW_INPUT_TYPE_TEXT, pb.WORKFLOW_INPUT_TYPE_INTEGER, pb.WORKFLOW_INPUT_TYPE_NUMBER
_IMAGE, _MASK = pb.WORKFLOW_INPUT_TYPE_IMAGE, pb.WORKFLOW_INPUT_TYPE_MASK
_SEED, _CHOICE = pb.WORKFLOW_INPUT_TYPE_SEED, pb.WORKFLOW_INPUT_TYPE_CHOICE
_EXTRA = pb.WORKFLOW_SOURCE_EXTRA
_FILES = frozenset({_IMAGE, _MASK})
_RANGED = frozenset({_INTEGER, _NUMBER, _SEED})
_TYPES_OF_SOURCE: Mapping[int, frozenset[int]] = MappingProxyType(
    {
        _EXTRA: frozenset({_TEXT, _INTEGER, _NUMBER, _SEED, _CHOICE}),
        pb.WORKFLOW_SOURCE_PROMPT: frozenset({_TEXT}),
        pb.WORKFLOW_SOURCE_NEGATIVE_PROMPT: frozenset({_TEXT}),
        pb.WORKFLOW_SOURCE_WIDTH: frozenset({_INTEGER}),
        pb.WORKFLOW_SOURCE_HEIGHT: frozenset({_INTEGER}),
        pb.WORKFLOW_SOURCE_STEPS: frozenset({_INTEGER}),
        pb.WORKFLOW_SOURCE_GUIDANCE: frozenset({_NUMBER, _INTEGER}),
        pb.WORKFLOW_SOURCE_SEED: frozenset({_SEED}),
        pb.WORKFLOW_SOURCE_STRENGTH: frozenset({_NUMBER}),
        pb.WORKFLOW_SOURCE_IMAGE: frozenset({_IMAGE}),
        pb.WORKFLOW_SOURCE_MASK: frozenset({_MASK}),
    }
)
_SOURCE_OF_TYPE: Mapping[int, int] = MappingProxyType(
    {_IMAGE: pb.WORKFLOW_SOURCE_IMAGE, _MASK: pb.WORKFLOW_SOURCE_MASK, _SEED: pb.WORKFLOW_SOURCE_SEED}
)
_REPEATED = frozenset({_EXTRA, pb.WORKFLOW_SOURCE_IMAGE})
"""Sources that several inputs may have: extra parameters of different names, and images by position. Any other
field is a single input, to which all nodes that need it are connected."""
_KNOWN_FIELDS = frozenset(
    {"model", "n", "size", "quality", "response_format", "output_format", "stream", "user", "images", "style"}
) | frozenset(each.name for each in image_pb2.ImagePayload.DESCRIPTOR.fields)
"""Names that extra parameters cannot have."""

Graph = dict[str, Any]
FileOf = Callable[["InputFile"], str]
"""Returns the uploaded name of a request's file."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """An image or the mask of a request, as an input's value."""

    index: int
    """Position among the request's images; -1: the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputValues:
    """Values that a request sets for a workflow's inputs."""

    values: Mapping[str, Any]
    """Text, number or InputFile by input name. Missing inputs keep their value in the graph."""
    seed_inputs: tuple[str, ...] = ()
    """Seed inputs that the request leaves unset."""
    ignored: tuple[str, ...] = ()
    """Request fields that no input accepts."""
    files: tuple[InputFile, ...] = field(default=())


def to_canonical_workflow(workflow: pb.Workflow, where: str) -> None:
    """Converts a workflow to its stored form: sources are set, and JSON is compact.

    Raises INVALID_ARGUMENT naming the field below `where`, such as "inputs[2].node".
    """
    prefix = f"{where}." if where else ""
    graph = read_graph(workflow.graph, f"{prefix}graph")
    workflow.graph = _json(graph)
    names, sources = set[str](), set[int]()
    for index, each in enumerate(workflow.inputs):
        place = f"{prefix}inputs[{index}]"
        each.source = pb.WorkflowSource.ValueType(source_of(each))
        if each.name in names:
            raise invalid_field(f"{place}.name", f"must be another one than that of an earlier input: {each.name}")
        if each.source in sources and each.source not in _REPEATED:
            raise invalid_field(f"{place}.source", "is that of an earlier input; connect both nodes with one value")
        _check_input(each, graph, place)
        names.add(each.name)
        sources.add(each.source)
    for index, node in enumerate(workflow.outputs):
        if node not in graph:
            raise invalid_field(f"{prefix}outputs[{index}]", f"the graph has no node {node!r}; it has {_some(graph)}")


def source_of(each: pb.WorkflowInput) -> int:
    """Returns the request field that sets an input."""
    return each.source or _SOURCE_OF_TYPE.get(each.type, _EXTRA)


def read_graph(text: str, where: str) -> Graph:
    """Parses a graph. Raises INVALID_ARGUMENT naming `where` if inputs cannot be set in it."""
    if len(text.encode()) > MAX_GRAPH_BYTES:
        raise invalid_field(where, f"must have at most {MAX_GRAPH_BYTES} bytes")
    try:
        graph = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise invalid_field(where, "must be JSON") from None
    if not isinstance(graph, dict) or not graph:
        raise invalid_field(where, "must be an object of nodes by their ids")
    if isinstance(graph.get("nodes"), list):
        raise invalid_field(where, 'is a graph of ComfyUI\'s editor; export it with "Export (API)"')
    if len(graph) > MAX_NODES:
        raise invalid_field(where, f"must have at most {MAX_NODES} nodes; it has {len(graph)}")
    for name, node in graph.items():
        _check_node(name, node, where)
    return graph


def input_values(
    workflow: pb.Workflow, payload: image_pb2.ImagePayload, where: str = "payload", name: str = ""
) -> InputValues:
    """Returns the input values of a request. Raises INVALID_ARGUMENT naming the request field below `where`.

    `name` is the workflow's name for messages.
    """
    title = f"the workflow {name}" if name else "the workflow"
    given = _given(payload, where)
    values: dict[str, Any] = {}
    seeds: list[str] = []
    files: list[InputFile] = []
    image_count = 0
    for each in workflow.inputs:
        source = source_of(each)
        key = each.name if source == _EXTRA else _FIELD_OF_SOURCE[source]
        if each.type == _IMAGE:
            key, image_count = f"images[{image_count}]", image_count + 1
        place = f"{where}.{'extra_parameters.' if source == _EXTRA else ''}{_SIDES.get(source, key)}"
        found = given.pop((source, key), None)
        if found is not None:
            values[each.name] = _checked(each, found, place)
        elif each.type == _SEED and not each.default:
            seeds.append(each.name)
        elif each.required or each.type in _FILES:
            raise invalid_field(place, f"must be set: {title} needs it")
        elif each.default:
            values[each.name] = json.loads(each.default)
        if isinstance(values.get(each.name), InputFile):
            files.append(values[each.name])
    _refuse_files(given, title, where)
    return InputValues(
        values=values, seed_inputs=tuple(seeds), ignored=tuple(key for _, key in given), files=tuple(files)
    )


def filled_graph(workflow: pb.Workflow, values: Mapping[str, Any], file_of: FileOf) -> Graph:
    """Returns the graph of a checked workflow with these input values, by name."""
    graph: Graph = json.loads(workflow.graph)
    for each in workflow.inputs:
        if each.name in values:
            value = values[each.name]
            graph[each.node]["inputs"][each.input] = file_of(value) if isinstance(value, InputFile) else value
    return graph


def first_seed(workflow: pb.Workflow, values: Mapping[str, Any]) -> int | None:
    """Returns the seed of a filled workflow; None: it has no seed input."""
    found = (values.get(each.name) for each in workflow.inputs if each.type == _SEED)
    return next((seed for seed in found if isinstance(seed, int)), None)


def with_seed(workflow: pb.Workflow, values: InputValues, index: int, drawn: int) -> dict[str, Any]:
    """Returns the values for one of several images: the seed increases by 1 per image. `drawn` is for unset seeds."""
    seeded = dict(values.values)
    for each in workflow.inputs:
        if each.type != _SEED:
            continue
        first = drawn if each.name in values.seed_inputs else seeded.get(each.name)
        if isinstance(first, int):
            most = int(each.maximum) if each.HasField("maximum") else MAX_SEED
            least = int(each.minimum) if each.HasField("minimum") else 0
            seeded[each.name] = least + (first - least + index) % (most - least + 1)
    return seeded


def expected_steps(graph: Graph) -> int:
    """Returns the total steps of all nodes of a filled graph; 0: none specifies steps."""
    steps = (node["inputs"].get("steps") for node in graph.values())
    return sum(each for each in steps if isinstance(each, int) and not isinstance(each, bool) and 0 < each <= 10_000)


def _check_node(name: str, node: object, where: str) -> None:
    """Checks the form that inputs are set in. ComfyUI checks classes and connections when it gets the graph."""
    if not isinstance(node, dict) or not isinstance(node.setdefault("inputs", {}), dict):
        raise invalid_field(where, f"node {name[:64]!r} must be an object with inputs that are an object")
    if _depth(node) > MAX_DEPTH:
        raise invalid_field(where, f"node {name[:64]!r} is nested too deeply")


def _check_input(each: pb.WorkflowInput, graph: Graph, place: str) -> None:
    if each.type not in _TYPES_OF_SOURCE[each.source]:
        word = _word(pb.WorkflowSource.Name(each.source))
        raise invalid_field(f"{place}.source", f"{word} is no source of an input of type {_type_word(each)}")
    if each.source == _EXTRA and each.name in _KNOWN_FIELDS:
        raise invalid_field(
            f"{place}.name", f"{each.name} is a field of every request for images; set source, or take another name"
        )
    if each.node not in graph:
        raise invalid_field(f"{place}.node", f"the graph has no node {each.node!r}; it has {_some(graph)}")
    _check_limits(each, place)
    if each.default:
        _check_default(each, place)


def _check_limits(each: pb.WorkflowInput, place: str) -> None:
    if bool(each.choices) != (each.type == _CHOICE):
        raise invalid_field(f"{place}.choices", "must be set for an input of type choice, and for no other")
    for name in ("minimum", "maximum"):
        if not each.HasField(name):
            continue
        limit = getattr(each, name)
        if each.type not in _RANGED and not (name == "maximum" and each.type == _TEXT):
            raise invalid_field(f"{place}.{name}", f"an input of type {_type_word(each)} has none")
        whole = each.type != _NUMBER
        if not math.isfinite(limit) or (whole and not float(limit).is_integer()):
            raise invalid_field(f"{place}.{name}", "must be a whole number" if whole else "must be a number")
        if each.type == _SEED and not 0 <= limit <= MAX_SEED:
            raise invalid_field(f"{place}.{name}", f"must be from 0 to {MAX_SEED}")
    if each.HasField("minimum") and each.HasField("maximum") and each.minimum > each.maximum:
        raise invalid_field(f"{place}.minimum", "must be at most maximum")


def _check_default(each: pb.WorkflowInput, place: str) -> None:
    if each.type in _FILES:
        raise invalid_field(f"{place}.default", f"an input of type {_type_word(each)} has none")
    try:
        value = json.loads(each.default, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise invalid_field(f"{place}.default", "must be JSON") from None
    each.default = _json(_checked(each, value, f"{place}.default"))


_FIELD_OF_SOURCE: Mapping[int, str] = MappingProxyType(
    {number: _name.removeprefix("WORKFLOW_SOURCE_").lower() for _name, number in pb.WorkflowSource.items()}
)


def _given(payload: image_pb2.ImagePayload, where: str) -> dict[tuple[int, str], Any]:
    """Returns the values that a request sets, by source and name."""
    given: dict[tuple[int, str], Any] = {}
    for source, name in _FIELD_OF_SOURCE.items():
        if source in _PLAIN:
            value = getattr(payload, name) if name in _TEXTS or payload.HasField(name) else None  # type: ignore[arg-type]  # names of the table
            if value not in (None, ""):
                given[source, name] = value
    width, height = _size(payload.size, where)
    if width:
        given[pb.WORKFLOW_SOURCE_WIDTH, "width"] = width
        given[pb.WORKFLOW_SOURCE_HEIGHT, "height"] = height
    for index in range(len(payload.images)):
        given[pb.WORKFLOW_SOURCE_IMAGE, f"images[{index}]"] = InputFile(index)
    if payload.HasField("mask"):
        given[pb.WORKFLOW_SOURCE_MASK, "mask"] = InputFile(-1)
    for name, value in plain_object(payload.extra_parameters).items():
        given[_EXTRA, name] = value
    return given


_SIDES: Mapping[int, str] = MappingProxyType({pb.WORKFLOW_SOURCE_WIDTH: "size", pb.WORKFLOW_SOURCE_HEIGHT: "size"})
"""The request field that contains the side."""
_TEXTS = frozenset({"prompt", "negative_prompt"})
_PLAIN = frozenset(
    {
        pb.WORKFLOW_SOURCE_PROMPT,
        pb.WORKFLOW_SOURCE_NEGATIVE_PROMPT,
        pb.WORKFLOW_SOURCE_STEPS,
        pb.WORKFLOW_SOURCE_GUIDANCE,
        pb.WORKFLOW_SOURCE_SEED,
        pb.WORKFLOW_SOURCE_STRENGTH,
    }
)


def _size(text: str, where: str) -> tuple[int, int]:
    """Returns width and height in pixels; zeros: as in the workflow."""
    if not text or text == "auto":
        return 0, 0
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdigit() and len(side) <= 5 for side in sides):
        raise invalid_field(f"{where}.size", "must be WIDTHxHEIGHT in pixels, such as 1024x1024, or auto")
    width, height = (int(side) for side in sides)
    if not (0 < width <= MAX_PIXELS_PER_SIDE and 0 < height <= MAX_PIXELS_PER_SIDE):
        raise invalid_field(f"{where}.size", f"must have sides of 1 to {MAX_PIXELS_PER_SIDE} pixels")
    return width, height


def _refuse_files(given: Mapping[tuple[int, str], Any], title: str, where: str) -> None:
    """Raises for a file that no input accepts: ignoring it would give a misleading answer."""
    for (_, key), value in given.items():
        if isinstance(value, InputFile):
            raise invalid_field(
                f"{where}.{key}", f"{title} does not support {'masks' if value.index < 0 else 'such images'}"
            )


def _checked(each: pb.WorkflowInput, value: Any, place: str) -> Any:
    """Returns an input's validated value. Raises INVALID_ARGUMENT naming `place`."""
    if each.type in _FILES:
        return value
    if each.type == _CHOICE:
        if value not in each.choices:
            raise invalid_field(place, f"must be one of: {_some(each.choices)}")
        return value
    if each.type == _TEXT:
        most = int(each.maximum) if each.HasField("maximum") else MAX_TEXT_CHARS
        if not isinstance(value, str) or len(value) > most:
            raise invalid_field(place, f"must be a text of at most {most} characters")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise invalid_field(place, "must be a number")
    if each.type == _NUMBER:
        number: float = float(value)
    else:
        if not float(value).is_integer():
            raise invalid_field(place, "must be a whole number")
        number = int(value)
    least, most_of = _range(each)
    if not least <= number <= most_of:
        raise invalid_field(place, f"must be from {least:g} to {most_of:g}")
    return number


def _range(each: pb.WorkflowInput) -> tuple[float, float]:
    is_seed = each.type == _SEED
    least = each.minimum if each.HasField("minimum") else (0 if is_seed else -(2.0**53))
    most = each.maximum if each.HasField("maximum") else (MAX_SEED if is_seed else 2.0**53)
    return least, most


def _depth(value: object) -> int:
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH:
        deepest += 1
        level = [item for each in level for item in _items(each)]
    return deepest


def _items(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number beyond the range of a double")
    return number


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _some(names: Mapping[str, object] | Sequence[str]) -> str:
    """Returns some of the names for a message."""
    shown = [str(name)[:64] for name in list(names)[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if shown else "none"


def _word(name: str) -> str:
    return name.removeprefix("WORKFLOW_SOURCE_").removeprefix("WORKFLOW_INPUT_TYPE_").lower()


def _type_word(each: pb.WorkflowInput) -> str:
    return _word(pb.WorkflowInputType.Name(each.type))
