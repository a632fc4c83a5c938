"""What `weft mesh reload` prints."""

from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft_app.cli.reload import reload_lines

Change = pb.ConfigurationChange


def test_each_change_is_a_line_with_its_effect() -> None:
    slots = pb.SettingChange(name="slots", before="2", after="4")
    port = pb.SettingChange(name="port", before="8080", after="9090")
    answer = pb.ReloadConfigurationResponse(
        files=["/w.yaml"],
        changes=[
            Change(
                kind="model", name="a", runner="box", action=Change.ACTION_ADDED, effect=Change.EFFECT_RUNNER_RESTART
            ),
            Change(
                kind="model",
                name="b",
                runner="box",
                action=Change.ACTION_CHANGED,
                effect=Change.EFFECT_MODEL_RELOAD,
                settings=[slots],
            ),
            Change(kind="runner", name="old", action=Change.ACTION_REMOVED, effect=Change.EFFECT_LIVE),
            Change(
                kind="setting",
                name="port",
                action=Change.ACTION_CHANGED,
                effect=Change.EFFECT_MESH_RESTART,
                settings=[port],
            ),
        ],
        notes=["b waits"],
    )
    assert list(reload_lines(answer)) == [
        "/w.yaml: 4 changes",
        "  + model a on box",
        "  ~ model b on box: it is reloaded after its running requests",
        "      slots: 2 -> 4",
        "  - runner old",
        "  ! port: 8080 -> 9090 (needs a restart of the mesh: weft mesh restart)",
        "b waits",
    ]


def test_empty_change_is_reported() -> None:
    assert list(reload_lines(pb.ReloadConfigurationResponse())) == ["no configuration file: no changes"]
