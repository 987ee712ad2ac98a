"""Parameter servers, as real processes: the bits of every other cluster, whatever dies; and asynchronous updates, none lost."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from conftest import processes_left, run_program, sha256

ENDED_S = 15  # all others, when one has died that cannot be done without
FLAGS = ["--dataset=digits", "--global_batch_size=64", "--logical_replicas=4", "--log_every_steps=1"]


class Start:
    """One start of a run in the background, its output in a file."""

    def __init__(self, directory, *flags):
        self.directory = directory
        self._log = (directory.parent / f"{directory.name}.log").open("a+")
        self._begun, self.first = time.monotonic(), self._log.tell()
        command = [sys.executable, "-m", "app", "train", f"--run_dir={directory}", *FLAGS, *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def output(self):
        self._log.seek(self.first)
        return self._log.read()

    def wait_for(self, what, within=120):
        """Until a function of no arguments is true; fails if the process ends before."""
        deadline = time.monotonic() + within
        while not what():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def reach(self, step):
        self.wait_for(lambda: max(steps_of(self.directory), default=0) >= step)

    def pid(self, job, index=0):
        """The newest process of a task."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                mine = f'"task": {{"type": "{job}", "index": {index}}}'.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue
            if parent == self.process.pid and mine:
                found.append(int(entry.name))
        assert found, f"no {job} {index}: {self.output()}"
        return max(found)

    def end(self, within=120):
        try:
            status = self.process.wait(timeout=within)
        finally:
            self.process.kill()
        return status


def steps_of(directory):
    """The steps with a whole line in metrics.jsonl."""
    try:
        return [
            int(s) for s in re.findall(r'^\{"event": "step", "step": (\d+),.*\}$', _text(directory / "metrics.jsonl"), re.M)
        ]
    except OSError:
        return []


def _text(path):
    return path.read_text()


def cpu_seconds(pid):
    fields = _text(pathlib.Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def evaluator_beside(directory, *flags):
    """The evaluator task of a cluster with parameter servers, which looks at their addresses at no time."""
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"], "evaluator": ["127.0.0.1:4"]}
    tf_config = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    command = [sys.executable, "-m", "app", "train", f"--run_dir={directory}", *FLAGS, *flags]
    environment = {**os.environ, "TF_CONFIG": tf_config}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(directory, event):
    return [line for line in map(json.loads, _text(directory / "metrics.jsonl").splitlines()) if line["event"] == event]


def evaluations(directory):
    """{step: what was found}, in the order of the file."""
    names = ("loss", "top_1", "top_5", "examples")
    return {line["step"]: [line[name] for name in names] for line in lines_of(directory, "evaluation")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The sha256 of the runs below, of one process without parameter servers, by steps."""
    found = {}

    def run(steps):
        if steps not in found:
            directory = tmp_path_factory.mktemp("one") / "run"
            found[steps] = sha256(run_program("train", f"--run_dir={directory}", f"--steps={steps}", *FLAGS)), directory
        return found[steps]

    return run


def test_dead_workers_are_replaced_in_their_work_and_come_back_and_the_bits_are_those_of_one_process(undisturbed, tmp_path):
    """Three workers, which do not divide K = 4, and two ps. When all three have been killed, those that came back do all."""
    steps = 250
    start = Start(tmp_path / "run", f"--steps={steps}", "--workers=3", "--ps=2", "--max_restarts=1", "--fingerprint_every=25")
    start.reach(4)
    for index in (0, 1, 2):
        os.kill(start.pid("worker", index), signal.SIGKILL)
        start.wait_for(lambda index=index: f"worker {index} was ended by SIGKILL; starting it again" in start.output())
        if index == 0:  # the others die while it alone is there
            start.wait_for(lambda: "in a run that has begun" in start.output())
        start.reach(steps_of(start.directory)[-1] + 2)
    assert start.end() == 0, start.output()
    output, (expected, directory) = start.output(), undisturbed(steps)
    assert sha256(output) == expected, output
    assert "the others do its work, and it may come back" in output
    assert "coordinator at" in output and "ps 1 at" in output and "each by whichever of 3 workers is free" in output
    own, other = ([json.loads(line) for line in _text(d / "metrics.jsonl").splitlines()] for d in (start.directory, directory))
    names = ("step", "loss", "top_1", "learning_rate", "gradient_norm")
    assert [[row.get(n) for n in names] for row in own] == [[row.get(n) for n in names] for row in other]
    assert len(_text(start.directory / "fingerprints.jsonl").splitlines()) > steps // 25
    assert processes_left() == []


@pytest.mark.soak
def test_a_worker_that_hangs_is_replaced_in_its_work_and_used_again_when_it_wakes(undisturbed, tmp_path):
    steps = 250
    start = Start(tmp_path / "run", f"--steps={steps}", "--workers=2", "--ps=1")
    start.reach(24)  # an epoch, and its evaluation: what is traced later waits for every worker
    worker = start.pid("worker", 1)
    os.kill(worker, signal.SIGSTOP)
    start.wait_for(lambda: "worker 1" in start.output() and "gives no sign of life for" in start.output())
    start.reach(steps_of(start.directory)[-1] + 25)
    before = cpu_seconds(worker)
    os.kill(worker, signal.SIGCONT)
    start.wait_for(lambda: "gives signs of life again" in start.output())
    start.reach(steps_of(start.directory)[-1] + 50)
    assert cpu_seconds(worker) > before + 0.5
    assert start.end() == 0, start.output()
    assert sha256(start.output()) == undisturbed(steps)[0]


def test_a_run_that_is_stopped_and_loses_its_ps_and_its_coordinator_goes_on_in_either_kind_of_cluster(undisturbed, tmp_path):
    """And an evaluator beside it follows the checkpoints of all its starts, each once, until the training has ended."""
    steps, directory = 90, tmp_path / "run"
    flags = [f"--steps={steps}", "--checkpoint_every_steps=2", f"--keep_checkpoints={steps}"]
    served = [*flags, "--workers=2", "--ps=1"]
    evaluator = evaluator_beside(directory, *flags)

    start = Start(directory, *served)
    start.reach(3)
    os.kill(start.pid("worker", 1), signal.SIGTERM)  # its wish is the run's
    assert start.end(ENDED_S) == 75, start.output()
    assert re.search(r"stopped at step \d+: the same command goes on from", start.output())

    start = Start(directory, *flags)  # one process, no ps
    start.reach(steps_of(directory)[-1] + 3)
    start.process.send_signal(signal.SIGTERM)
    assert start.end(ENDED_S) == 75, start.output()

    for job, line in (("ps", r"ps 0 \(.*\) has ended without a word; the same command goes on from"), ("chief", "coordinator")):
        start = Start(directory, *served)
        start.reach(steps_of(directory)[-1] + 3)
        os.kill(start.pid(job), signal.SIGKILL)
        assert start.end(ENDED_S) == 137, start.output()
        assert re.search(line, start.output()), start.output()
        assert "resuming after step" in start.output()
        assert len(processes_left()) == 1  # the evaluator

    assert evaluator.poll() is None
    assert sha256(run_program("train", f"--run_dir={directory}", *served, *FLAGS)) == undisturbed(steps)[0]
    says = evaluator.communicate(timeout=60)[0]
    assert evaluator.returncode == 0, says
    found, own = evaluations(directory / "evaluator"), evaluations(directory)
    assert list(found) == sorted(int(path.stem[5:]) for path in (directory / "checkpoints").glob("step-*.npz"))
    assert f"evaluated {len(found)} checkpoints" in says
    assert max(found) == steps and set(range(2, steps, 2)) <= set(found)
    assert {step: found[step] for step in own} == own  # the training's, after each epoch
    assert sum(len(lines_of(d, "evaluation")) for d in (directory, directory / "evaluator")) == len(found) + len(own)
    assert list((directory / "evaluator").glob("events.out.tfevents.*"))
    assert processes_left() == []


def test_servers_of_a_cluster_that_nobody_launched_end_by_themselves_when_the_coordinator_dies(tmp_path):
    from cluster import launcher, spec

    tasks = spec.local_cluster(launcher.free_addresses(3), ps=1)
    command = [sys.executable, "-m", "app", "train", f"--run_dir={tmp_path / 'run'}", "--steps=1000", *FLAGS]
    processes = []
    try:
        for i, tf_config in enumerate(tasks):
            with (tmp_path / f"{i}.log").open("w") as log:
                environment = {**os.environ, "TF_CONFIG": tf_config}
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 120
        while not steps_of(tmp_path / "run") and time.monotonic() < deadline:
            time.sleep(0.1)
        processes[0].kill()
        assert [process.wait(timeout=ENDED_S) for process in processes] == [-9, 75, 75]
        assert "error: the coordinator" in _text(tmp_path / "1.log")
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 4])
def test_asynchronous_updates_and_counts_are_complete(tmp_path, workers):
    """Four workers share two cores here. An epoch is round(1437 / 16) = 90 updates of 16 examples."""
    directory = tmp_path / "run"
    flags = ("--asynchronous", "--epochs=2", f"--workers={workers}", "--ps=1", "--schedule=cosine", "--fingerprint_every=30")
    output = run_program("train", f"--run_dir={directory}", *flags, *FLAGS)
    from cluster import checkpoint

    last = max((directory / "checkpoints").glob("step-*.npz"))
    state = checkpoint.from_bytes(last.read_bytes())
    iterations = next(n for n, path in state.facts["paths"].items() if path.endswith("iteration"))
    counts = [a for n, a in state.arrays.items() if n.startswith("sums/")]
    assert (state.step, int(state.arrays[iterations])) == (180, 180)
    assert 90 * 16 in [float(np.ravel(a)[0]) for a in counts]  # the epoch's own, of the mean loss
    rows = [json.loads(line) for line in _text(directory / "metrics.jsonl").splitlines()]
    staleness = [row["staleness"] for row in rows if row["event"] == "step"]
    assert len(staleness) == 180
    assert min(staleness) >= 0
    summary = json.loads(_text(directory / "summary.json"))
    assert summary["staleness_mean"] == pytest.approx(np.mean(staleness))
    assert summary["staleness_max"] == max(staleness) and f"largest {max(staleness):.0f} updates" in output
    assert "the same for any number of workers" not in output
    records = [json.loads(line) for line in _text(directory / "fingerprints.jsonl").splitlines()]
    ids = [tuple(i) for record in records for i in record.get("ids", ())]
    assert len(ids) == len(set(ids)) == 7 * 16  # steps 1, 30, 60 ... 180: no batch twice


REFUSED = [
    (["--asynchronous"], "--asynchronous needs parameter servers"),
    (["--ps=1"], "--ps=1: needs --workers"),
    (["--ps=0", "--workers=2"], "--ps=0: at least 1"),
    (["--ps=1", "--workers=2", "--batch_norm=global", "--noidentical"], "with parameter servers none meets another"),
    (["--ps=1", "--workers=2", "--asynchronous", "--verify_against=somewhere"], "does not go with --asynchronous"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_what_does_not_go_with_parameter_servers_is_one_line(tmp_path, flags, says):
    output = run_program("train", "--dataset=digits", f"--run_dir={tmp_path}", *flags, status=2)
    assert len(output.splitlines()) == 1
    assert says in output


def test_what_is_packed_comes_out_as_it_was(tensorflow):
    from cluster.remote_work import Packed

    tf = tensorflow
    tensors = [
        tf.constant([[1.0, 2.0]]),
        tf.constant(3, tf.int64),
        tf.constant([4.0]),
        tf.zeros([0]),
        tf.constant([5], tf.int64),
    ]
    packed = Packed([tf.TensorSpec(t.shape, t.dtype) for t in tensors])
    vectors = packed.pack(tensors)
    assert len(vectors) == 2
    for before, after in zip(tensors, packed.unpack(vectors), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        np.testing.assert_array_equal(before, after)


class Value:
    """A result that is asked for; `gives` waits for it."""

    def __init__(self, gives):
        self.get = gives


@pytest.fixture
def workers(tensorflow, monkeypatch):
    """`Workers` of a coordinator whose results are the functions in a list, one after another."""
    from cluster import remote_work

    monkeypatch.setattr(remote_work, "_PATIENCE_S", 0.2)

    def make(*gives):
        values = iter(gives)
        coordinator = types.SimpleNamespace(schedule=lambda function, args: Value(next(values)))
        monkeypatch.setattr(tensorflow.distribute.coordinator, "ClusterCoordinator", lambda strategy: coordinator)
        return remote_work.Workers(types.SimpleNamespace(_num_workers=2))

    return make


def test_a_unit_that_does_not_come_is_asked_for_again_and_counts_once(workers):
    wakes = threading.Event()
    asks = workers(lambda: ["first"], wakes.wait, lambda: ["again"])
    unit = object()
    assert asks.ask(unit, 1)() == ["first"]
    result = asks.ask(unit, 2)
    assert result() == ["again"]
    wakes.set()


def test_a_unit_whose_worker_dies_while_its_result_is_copied_is_asked_for_again_and_other_errors_are_told(workers, tensorflow):
    def fails(error):
        def get():
            raise error

        return get

    lost = tensorflow.errors.UnavailableError(None, None, "/job:worker/replica:0/task:1: failed to connect")
    assert workers(fails(lost), fails(lost), lambda: ["again"]).ask(object(), 1)() == ["again"]
    for message in ("/job:worker/task:1: from /job:ps/task:0", "a record is damaged"):
        error = tensorflow.errors.UnavailableError(None, None, message)
        with pytest.raises(type(error), match=message):
            workers(fails(error)).ask(object(), 1)()


def test_the_tree_takes_its_leaves_from_left_to_right():
    from cluster import tree
    from cluster.remote_steps import _Leaves

    for leaves in (1, 3, 6, 8, 12):
        numbers = iter(range(leaves))
        sums = tree.root(_Leaves(lambda numbers=numbers: str(next(numbers))), leaves, "({}+{})".format)
        assert sums == tree.root({(k, 1): str(k) for k in range(leaves)}, leaves, "({}+{})".format)


def test_a_worker_knows_by_the_coordinators_address_whether_the_run_has_begun():
    import socket

    from cluster import latecomer, launcher, spec

    addresses = launcher.free_addresses(3)
    coordinator, worker, ps = (spec.parse(text) for text in spec.local_cluster(addresses, ps=1))
    assert not latecomer.is_one(worker)  # nobody is there
    host, _, port = addresses[0].rpartition(":")
    with socket.create_server((host, int(port))) as server:
        greetings = iter([b"\0\0\x06\x04\0\0\0\0\0" + b"\0" * 6, b'{"lockstep": 1'])

        def answer():
            for greeting in greetings:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        assert latecomer.is_one(worker)
        assert not latecomer.is_one(worker)  # a meeting
        assert not latecomer.is_one(coordinator) and not latecomer.is_one(ps)
