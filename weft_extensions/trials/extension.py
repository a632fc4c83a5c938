"""Trials: two models are compared by requests of a tenant."""

from weft.extension import ApiHook, CommandHook, Extension, ObserverHook, PageHook

EXTENSION = Extension(
    name="trials",
    summary="Compare two models by requests of a tenant.",
    docs="docs/models.md",
    apis=(ApiHook(place="weft_extensions.trials.trial_endpoints:API", paths=("/v1/trials/",)),),
    kinds=("trial",),
    observers=(ObserverHook(place="weft_extensions.trials.pair_tasks:observer"),),
    pages=(
        PageHook(
            path="trials",
            title="Trials",
            group="Mesh",
            needs="inference:view",
            package="weft_extensions.trials",
            module="trials.js",
            icon="M2.5 3h4.500v10h-4.500zM9 3h4.500v10h-4.500z",
            keys=((("A", "B", "S"), "Judge the shown pair of a trial"),),
        ),
    ),
    commands=(
        CommandHook(
            words="models trial",
            place="weft_extensions.trials.command:app",
            summary="Compare two models by requests of a tenant, and switch an alias between them.",
            example="weft models trial start qwen3-8b --against chat --share 10%",
        ),
    ),
)
