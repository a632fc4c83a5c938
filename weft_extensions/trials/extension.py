"""Trials: two models are compared by requests of a tenant."""

from weft.extension import ApiHook, CommandHook, Extension, ObserverHook

EXTENSION = Extension(
    name="trials",
    summary="Compare two models by requests of a tenant.",
    docs="docs/models.md",
    apis=(ApiHook(place="weft_extensions.trials.trial_endpoints:API", paths=("/v1/trials/",)),),
    observers=(ObserverHook(place="weft_extensions.trials.pair_tasks:observer"),),
    commands=(
        CommandHook(
            words="models trial",
            place="weft_extensions.trials.command:app",
            summary="Compare two models by requests of a tenant, and switch an alias between them.",
            example="weft models trial start qwen3-8b --against chat --share 10%",
        ),
    ),
)
