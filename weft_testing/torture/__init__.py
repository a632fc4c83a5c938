"""The torture run: kills every process of a mesh repeatedly and checks its promises: `python -m weft_testing.torture`.

A mesh of real processes takes tasks from several submitters while all of them are ended by SIGKILL at times that a seed
decides. Each process appends its events to a file of its own. After the kills, when every task is terminal, `checker`
examines these histories: no acknowledged task is lost, none has two terminal states, none ran without a claim.
"""
