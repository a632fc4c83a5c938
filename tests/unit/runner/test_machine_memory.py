"""The host's memory that a further model may take: what is available within the limits of cgroups, less a reserve."""

from pathlib import Path

from kit.presence import present

from runner_svc.memory.machine_memory import MIN_HOST_RESERVE_BYTES, host_memory_bytes
from runner_svc.policy.memory_estimate import GIBIBYTE, MEBIBYTE

NOWHERE = Path("/nonexistent")


def table(folder: Path, total_gib: float, available_gib: float) -> Path:
    file = folder / "meminfo"
    file.write_text(
        f"MemTotal:       {int(total_gib * MEBIBYTE)} kB\nMemFree: 12 kB\n"
        f"MemAvailable:   {int(available_gib * MEBIBYTE)} kB\nHugePages_Total:       0\n"
    )
    return file


def cgroup(folder: Path, limit: str, used: int, cached: int) -> Path:
    folder.mkdir()
    (folder / "cgroup.procs").write_text("1\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 17\nfile {cached}\nkernel 3\n")
    return folder


def test_host_memory_is_available_memory_minus_a_twentieth_of_the_total(tmp_path: Path) -> None:
    assert host_memory_bytes(table(tmp_path, 40, 30), NOWHERE) == 28 * GIBIBYTE


def test_small_host_keeps_a_fixed_reserve(tmp_path: Path) -> None:
    assert host_memory_bytes(table(tmp_path, 4, 3), NOWHERE) == 3 * GIBIBYTE - MIN_HOST_RESERVE_BYTES
    assert host_memory_bytes(table(tmp_path, 4, 0.1), NOWHERE) == 0


def test_container_and_parent_limits_apply_and_cached_files_count_as_available(tmp_path: Path) -> None:
    memory = table(tmp_path, 400, 300)
    outer = cgroup(tmp_path / "outer", str(20 * GIBIBYTE), 14 * GIBIBYTE, 4 * GIBIBYTE)
    inner = cgroup(outer / "inner", "max", 1 * GIBIBYTE, 0)
    assert host_memory_bytes(memory, inner) == 10 * GIBIBYTE - 1 * GIBIBYTE


def test_unreadable_host_memory_is_unknown(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path / "absent", NOWHERE) is None
    (tmp_path / "other").write_text("MemTotal: many kB\n")
    assert host_memory_bytes(tmp_path / "other", NOWHERE) is None


def test_memory_of_this_machine_is_read() -> None:
    found = present(host_memory_bytes())
    assert found < 1024 * GIBIBYTE
