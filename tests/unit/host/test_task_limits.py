"""Every bound of durable tasks and batches has a name in the configuration file, with the same default."""

from dataclasses import asdict

import pytest

from gateway.config import BatchEdgeConfig
from router_svc.durable.batches.config import BatchLimits
from router_svc.durable.tasks.config import TaskLimits
from weft.dispatch.schema_guard import SchemaLimits
from weft_app.compose.gateway import gateway_config
from weft_app.compose.tasks import batch_limits, task_limits
from weft_app.config.config import RouterSection, WeftConfig


def test_a_file_that_says_nothing_means_the_routers_own_defaults() -> None:
    assert task_limits(RouterSection().tasks, SchemaLimits()) == TaskLimits()
    assert batch_limits(RouterSection().batches) == BatchLimits()


@pytest.mark.parametrize("name", sorted(asdict(TaskLimits()).keys() - {"schemas"}))
def test_what_the_file_says_of_tasks_arrives(name: str) -> None:
    default = asdict(TaskLimits())[name]
    other = default + 1
    said = RouterSection.model_validate({"tasks": {name: other}}).tasks
    assert asdict(task_limits(said, SchemaLimits()))[name] == other


@pytest.mark.parametrize("name", list(asdict(BatchLimits())))
def test_what_the_file_says_of_batches_arrives(name: str) -> None:
    default = asdict(BatchLimits())[name]
    other = default + 1
    said = RouterSection.model_validate({"batches": {name: other}}).batches
    assert asdict(batch_limits(said))[name] == other


@pytest.mark.parametrize("name", list(asdict(BatchEdgeConfig())))
def test_what_the_file_says_of_batches_at_the_edge_arrives(name: str) -> None:
    default = asdict(BatchEdgeConfig())[name]
    other = default + 1
    config = WeftConfig.model_validate({"gateway": {"batches": {name: other}}})
    assert asdict(gateway_config(WeftConfig()).batches)[name] == default
    assert asdict(gateway_config(config).batches)[name] == other
