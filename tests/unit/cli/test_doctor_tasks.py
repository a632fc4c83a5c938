"""What `weft doctor` says about tasks that were acknowledged."""

from pathlib import Path

from router_svc.policy.lost_commits import CommitCount, Loss, LossKind
from router_svc.store.commit_count import CommitCountFile
from weft_app.cli.doctor import examine
from weft_app.cli.doctor_checks import Finding, Verdict
from weft_app.cli.network_options import NetworkOptions
from weft_app.compose.home import WeftHome


def _finding(home: WeftHome) -> Finding:
    config = home.root.parent / "weft.yaml"
    config.write_text("runners: []\n", encoding="utf-8")
    return next(finding for finding in examine(home, config, NetworkOptions(port=0)) if finding.check == "tasks")


def _lose(home: WeftHome) -> CommitCountFile:
    home.create()
    kept = CommitCountFile(home.promises)
    promised, found = CommitCount(store_id="store-1", commits=9), CommitCount(store_id="store-1", commits=5)
    kept.write_loss(Loss(kind=LossKind.OLDER, promised=promised, found=found), "2026-11-21T09:00:00+00:00")
    return kept


def test_no_finding_is_shown_without_known_loss(tmp_path: Path) -> None:
    assert _finding(WeftHome(tmp_path / "home")).verdict is Verdict.OK


def test_lost_work_is_a_warning_until_its_file_is_deleted(tmp_path: Path) -> None:
    home = WeftHome(tmp_path / "home")
    kept = _lose(home)
    finding = _finding(home)
    assert finding.verdict is Verdict.WARNING
    assert "its last 4 transactions are missing (noticed 2026-11-21T09:00:00+00:00)" in finding.detail
    assert f"delete {kept.loss_path}" in finding.remedy
    kept.loss_path.unlink()
    assert _finding(home).verdict is Verdict.OK


def test_unreadable_loss_file_is_still_a_warning(tmp_path: Path) -> None:
    home = WeftHome(tmp_path / "home")
    _lose(home).loss_path.write_text("{", encoding="utf-8")
    assert _finding(home).verdict is Verdict.WARNING
