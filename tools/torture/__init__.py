"""The torture run: kills every process of a mesh repeatedly and checks its promises: `python -m tools.torture`.

Several submitters send tasks to a mesh of real processes, while all of them are killed with SIGKILL at seeded times.
Each process appends its events to a separate file. After the kills, when every task is terminal, `checker` examines
these histories: no acknowledged task is lost, none has two terminal states, none ran without a claim.
"""
