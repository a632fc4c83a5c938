"""Workflows: what is refused at apply, what a request sets, and the filled graph."""

import copy
import json
from typing import Any

import pytest

from weft.api.common.v1 import chat_pb2, image_pb2, workflow_pb2
from weft.dispatch.workflow_graph import (
    MAX_NODES,
    expected_steps,
    filled_graph,
    first_seed,
    input_values,
    to_canonical_workflow,
    with_seed,
)
from weft.documents.reader import read_message
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.text.json_objects import to_json_object

GRAPH: dict[str, Any] = {
    "3": {"class_type": "KSampler", "inputs": {"seed": 7, "steps": 4, "cfg": 7.0, "name": "euler", "model": ["4", 0]}},
    "4": {"class_type": "Loader", "inputs": {"text": "a hill", "width": 64, "height": 64, "image": "x.png"}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "ComfyUI"}},
}
PROMPT = {"name": "words", "type": "text", "node": "4", "input": "text", "source": "prompt"}
STEPS = {"name": "steps", "type": "integer", "node": "3", "input": "steps", "source": "steps", "maximum": 50}
SEED = {"name": "seed", "type": "seed", "node": "3", "input": "seed"}
SAMPLER = {"name": "sampler", "type": "choice", "node": "3", "input": "name", "choices": ["euler", "ddim"]}
IMAGE = {"name": "source", "type": "image", "node": "4", "input": "image"}
SIDES = [
    {"name": each, "type": "integer", "node": "4", "input": each, "source": each, "minimum": 16, "maximum": 512}
    for each in ("width", "height")
]


def workflow(*inputs: dict[str, Any], graph: Any = GRAPH, outputs: tuple[str, ...] = ("9",)) -> workflow_pb2.Workflow:
    document = {"graph": copy.deepcopy(graph), "inputs": list(inputs), "outputs": list(outputs)}
    return read_message(document, workflow_pb2.Workflow)


def canonical(*inputs: dict[str, Any]) -> workflow_pb2.Workflow:
    found = workflow(*inputs)
    to_canonical_workflow(found, "workflow")
    return found


def refused(found: workflow_pb2.Workflow) -> FieldError:
    with pytest.raises(FieldError) as caught:
        to_canonical_workflow(found, "workflow")
    return caught.value


def filled(found: workflow_pb2.Workflow, payload: image_pb2.ImagePayload) -> dict[str, Any]:
    return filled_graph(found, input_values(found, payload).values, lambda file: f"upload-{file.index}.png")


def test_workflow_sets_input_sources_and_compacts_its_json() -> None:
    found = canonical(SEED, IMAGE, SAMPLER)
    words = [workflow_pb2.WorkflowSource.Name(each.source) for each in found.inputs]
    assert words == ["WORKFLOW_SOURCE_SEED", "WORKFLOW_SOURCE_IMAGE", "WORKFLOW_SOURCE_EXTRA"]
    assert found.graph == json.dumps(GRAPH, separators=(",", ":"))
    again = canonical(SEED, IMAGE, SAMPLER)
    assert found == again


@pytest.mark.parametrize(
    ("inputs", "field", "words"),
    [
        ([PROMPT | {"node": "44"}], "inputs[0].node", "no node '44'"),
        ([PROMPT, PROMPT], "inputs[1].name", "earlier input"),
        ([PROMPT, PROMPT | {"name": "other"}], "inputs[1].source", "earlier input"),
        ([STEPS | {"type": "text"}], "inputs[0].source", "no source of an input of type text"),
        ([STEPS | {"minimum": 60}], "inputs[0].minimum", "at most maximum"),
        ([STEPS | {"maximum": 2.5}], "inputs[0].maximum", "whole number"),
        ([STEPS | {"default": 51}], "inputs[0].default", "from"),
        ([STEPS | {"default": 10**400}], "inputs[0].default", "number"),
        ([STEPS | {"default": "four"}], "inputs[0].default", "number"),
        ([SAMPLER | {"choices": []}], "inputs[0].choices", "must be set"),
        ([PROMPT | {"choices": ["a"]}], "inputs[0].choices", "no other"),
        ([SAMPLER | {"default": "x"}], "inputs[0].default", "one of: euler, ddim"),
        ([IMAGE | {"default": "a.png"}], "inputs[0].default", "has none"),
        ([SAMPLER | {"name": "model"}], "inputs[0].name", "field of every request"),
    ],
)
def test_invalid_input_error_names_its_field(inputs: list[dict[str, Any]], field: str, words: str) -> None:
    error = refused(workflow(*inputs))
    assert error.field == f"workflow.{field}"
    assert words in error.message


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ("[]", "object of nodes"),
        ("{", "must be JSON"),
        ('{"1": NaN}', "must be JSON"),
        ('{"1": {"class_type": "A", "inputs": {"x": 1e999}}}', "must be JSON"),
        ({"nodes": [], "links": []}, "Export (API)"),
        ({"1": {"class_type": "A", "inputs": []}}, "must be an object"),
        ('{"1": []}', "must be an object"),
        ({str(number): {"class_type": "A"} for number in range(MAX_NODES + 1)}, "at most 512 nodes"),
        ({"1": {"class_type": "A", "inputs": {"x": "y" * 300_000}}}, "bytes"),
    ],
)
def test_invalid_graph_is_refused(graph: Any, words: str) -> None:
    error = refused(workflow(graph=graph, outputs=("1",)))
    assert error.field == "workflow.graph"
    assert words in error.message


def test_deeply_nested_graph_is_refused() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = {"x": deep}
    assert (
        "nested" in refused(workflow(graph={"1": {"class_type": "A", "inputs": {"x": deep}}}, outputs=("1",))).message
    )


def test_output_that_is_not_a_node_is_refused() -> None:
    assert refused(workflow(outputs=("8",))).field == "workflow.outputs[0]"


def test_request_sets_its_inputs_and_keeps_the_rest_of_the_graph() -> None:
    found = canonical(PROMPT, STEPS, *SIDES, SEED, SAMPLER)
    extra = to_json_object({"sampler": "ddim"}, "extra")
    payload = image_pb2.ImagePayload(prompt="a sea", size="128x256", steps=9, seed=3, extra_parameters=extra)
    graph = filled(found, payload)
    assert graph["3"]["inputs"] == {"seed": 3, "steps": 9, "cfg": 7.0, "name": "ddim", "model": ["4", 0]}
    assert graph["4"]["inputs"] == {"text": "a sea", "width": 128, "height": 256, "image": "x.png"}
    assert json.loads(found.graph) == GRAPH, "the workflow itself is never changed"


def test_omitted_input_uses_its_default_or_the_graph_value() -> None:
    found = canonical(STEPS | {"default": 2}, SAMPLER)
    graph = filled(found, image_pb2.ImagePayload())
    assert (graph["3"]["inputs"]["steps"], graph["3"]["inputs"]["name"]) == (2, "euler")


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (image_pb2.ImagePayload(steps=51), "payload.steps"),
        (image_pb2.ImagePayload(size="8x64"), "payload.size"),
        (image_pb2.ImagePayload(size="wide"), "payload.size"),
        (image_pb2.ImagePayload(size="99999x1"), "payload.size"),
        (
            image_pb2.ImagePayload(extra_parameters=to_json_object({"sampler": "x"}, "x")),
            "payload.extra_parameters.sampler",
        ),
        (image_pb2.ImagePayload(images=[chat_pb2.MediaPart(data=b"x")]), "payload.images[0]"),
    ],
)
def test_out_of_range_value_error_names_its_field(payload: image_pb2.ImagePayload, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        input_values(canonical(PROMPT, STEPS, *SIDES, SAMPLER), payload, name="turbo")
    assert caught.value.field == field


def test_missing_image_or_required_input_is_refused() -> None:
    for found, field in ((canonical(IMAGE), "payload.images[0]"), (canonical(PROMPT | {"required": True}), "prompt")):
        with pytest.raises(FieldError, match="needs it") as caught:
            input_values(found, image_pb2.ImagePayload())
        assert field in caught.value.field


def test_images_are_used_in_order_and_mask_separately() -> None:
    graph = copy.deepcopy(GRAPH)
    graph["4"]["inputs"] |= {"second": "y.png", "mask": "z.png"}
    second = {"name": "second", "type": "image", "node": "4", "input": "second"}
    mask = {"name": "mask", "type": "mask", "node": "4", "input": "mask"}
    found = workflow(IMAGE, second, mask, graph=graph)
    to_canonical_workflow(found, "")
    part = chat_pb2.MediaPart(data=b"x")
    inputs = filled(found, image_pb2.ImagePayload(images=[part, part], mask=part))["4"]["inputs"]
    assert (inputs["image"], inputs["second"], inputs["mask"]) == ("upload-0.png", "upload-1.png", "upload--1.png")


def test_unused_fields_are_reported_as_ignored() -> None:
    extra = to_json_object({"lora": "x"}, "extra")
    values = input_values(canonical(PROMPT), image_pb2.ImagePayload(prompt="x", guidance=2.0, extra_parameters=extra))
    assert values.ignored == ("guidance", "lora")


def test_each_further_image_has_the_next_seed_within_range() -> None:
    found = canonical(SEED | {"minimum": 10, "maximum": 12})
    values = input_values(found, image_pb2.ImagePayload(seed=12))
    assert [first_seed(found, with_seed(found, values, index, 0)) for index in range(3)] == [12, 10, 11]


def test_unset_seed_uses_the_drawn_one() -> None:
    found = canonical(SEED)
    values = input_values(found, image_pb2.ImagePayload())
    assert values.seed_inputs == ("seed",)
    assert with_seed(found, values, 1, 41) == {"seed": 42}


def test_graph_steps_are_the_sum_of_all_its_samplers() -> None:
    graph = copy.deepcopy(GRAPH)
    graph["5"] = {"class_type": "KSampler", "inputs": {"steps": 6}}
    graph["6"] = {"class_type": "KSampler", "inputs": {"steps": ["5", 0]}}
    assert expected_steps(graph) == 10
