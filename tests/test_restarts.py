"""--max_restarts and --min_workers: a local cluster that is started again when a worker dies. No TensorFlow in it."""

import subprocess
import sys
import textwrap

import pytest
from conftest import processes_left

RESTARTED = """
    import pathlib, sys
    from cluster import launcher
    log = pathlib.Path(sys.argv[1])
    def progress():
        return log.read_text().count("reached") if {counts} else None
    command = [sys.executable, sys.argv[2], sys.argv[1]]
    sys.exit(launcher.run(command, {workers}, {restarts}, {fewer}, progress))
"""

HEAD = """
import json, os, sys, time
tf_config = json.loads(os.environ["TF_CONFIG"])
workers, index = len(tf_config["cluster"]["worker"]), tf_config["task"]["index"]
log = open(sys.argv[1], "a")
"""


def restarted(tmp_path, program, counts=False, workers=3, restarts=3, fewer=None):
    """Runs the program on workers under a launcher that restarts: (status, output, lines of the log that they share)."""
    log, worker, main = tmp_path / "log", tmp_path / "worker.py", tmp_path / "main.py"
    log.write_text("")
    worker.write_text(HEAD + textwrap.dedent(program))
    main.write_text(textwrap.dedent(RESTARTED.format(counts=counts, workers=workers, restarts=restarts, fewer=fewer)))
    done = subprocess.run([sys.executable, main, log, worker], capture_output=True, text=True, timeout=60)
    assert processes_left() == []
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


SERVED = """
    import sys
    from cluster import launcher
    sys.exit(launcher.run([sys.executable, sys.argv[2], sys.argv[1]], 2, {restarts}, ps=1))
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_coordinators_worker_that_dies_ends_nobody_and_is_started_again_by_itself(tmp_path, monkeypatch, restarts):
    monkeypatch.setitem(globals(), "RESTARTED", SERVED)
    program = """
        job = tf_config["task"]["type"]
        print(job, index, file=log, flush=True)
        if (job, index) == ("worker", 1) and open(sys.argv[1]).read().count("worker 1") == 1:
            os.kill(os.getpid(), 9)
        time.sleep(2)
        sys.exit(0 if job == "chief" else 75)
    """
    status, output, log = restarted(tmp_path, program, restarts=restarts)
    assert status == 0  # the coordinator's
    assert sorted(log) == sorted(["chief 0", "ps 0", "worker 0", *["worker 1"] * (1 + restarts)])
    assert "worker 1 was ended by SIGKILL; " + ("starting it again" if restarts else "going on without it") in output


def test_a_ps_that_dies_ends_the_cluster(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "RESTARTED", SERVED)
    program = """
        if tf_config["task"]["type"] == "ps":
            os.kill(os.getpid(), 9)
        time.sleep(20)
    """
    status, output, _ = restarted(tmp_path, program, restarts=0)
    assert status == 137
    assert "ps 0 was ended by SIGKILL; ending the others" in output


def test_a_cluster_whose_worker_dies_is_started_again_as_it_was(tmp_path):
    program = """
        if index == 0:
            print("start", workers, file=log, flush=True)
        time.sleep(1)
        if index == 1 and open(sys.argv[1]).read().count("start") < 3:
            os.kill(os.getpid(), 9)
        time.sleep(1)
    """
    status, output, log = restarted(tmp_path, program)
    assert (status, log) == (0, ["start 3"] * 3)
    assert output.count("worker 1 was ended by SIGKILL") == 2
    assert "starting again with 3 workers (2 of 3 restarts left)" in output


def test_it_goes_on_with_fewer_workers_if_they_are_enough(tmp_path):
    program = """
        if index == 0:
            print("start", workers, file=log, flush=True)
        if index == workers - 1 and workers > 1:
            time.sleep(0.5)
            sys.exit(1)
        time.sleep(1)
    """
    largest = "lambda left: max((n for n in (1, 2, 4) if 2 <= n <= left), default=0)"
    status, output, log = restarted(tmp_path, program, workers=4, fewer=largest)
    assert (status, log) == (1, ["start 4", "start 2"])
    assert "too few workers are left" in output


def test_it_is_not_started_again_without_progress_nor_for_a_mistake_nor_when_it_has_stopped(tmp_path):
    status, output, log = restarted(tmp_path, "print('start', file=log)\nsys.exit(1)", True, workers=1, restarts=9)
    assert (status, log) == (1, ["start"] * 2)
    assert "without progress" in output
    status, _, log = restarted(tmp_path, "print('start\\nreached', file=log)\nsys.exit(1)", True, workers=1, restarts=3)
    assert (status, log.count("start")) == (1, 4)
    for ends_with in (2, 75):
        status, _, log = restarted(tmp_path, f"print('start', file=log)\nsys.exit({ends_with})", workers=1)
        assert (status, log) == (ends_with, ["start"])
