"""Every ending of a local cluster: the exit status tells, it comes in time, and nothing is left running."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import pytest
from conftest import processes_left

from cluster import greeting, preflight, spec
from cluster.launcher import free_addresses

IN_TIME_S = 5
STOPPED_S = 10  # after a step's end, with a checkpoint


class Launched:
    """A launcher in the background whose output is read line by line."""

    def __init__(self, *command, **environment):
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []

    def wait_for(self, pattern):
        """Reads until a line matches; returns the match."""
        for line in self._process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line matches {pattern!r} in {self.lines}")

    def send(self, number):
        self._process.send_signal(number)

    def end(self, within):
        """The exit status, which has to come within so many seconds."""
        rest, _ = self._process.communicate(timeout=within)
        self.lines += rest.splitlines(keepends=True)
        return self._process.returncode


@pytest.fixture
def script(tmp_path):
    """A program, as a file, for the launcher: no TensorFlow in it."""

    def write(text):
        path = tmp_path / "program.py"
        path.write_text("import json, os, signal, sys, time\n" + textwrap.dedent(text))
        return str(path)

    return write


INDEX = "json.loads(os.environ['TF_CONFIG'])['task']['index']"


def test_each_worker_has_its_index_the_same_cluster_and_a_prefix(script):
    program = script("print(os.environ['TF_CONFIG'])")
    run = Launched("cluster.launcher", "--workers=3", program)
    assert run.end(within=20) == 0
    assert sorted(line[:4] for line in run.lines) == ["[0] ", "[1] ", "[2] "]
    assert len({line.partition('"task"')[0][4:] for line in run.lines}) == 1
    assert len(set(re.findall(r"127\.0\.0\.1:\d+", run.lines[0]))) == 3


def test_gpus_are_shared_out_without_overlap(script):
    program = script("print('gpus', os.environ['CUDA_VISIBLE_DEVICES'])")
    run = Launched("cluster.launcher", "--workers=2", program, CUDA_VISIBLE_DEVICES="0,1,2,5,6")
    assert run.end(within=20) == 0
    assert sorted(run.lines) == ["[0] gpus 0,1\n", "[1] gpus 2,5\n"]


@pytest.mark.parametrize(
    ("what", "status", "says"),
    [("sys.exit(3)", 3, "status 3"), ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"), ("1 / 0", 1, "status 1")],
)
def test_the_first_failure_ends_all_and_gives_the_status(script, what, status, says):
    program = script(f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if {INDEX} == 1:
            {what}
        time.sleep(300)
    """)
    run = Launched("cluster.launcher", "--workers=3", program)
    assert run.end(within=20) == status
    assert any("worker 1" in line and says in line for line in run.lines)
    assert processes_left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_to_the_launcher_ends_workers_that_ignore_the_first(script, number):
    program = script("""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(300)
    """)
    run = Launched("cluster.launcher", "--workers=2", program)
    run.wait_for("up")
    run.send(number)
    time.sleep(1)
    assert len(processes_left()) == 3  # a worker that trains would stop after its step, with a checkpoint
    run.send(number)
    assert run.end(within=IN_TIME_S) == 128 + number
    assert processes_left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_reaches_every_worker(script, number):
    program = script("""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda number, _: (print("got", number, flush=True), sys.exit(75)))
        print("up", flush=True)
        time.sleep(300)
    """)
    run = Launched("cluster.launcher", "--workers=2", program)
    run.wait_for("up")
    run.wait_for("up")
    run.send(number)
    assert run.end(within=IN_TIME_S) == 75
    assert sorted(line for line in run.lines if "got" in line) == [f"[{i}] got {int(number)}\n" for i in (0, 1)]


def test_a_launcher_that_is_killed_takes_its_workers_along(script):
    program = script("print('up', flush=True); time.sleep(300)")
    run = Launched("cluster.launcher", "--workers=2", program)
    run.wait_for("up")
    run.send(signal.SIGKILL)
    run.end(within=IN_TIME_S)
    deadline = time.monotonic() + IN_TIME_S
    while processes_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_left() == []


def test_output_that_nobody_reads_any_more_ends_all(script):
    program = script("while True: print('x' * 1000, flush=True)")
    command = [sys.executable, "-m", "cluster.launcher", "--workers=2", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=IN_TIME_S) == 128 + signal.SIGPIPE
    assert processes_left() == []


def test_a_worker_that_stays_after_the_others_is_ended(script):
    program = script(f"time.sleep(300 * {INDEX})")
    run = Launched("cluster.launcher", "--workers=2", program)
    assert run.end(within=30) == 1
    assert "[1] did not end with the others" in "".join(run.lines)


def training(tmp_path, *flags, workers=2):
    """The real program, long enough to be interrupted, at its first epoch's end."""
    run_dir = tmp_path / uuid.uuid4().hex
    run = Launched("app", "train", f"--workers={workers}", "--epochs=1000", f"--run_dir={run_dir}", *flags)
    run.wait_for(" 1/1000")
    return run


def worker_pids():
    found = {}
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environ = file.read()
        except OSError:
            continue
        if os.environ["LOCKSTEP_TESTS"].encode() in environ and (match := re.search(rb'"index": (\d+)', environ)):
            found[int(match[1])] = int(entry)
    return found


def end_by_killing(run, worker):
    os.kill(worker_pids()[worker], signal.SIGKILL)
    assert run.end(within=IN_TIME_S) == 137
    assert f"worker {worker} was ended by SIGKILL" in "".join(run.lines)


def end_by_signal(run, number):
    run.send(number)
    assert run.end(within=STOPPED_S) == 75
    assert "the same command goes on from" in "".join(run.lines)


def end_by_signal_to_a_worker(run, number):
    os.kill(worker_pids()[1], number)
    assert run.end(within=STOPPED_S) == 75


def end_by_two_signals(run, number):
    run.send(number)
    run.send(number)
    assert run.end(within=IN_TIME_S) in (75, 128 + number)  # the step may end in between


ENDINGS = {
    "kill -9 of worker 1": lambda run: end_by_killing(run, 1),
    "Ctrl-C": lambda run: end_by_signal(run, signal.SIGINT),
    "kill -9 of the chief": lambda run: end_by_killing(run, 0),
    "SIGTERM": lambda run: end_by_signal(run, signal.SIGTERM),
    "SIGTERM to a worker": lambda run: end_by_signal_to_a_worker(run, signal.SIGTERM),
    "Ctrl-C twice": lambda run: end_by_two_signals(run, signal.SIGINT),
}


def test_ctrl_c_stops_a_training_everywhere_in_time(tmp_path):
    ENDINGS["Ctrl-C"](training(tmp_path))
    assert processes_left() == []


@pytest.mark.soak
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_training_ends_in_time_by_every_cause_four_times_in_a_row(tmp_path, ending):
    for _ in range(4):
        ENDINGS[ending](training(tmp_path))
        assert processes_left() == []


def ends_well(tmp_path, workers):
    """A short training whose output, standard error included, holds the expected lines and nothing else."""
    places = [f"--run_dir={tmp_path / uuid.uuid4().hex}", f"--prepared_dir={tmp_path}/prepared"]
    flags = ["--steps=3", "--logical_replicas=12", "--shards=12", "--global_batch_size=132", *places]
    run = Launched("app", "train", f"--workers={workers}", *flags)
    assert run.end(within=120) == 0, run.lines
    narration = (
        "prepared, |small_cnn on|global batch|[\\d,]+ |first step|  epoch|epoch \\d| +1/1 |trained|held|saved|next|sha256"
    )
    expected = rf"recipe |\[0\] (\S+: )?({narration})"
    assert [line for line in run.lines if not re.match(expected, line)] == []
    assert processes_left() == []


def test_a_normal_end_is_silent_and_0_on_every_worker(tmp_path):
    ends_well(tmp_path, workers=3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twenty_normal_ends_in_a_row_are_silent_and_0(tmp_path):
    for attempt in range(20):
        ends_well(tmp_path, workers=4 if attempt % 4 == 3 else 2)


def test_a_worker_that_raises_ends_the_cluster_with_its_error(script):
    program = script(f"""
        import cluster
        def main(strategy):
            if {INDEX} == 1:
                raise ValueError("this worker is broken")
            time.sleep(300)
        cluster.run(main)
    """)
    run = Launched("cluster.launcher", "--workers=2", program)
    assert run.end(within=60) == 1
    assert any("[1] ValueError: this worker is broken" in line for line in run.lines)
    assert processes_left() == []


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_names_whom_it_waits_for_and_can_be_ended_meanwhile(script, index):
    """The other worker's address never answers. TensorFlow alone would be silent, and deaf to SIGTERM."""
    program = script("import cluster; cluster.run(lambda strategy: 0)")
    addresses = free_addresses(2)
    environment = {**os.environ, "TF_CONFIG": spec.local_cluster(addresses)[index]}
    with subprocess.Popen([sys.executable, program], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("waiting for" in line and addresses[1 - index] in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=IN_TIME_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def hello_and_leave(member):
    host, port = member.addresses[0].split(":")
    time.sleep(1)
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        for said in (greeting.hello(member), {"card": {"facts": {}, "problems": []}}):
            connection.sendall(json.dumps(said).encode() + b"\n")
        time.sleep(0.5)


def arrive_late(member):
    time.sleep(2)
    with contextlib.suppress(spec.ClusterError):
        preflight.check(member, timeout_s=3)


def test_workers_that_do_not_meet_end_with_a_line_that_says_why():
    ours, theirs = free_addresses(2), free_addresses(2)
    one, two = (spec.parse(text) for text in spec.local_cluster(ours))
    with pytest.raises(spec.ClusterError, match=f"{ours[1]}.*did not start in time"):
        preflight.check(one, timeout_s=0.1)
    with pytest.raises(spec.ClusterError, match=f"no answer from the chief at {ours[0]}"):
        preflight.check(two, timeout_s=0.1)
    with socket.socket() as other:
        host, port = ours[0].split(":")
        other.bind((host, int(port)))
        other.listen()
        with pytest.raises(spec.ClusterError, match=f"{ours[0]}: Address already in use"):
            preflight.check(one, timeout_s=0.1)

    three = free_addresses(3)  # the second comes, and leaves again: it is not counted as there
    chief, second, third = (spec.parse(text) for text in spec.local_cluster(three))
    threads = [threading.Thread(target=hello_and_leave, args=(second,)), threading.Thread(target=arrive_late, args=(third,))]
    for thread in threads:
        thread.start()
    with pytest.raises(spec.ClusterError, match=f"{three[1]}.*did not start in time"):
        preflight.check(chief, timeout_s=4)
    for thread in threads:
        thread.join()
    swapped = spec.parse(spec.local_cluster([ours[0], theirs[1]])[1])

    def arrive():
        with contextlib.suppress(spec.ClusterError):
            preflight.check(swapped, timeout_s=3)

    late = threading.Thread(target=arrive)
    late.start()
    with pytest.raises(spec.ClusterError, match=f"another list of workers.*{theirs[1]}"):
        preflight.check(one, timeout_s=20)
    late.join()


def test_the_documented_program_of_ones_own_runs_on_two_workers_and_gives_one_workers_model(tmp_path):
    """The code in docs/your-own-model.md, as it stands there."""
    import numpy as np
    from conftest import ROOT

    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/your-own-model.md").read_text(), re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) < 15
    weights = {}
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        (folder / "mine.py").write_text(code)
        command = [sys.executable, "-m", "cluster.launcher", f"--workers={workers}", "mine.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        read = (
            "import keras, numpy; model = keras.models.load_model('model.keras');"
            "numpy.save('w.npy', numpy.concatenate([v.numpy().ravel() for v in model.trainable_variables]))"
        )
        subprocess.run([sys.executable, "-c", read], cwd=folder, check=True, timeout=60)
        weights[workers] = np.load(folder / "w.npy")
    np.testing.assert_array_equal(weights[1], weights[2])
