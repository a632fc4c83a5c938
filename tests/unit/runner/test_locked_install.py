"""pip's output becomes progress, and the reason of a failure; the lock files hold what the environments promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from runner_svc.environments import locked_install
from runner_svc.environments.environment import EngineEnvironment, Variant, VariantChoice, choose_variant
from runner_svc.environments.installed_environments import lock_digest
from runner_svc.environments.locked_install import (
    MAX_KEPT_LINES,
    MAX_LINE_CHARS,
    Failure,
    PipOutput,
    package_count,
    pip_arguments,
)
from runner_svc.runtimes.table import environments
from weft.kernel.errors.error_tree import FieldError

PACKAGE = re.compile(
    r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[^ \n]+)(?P<rest>(?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE
)
ROOT = Path(__file__).resolve().parents[3]
VARIANTS = [(environment, variant) for environment in environments() for variant in environment.variants]


def _read(*lines: str, total: int = 3) -> PipOutput:
    output = PipOutput(total)
    for line in lines:
        output.read(f"{line}\n")
    return output


def test_each_package_started_by_pip_counts_once() -> None:
    output = _read(
        "Collecting torch==2.13.0 (from -r cpu.lock (line 3))",
        "  Downloading torch-2.13.0-cp311.whl (190 MB)",
        "Processing /wheels/numpy-2.4.6-cp311.whl (from -r cpu.lock (line 9))",
    )
    assert (output.done, output.package, output.installing) == (2, "numpy-2.4.6-cp311.whl", False)
    assert not output.read("  Using cached pyyaml.whl")
    assert output.read("Ignoring numpy: markers 'python_version >= \"3.12\"' don't match your environment")
    assert (output.done, output.package) == (3, "numpy")
    assert output.read("Installing collected packages: torch, numpy")
    assert (output.done, output.package, output.installing) == (3, "", True)


def test_second_lock_file_continues_the_count() -> None:
    output = _read("Collecting torch==2.13.0", "Installing collected packages: torch", "Collecting numpy==2.4.6")
    assert (output.done, output.package, output.installing) == (2, "numpy==2.4.6", False)


def test_count_never_exceeds_the_total() -> None:
    assert _read(*["Collecting a==1"] * 9, total=3).done == 3


@pytest.mark.parametrize(
    ("lines", "failure"),
    [
        (["ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."], Failure.WRONG_HASH),
        (
            ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"],
            Failure.DISK_FULL,
        ),
        (["ERROR: No matching distribution found for pebble==1.0"], Failure.NOT_FOUND),
        (
            [
                "WARNING: Retrying: NewConnectionError: Connection refused",
                "ERROR: No matching distribution found for p",
            ],
            Failure.NETWORK,
        ),
        (
            ["WARNING: Retrying: ConnectTimeoutError", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"],
            Failure.WRONG_HASH,
        ),
        (
            ["pip._vendor.urllib3.exceptions.ProtocolError: ('Connection broken: IncompleteRead(1 bytes read)')"],
            Failure.NETWORK,
        ),
        (["Segmentation fault"], Failure.OTHER),
        ([], Failure.OTHER),
    ],
)
def test_failure_cause_is_reported(lines: list[str], failure: Failure) -> None:
    output = _read(*lines)
    assert output.failure is failure
    assert output.explanation().startswith(f"{failure.value}; pip's last lines:")


def test_stored_output_is_bounded() -> None:
    output = _read(*[f"{number} {'x' * 1000}" for number in range(100)])
    assert len(output.last_lines) == MAX_KEPT_LINES
    assert output.last_lines[-1].startswith("99 ")
    assert {len(line) for line in output.last_lines} == {MAX_LINE_CHARS}


def test_hashes_are_always_required() -> None:
    assert "--require-hashes" in pip_arguments(Path("x.lock"), ["--no-deps"])


@pytest.mark.slow("runs pip")
def test_installer_needs_only_the_standard_library(tmp_path: Path) -> None:
    """It installs what weft needs, so that nothing of it is there yet."""
    (tmp_path / "wrong.lock").write_text("pebble==1.0 --hash=sha256:00\n", "utf-8")
    command = [sys.executable, "-P", "-S", locked_install.__file__, str(tmp_path / "wrong.lock"), "--no-index"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "the installation failed: " in ended.stderr
    assert "Check the network, then run make again." in ended.stderr


@pytest.mark.parametrize(("environment", "variant"), VARIANTS)
def test_every_locked_package_has_an_exact_version_and_a_hash(environment: EngineEnvironment, variant: Variant) -> None:
    for lock in environment.lock_files(variant):
        packages = list(PACKAGE.finditer(lock.read_text("utf-8")))
        assert packages
        assert len(packages) == package_count([lock])
        assert [each["name"] for each in packages if "--hash=sha256:" not in each["rest"]] == []
    assert len(lock_digest(environment, variant)) == 64


def test_packages_that_break_vllm_on_cpu_are_in_no_lock_file_of_it() -> None:
    (vllm,) = [each for each in environments() if each.name == "vllm"]
    names = {
        found["name"]: found["version"]
        for lock in vllm.lock_files(Variant.CPU)
        for found in PACKAGE.finditer(lock.read_text("utf-8"))
    }
    assert names["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    assert not [name for name in names if name.startswith(("nvidia-", "cuda-"))]


@pytest.mark.parametrize(
    ("variants", "choice", "has_cards", "chosen"),
    [
        ("cpu cuda", "auto", True, Variant.CUDA),
        ("cpu cuda", "auto", False, Variant.CPU),
        ("cpu", "auto", True, Variant.CPU),
        ("cuda", "auto", True, Variant.CUDA),
        ("cuda", "auto", False, "gravel needs an NVIDIA card, and there is none here; --variant cuda installs it"),
        ("cuda", "cuda", False, Variant.CUDA),
        ("cuda", "cpu", True, "gravel has no variant cpu, only cuda"),
    ],
)
def test_variant_follows_the_gpus_unless_requested(
    variants: str, choice: str, has_cards: bool, chosen: Variant | str
) -> None:
    declared = environments()[0].variants[Variant.CPU]
    environment = EngineEnvironment(
        folder=Path("gravel"),
        summary="",
        variants={Variant(name): declared for name in variants.split()},
        check="",
        oldest_python=(3, 11),
        newest_python=(3, 11),
    )
    if isinstance(chosen, Variant):
        assert choose_variant(environment, VariantChoice(choice), lambda: has_cards) is chosen
    else:
        with pytest.raises(FieldError) as refused:
            choose_variant(environment, VariantChoice(choice), lambda: has_cards)
        assert refused.value.message == f"--variant: {chosen}"


def test_gpus_are_detected_only_if_they_decide_the_variant() -> None:
    def never() -> bool:
        raise AssertionError("it takes seconds where a driver hangs")

    environment = environments()[0]
    assert choose_variant(environment, VariantChoice.CPU, never) is Variant.CPU


def test_lock_files_are_part_of_the_wheel() -> None:
    builder = WheelBuilder(str(ROOT))
    shipped = {found.distribution_path for found in builder.recurse_included_files()}
    locks = {
        lock.relative_to(ROOT).as_posix()
        for environment, variant in VARIANTS
        for lock in environment.lock_files(variant)
    }
    assert len(locks) >= 6
    assert locks <= shipped
    assert "requirements/up.lock" not in shipped
