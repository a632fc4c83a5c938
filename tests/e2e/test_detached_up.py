"""`weft up -d`: a mesh that goes on when its command has returned, and a start that fails in front of the user."""

from pathlib import Path

from mesh_process import fake_runner, run_weft, write_config

from weft_app.cli.options import EXIT_CONFLICT, EXIT_NOT_FOUND, EXIT_OK, EXIT_USAGE
from weft_app.compose.home import WeftHome


async def test_it_serves_when_the_command_returns_and_ends_with_down(tmp_path: Path) -> None:
    home, config = tmp_path / "home", str(write_config(tmp_path, fake_runner("a")))
    code, shown, error = await run_weft("up", "-d", "--config", config, home=home)
    assert code == EXIT_OK, error
    owner = WeftHome(home).owner()
    try:
        assert "weft is up" in shown
        assert "stop with Ctrl-C" not in shown
        assert f"(pid {owner})" in shown
        assert str(home / "logs" / "up.out") in shown
        code, answer, error = await run_weft("chat", "m-a", "hello", home=home)
        assert (code, bool(answer.strip())) == (EXIT_OK, True), error
        code, _, error = await run_weft("up", "-d", "--config", config, home=home)
        assert (code, f"another weft (pid {owner}) runs on {home}" in error) == (EXIT_CONFLICT, True), error
        assert WeftHome(home).owner() == owner, "the second start changed nothing"
    finally:
        code, shown, error = await run_weft("down", home=home)
    assert (code, shown) == (EXIT_OK, f"stopped the mesh on {home}\n"), error
    assert (await run_weft("status", home=home))[0] == EXIT_NOT_FOUND


async def test_a_start_that_fails_is_shown_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "weft.yaml").write_text("runners: [{name: box, models: []}]\n")
    home = tmp_path / "home"
    code, shown, error = await run_weft("up", "-d", "--config", str(tmp_path / "weft.yaml"), home=home)
    assert code == EXIT_USAGE
    assert "runners.0.models: " in error
    assert "in the background" not in shown
    assert not WeftHome(home).is_claimed()
