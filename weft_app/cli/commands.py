"""The commands: their panels, summaries, places and other names. As data for the help, completion and the man page.

Imports the standard library alone, as building the wheel reads it.
"""

from collections.abc import Iterator, Mapping, Sequence

PANELS: Mapping[str, Mapping[str, str]] = {
    "Start here": {
        "up": "Start a mesh on this machine and serve until Ctrl-C, or in the background.",
        "run": (
            "Pull, load and chat with a model, by its name or source. Starts weft for this command if it is not "
            "running."
        ),
        "stop": "Stop the mesh of a home after its running requests, as Ctrl-C does.",
        "status": "Show the state of the mesh of a home: uptime, addresses, health of its processes, and models.",
        "ui": "Open the workbench, the web page of the mesh, and print its address.",
        "chat": "Chat with a model, pool, agent or route. The answer goes to stdout, everything else to stderr.",
        "launch": "Start a program such as Claude Code with the environment variables of the mesh. No file is changed.",
        "doctor": "Check whether a mesh can run on this machine. Exit code 1 if something is missing.",
    },
    "Models": {
        "pull": "Pull a model from the Hugging Face hub, by short name, from a URL or a folder. No mesh needs to run.",
        "models": "List and remove pulled models; add models of running servers and providers.",
        "ps": "Show each model on each runner: memory, how long it stays loaded, process, slots.",
        "top": "Show hosts, models, running answers and the queue on a live page; quit with q or Ctrl-C.",
        "load": "Load a model and keep it loaded until it is unloaded. Different options reload it.",
        "unload": "Drain and unload a model. The next request loads it again.",
        "logs": "Show the log of the mesh, a service, a runner, an engine or one request, or the answer of a task.",
    },
    "Resources": {
        "get": (
            "List resources, requests, clients, tasks, secrets, leases or routers. Resources in YAML can be applied "
            "again."
        ),
        "describe": (
            "Show the details of one resource: its document, conditions with reasons, engines and recent events."
        ),
        "apply": "Declare resources. All documents are applied, or none if one is invalid or refused.",
        "delete": (
            "Delete resources, agents and routes first, finished tasks or secrets. A failure does not stop the others."
        ),
        "events": "Show recent events, oldest first.",
    },
    "Requests": {
        "explain": (
            "Explain the scheduling of a request: what it waited for, which runners were candidates, which one served "
            "it."
        ),
        "cancel": "Cancel requests, tasks, batches or operations, whether they wait or run.",
        "batch": "Submit batches of requests, and fetch their answers.",
    },
    "Administration": {
        "mesh": "Reload, restart, watch and simulate a mesh; its leases, operations, audit log and services.",
        "config": "Show weft.yaml; show and change settings of the mesh and declared resources.",
        "keys": "Manage API keys, secrets, and tokens that permit operations.",
        "runner": "Join a mesh with the models of this machine, manage join tokens, and check runners.",
        "runtime": "Install, list, choose and remove environments and programs of engines.",
        "serve": "Run one service of a mesh in this process, for meshes that span processes or machines.",
    },
}
"""The commands by panel of `weft --help`, in order, with their summaries.

The summary is the first paragraph of the command's help, so that `weft --help` needs no module of a command.
"""
GROUPS: Mapping[str, Mapping[str, str]] = {
    "mesh": {
        "restart": "Restart the mesh of a home, or reload a model, after running requests.",
        "reload": "Reload the weft.yaml of a running mesh: only what changed is drained and restarted.",
        "health": "Check the health of the processes of a home: a probe for containers and supervisors.",
        "version": "Show the versions of the client, of the running mesh and its runners, of the API, Python and gRPC.",
        "demo": "Start a mesh in a temporary home, stream one chat through its HTTP API, and stop it.",
        "wait": "Wait for a condition of a resource, or for the end of a task. Exit code 5 on timeout.",
        "figures": "Show figures of the last hour: requests, tokens, latency percentiles, waits and devices.",
        "usage": (
            "Show the usage of tenants, keys and models: requests, tokens, media, accelerator time, prices and savings."
        ),
        "lease": "Lease accelerator memory for a program; list and release the leases of all hosts.",
        "operation": "List, follow and cancel loads, unloads and flushes.",
        "audit": "Show and verify the audit log of loads, unloads and flushes, including refusals.",
        "service": "Install, show and remove systemd services: a mesh, one of its services, or a runner.",
        "dump": (
            "Write the databases and key files of a stopped mesh to one file, as a backup or for another database."
        ),
        "restore": "Restore a dump into the databases of weft.yaml and this home, while the mesh is stopped.",
    },
    "models": {
        "ls": "List the models that were pulled: their size, when, and which models use them.",
        "rm": "Remove pulled models, and files that no other one needs. Refused if a served model uses them.",
        "gc": "Remove files that belong to no model, and partial files of pulls that ended 7 or more days ago.",
        "discover": (
            "Show engines and models of other programs on this machine, a weft.yaml for them, and announced meshes."
        ),
        "attach": (
            "Serve all models of a running server, without a restart of the mesh, and follow changes of its list."
        ),
        "detach": (
            "Stop serving the models of an attached server after their running requests. The server keeps running."
        ),
        "create": "Create a model that the mesh itself serves from a provider, without a runner in weft.yaml.",
        "estimate": "Show the estimated memory of a model, and the source of the estimate.",
        "quote": "Show when each place of the mesh would answer a prompt, without sending it.",
        "flush": "Drop cached prefixes. Running requests keep theirs until they end.",
    },
    "config": {
        "edit": "Edit a resource as YAML in $VISUAL or $EDITOR, and apply it when the editor exits.",
        "diff": (
            "Show what apply would change. Exit code 0: no differences, 1: differences, higher: the comparison failed."
        ),
        "envoy": "Print an Envoy configuration: its limits are those of weft.yaml (`edge`, `gateway.connections`).",
    },
    "keys": {
        "secret": "Create secrets, and give them new values.",
        "sign": "Sign tokens that permit an operation.",
    },
    "runner": {
        "token": "Manage the join tokens of runners.",
        "conformance": "Check a runner of the mesh against each rule of its contract.",
    },
}
"""Further commands of groups, as in PANELS."""
EXAMPLES: Mapping[str, str] = {
    "models": "weft models ls",
    "batch": "weft batch submit requests.jsonl --watch",
    "mesh": "weft mesh reload --dry-run",
    "mesh lease": "weft mesh lease list",
    "mesh operation": "weft mesh operation list --unfinished",
    "mesh audit": "weft mesh audit list",
    "mesh service": "weft mesh service install mesh",
    "config": "weft config show --effective",
    "keys": "weft keys create --tenant team-a",
    "keys secret": "weft keys secret create example-key --from-env EXAMPLE_API_KEY",
    "keys sign": "weft keys sign load qwen --shared-key model-api.key --signer alice --out op.json",
    "runner": "weft runner join https://mesh.example:7443",
    "runner token": "weft runner token create --expires 1d",
    "runtime": "weft runtime install llama_server",
    "serve": "weft serve registry --listen 127.0.0.1:7070",
}
"""An example for the help of each group."""
_PLACES: Mapping[str, str] = {
    "pull": "models:pull",
    "models": "",
    "load": "operations:load",
    "unload": "operations:unload",
    "apply": "declare:apply",
    "delete": "declare:delete",
    "mesh": "",
    "config": "mesh_config:app",
    "mesh restart": "stop:restart",
    "mesh version": "version:show_version",
    "mesh operation": "operations:app",
    "mesh restore": "dump:restore",
    "models ls": "models:list_models",
    "models rm": "models:remove",
    "models gc": "models:collect",
    "models detach": "attach:detach",
    "models create": "create:create_model",
    "models flush": "operations:flush",
    "models quote": "quote:quote",
    "config diff": "declare:diff",
    "config envoy": "edge:config",
    "keys secret": "secrets:app",
    "runner token": "join_tokens:app",
}
"""Places of commands, "module:attribute", that are not an attribute or an `app` of a module of their name.

A group whose commands are all in GROUPS has none.
"""


def _commands() -> Iterator[tuple[str, tuple[str, str]]]:
    paths = [("", names) for names in PANELS.values()] + [(f"{group} ", names) for group, names in GROUPS.items()]
    for before, names in paths:
        for name, summary in names.items():
            module = name.replace("-", "_")
            yield f"{before}{name}", (_PLACES.get(f"{before}{name}", f"{module}:{module}"), summary)


COMMANDS: Mapping[str, tuple[str, str]] = dict(_commands())
"""Places and summaries of PANELS and GROUPS by the words after `weft`."""

ALIASES: Mapping[str, str] = {"down": "stop", "list": "get", "ls": "get", "show": "describe"}
"""Other names of commands, not listed in the help. `list` and `ls` alone are `get models`."""
SUBCOMMAND_ALIASES: Mapping[str, Sequence[str]] = {
    "delete": ("rm", "remove", "revoke"),
    "list": ("ls",),
    "ls": ("list",),
    "remove": ("rm", "revoke"),
    "rm": ("remove", "revoke"),
    "show": ("get",),
}
"""Other names of a group's commands: for each name, the commands it may mean."""

OTHER_WORDS: Mapping[str, str] = {
    "alias": "weft get aliases, or weft apply -f FILE to declare one",
    "aliases": "weft get aliases",
    "download": "weft pull SOURCE",
    "install": "weft pull SOURCE for a model, weft runtime install NAME for an engine",
    "join": "weft runner join",
    "kill": "weft stop, or weft unload MODEL for one model",
    "log": "weft logs, or weft logs MODEL for what its engine printed",
    "remove": "weft models rm NAME for pulled files, weft delete KIND NAME for a resource",
    "rm": "weft models rm NAME for pulled files, weft delete KIND NAME for a resource",
    "start": "weft up",
    "token": "weft runner token, weft keys create or weft keys sign",
    "tokens": "weft runner token, weft keys create or weft keys sign",
}
"""Commands of other tools, and the equivalents here."""
