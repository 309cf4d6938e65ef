"""Signals and the death of the launcher, for small programs: examples/stopping.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from example_modules import EXAMPLES

LONGEST_S = 30
STOPPED = "\nstopped; nothing is left running\n"

HEAD = """
import ctypes, signal, sys, time
from stopping import Stopped, StopRequest
stop = StopRequest()
signal.alarm(60)  # however the test fails, nothing stays
def ready(): print("ready", flush=True)
def wait_in_c():  # as gloo waits for another rank: no signal gets it back to Python
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@contextmanager
def program(text, **environment):
    """A running program that has come as far as its first ``ready()``."""
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + text],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def signalled(text, number=signal.SIGTERM, **environment):
    """The exit code, output and errors of a program that is signalled when it is ready."""
    with program(text, **environment) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=LONGEST_S)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("wait", ["time.sleep(60)", "wait_in_c()"])
@pytest.mark.parametrize("after", ["", "stop.raise_from_now()"])
def test_a_signal_ends_the_program_in_one_line_wherever_it_waits(after, wait, number):
    code, _, err = signalled(
        f"{after}\ntry:\n    ready(); {wait}\n"
        "except Stopped as stopped:\n    print(f'\\n{stopped}', file=sys.stderr); sys.exit(130)",
        number,
    )
    assert (code, err) == (130, STOPPED)


def test_what_is_half_done_is_tidied_up_first():
    code, out, err = signalled(
        "stop.raise_from_now()\n"
        "try:\n    ready(); time.sleep(60)\n"
        "except Exception:\n    print('taken for an error')\n"
        "except Stopped:\n    stop.ignore_from_now(); time.sleep(1.5); print('tidy'); sys.exit(7)"
    )
    assert (code, out, err) == (7, "tidy\n", "")


def test_within_a_step_a_signal_waits_for_its_end():
    code, out, _ = signalled(
        "try:\n"
        "    with stop.at_step_boundary():\n"
        "        ready()\n"
        "        while not stop.noted: time.sleep(0.01)\n"
        "        time.sleep(1.5); print('step done')\n"
        "    print('not reached')\n"
        "except Stopped: sys.exit(8)"
    )
    assert (code, out) == (8, "step done\n")


def test_a_second_request_ends_a_step_that_does_not_end():
    with program("with stop.at_step_boundary(): ready(); wait_in_c()") as process:
        # What the launcher passes on at once is no second request.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONGEST_S)
    assert (process.returncode, err) == (130, STOPPED)


def test_only_rank_0_says_so():
    assert signalled("ready(); wait_in_c()", RANK="1") == (130, "", "")
    assert signalled("ready(); wait_in_c()", RANK="0") == (130, "", STOPPED)


def test_a_signal_is_left_to_whoever_took_it_over():
    code, _, err = signalled(
        "signal.signal(signal.SIGTERM, lambda *_: None)\nready(); time.sleep(1.5); sys.exit(9)"
    )
    assert (code, err) == (9, "")


@pytest.mark.parametrize("wait", ["time.sleep(60)", "wait_in_c()"])
def test_a_rank_ends_when_its_launcher_is_killed(wait):
    rank = f"{HEAD}\nready(); {wait}"
    launcher = (
        "import os, subprocess\n"
        f"subprocess.run([sys.executable, '-c', {rank!r}], env={{**os.environ, 'RANK': '0'}})"
    )
    with program(launcher) as process:  # the rank's "ready"
        process.kill()
        # Ends when the rank has closed its copies of the pipes.
        _, err = process.communicate(timeout=LONGEST_S)
    assert err == STOPPED


def test_a_program_without_a_launcher_outlives_its_shell():
    text = f"{HEAD}\nready(); time.sleep(1.5); print('done')"
    shell = f"import subprocess\nsubprocess.run([sys.executable, '-c', {text!r}])"
    with program(shell) as process:
        process.kill()
        out, err = process.communicate(timeout=LONGEST_S)
    assert (out, err) == ("done\n", "")
