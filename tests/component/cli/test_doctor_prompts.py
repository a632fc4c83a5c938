"""What `weft doctor` says of stored prompts."""

from cli_harness import ScriptedMesh

from weft_app.cli.doctor_checks import ok, stored_prompt_findings

pytest_plugins = ("cli_mesh",)


def test_number_size_and_limit_of_stored_prompts_are_shown_for_each_runner(mesh: ScriptedMesh) -> None:
    mesh.serve()
    detail = "runner r1: 3 stored, 57 MiB of 2 GiB (stored_prompts_mb); 2 in memory, 3 MiB of 1 GiB (kept_prompts_mb)"
    assert list(stored_prompt_findings(mesh.home)) == [ok("stored prompts", detail)]
