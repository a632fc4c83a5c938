"""Processor time of real processes that come and go."""

import os
import subprocess
import sys

from runner_svc.supervise.process_time import TreeTime

BURN = "import time; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
WAIT = "print('done', flush=True); import sys; sys.stdin.read()"


def test_cpu_time_of_an_ended_child_stays_in_the_sum() -> None:
    tree = TreeTime()
    before = tree.seconds(os.getpid(), ())
    child = subprocess.Popen([sys.executable, "-c", BURN + WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        with_child = tree.seconds(os.getpid(), {os.getpid(), child.pid})
        assert with_child >= before + 0.09
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    assert tree.seconds(os.getpid(), {child.pid}) >= with_child


def test_cpu_time_restarts_with_a_new_root_and_a_missing_root_counts_zero() -> None:
    tree = TreeTime()
    with subprocess.Popen([sys.executable, "-S", "-c", BURN]) as child:
        child.wait()
    assert tree.seconds(os.getpid(), ()) > 0.0
    assert tree.seconds(child.pid, ()) == 0.0
