"""Kill everything, again and again, and see whether a promise was broken: `python -m weft_testing.torture`.

A mesh of real processes takes tasks from several submitters while all of them are ended by SIGKILL at moments that a
seed decides. Each process appends what it knows to a file of its own. When the killing is over and every task is at its
end, `checker` goes through these histories: nothing acknowledged is lost, nothing has two ends, no work was done that
nobody had claimed.
"""
