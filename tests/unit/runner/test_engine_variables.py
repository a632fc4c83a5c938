"""Engines get listed variables of the runner, and nothing that looks like a credential."""

import pytest

from runner_svc.policy.engine_variables import DEVICE_VARIABLES, passed_variables, withheld_variables
from runner_svc.runtimes.table import built_in

COMMON = ["PATH", "LC_ALL", "LD_LIBRARY_PATH", "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "TMPDIR", "HOME"]
COMMON += ["DO_NOT_TRACK"]
DEVICES = ["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "ZES_ENABLE_SYSMAN", "OMP_NUM_THREADS"]
ENGINES = ["VLLM_LOGGING_LEVEL", "HF_HOME", "SGLANG_X"]
OTHERS = ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "EXAMPLE_API_KEY", "PGPASSWORD", "KUBECONFIG"]
GIVEN = dict.fromkeys([*COMMON, *DEVICES, *ENGINES, *OTHERS], "x")


@pytest.mark.parametrize(
    ("listed", "own"),
    [
        ((), []),
        (DEVICE_VARIABLES, DEVICES),
        ((*DEVICE_VARIABLES, "VLLM_*", "HF_*"), [*DEVICES, "VLLM_LOGGING_LEVEL", "HF_HOME"]),
        (("HF_TOKEN", "VLLM_API_KEY"), []),
    ],
)
def test_engine_gets_common_and_listed_variables_but_no_credential(listed: tuple[str, ...], own: list[str]) -> None:
    assert list(passed_variables(GIVEN, listed)) == COMMON + own


def test_withheld_names_begin_with_those_of_credentials() -> None:
    withheld = withheld_variables(GIVEN, (*DEVICE_VARIABLES, "VLLM_*", "HF_*"))
    secret = ["AWS_SECRET_ACCESS_KEY", "EXAMPLE_API_KEY", "HF_TOKEN", "VLLM_API_KEY"]
    assert withheld == [*secret, "KUBECONFIG", "PGPASSWORD", "SGLANG_X"]


@pytest.mark.parametrize("runtime", [each for each in built_in() if each.starts_engines], ids=lambda each: each.name)
def test_no_runtime_lists_a_variable_of_another_program(runtime: object) -> None:
    passed = passed_variables(GIVEN, runtime.variables)  # type: ignore[attr-defined]  # a runtime
    assert not passed.keys() & {"EXAMPLE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "KUBECONFIG"}
    assert "CUDA_VISIBLE_DEVICES" in passed
