"""What all tests share: a deterministic TensorFlow with three CPU devices, clusters started once, and nothing left behind."""

import concurrent.futures
import fcntl
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import uuid

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import app  # noqa: E402, F401 - says with which kernels TensorFlow computes, before it is imported

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# Under nohup or in the background of a script they are ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ["LOCKSTEP_TESTS"] = MARK = uuid.uuid4().hex  # every process that a test starts inherits it


def pytest_addoption(parser):
    parser.addoption("--soak", action="store_true", help="also run the long tests: twenty endings in a row, all causes")


def pytest_configure(config):
    config.addinivalue_line("markers", "soak: long; runs with --soak")
    config.addinivalue_line("markers", "processes: starts real processes; runs beside one other such test at most")
    config.addinivalue_line("markers", "alone: measures deadlines, or leaves no core free; runs when nothing else does")


# Files of tests, by how `python -m tests` runs them; all others run side by side.
PROCESSES = (
    *("benchmark", "config", "digits", "doctor", "drift", "evaluator", "faults", "identity", "monitoring"),
    *("parameter_servers", "run_dir", "sets", "study", "verify", "watch_workers"),
)
ALONE = ("clusters_doc", "launcher", "preflight", "reliability", "rendezvous", "restarts", "terminal")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    for item in items:
        name = item.path.stem.removeprefix("test_")
        if name in PROCESSES:
            item.add_marker(pytest.mark.processes)
        if name in ALONE:
            item.add_marker(pytest.mark.alone)
    if not config.getoption("--soak"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="long: ./run.sh test --soak"))


def processes_left() -> list[str]:
    """Command lines of living processes that the tests have started."""
    left = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            marked = f"LOCKSTEP_TESTS={MARK}".encode() in (entry / "environ").read_bytes()
            if marked and int(entry.name) != os.getpid():
                left.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return left


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_running():
    yield
    assert processes_left() == []


@pytest.fixture(scope="session")
def tensorflow():
    """TensorFlow as `cluster.run` sets it up, with three logical CPU devices."""
    import tensorflow as tf

    import cluster

    cluster.configure()
    tf.get_logger().setLevel("ERROR")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    return tf


@pytest.fixture(scope="session")
def devices(tensorflow):
    """A strategy of n replicas in this process: devices(2)."""
    made = {}

    def strategy(n):
        if n not in made:
            made[n] = tensorflow.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)])
        return made[n]

    return strategy


@pytest.fixture
def symbolic(tensorflow):
    """Builds a network without weights: symbolic(name, input_shape, classes, dtype policy).

    In a StatelessScope Keras only notes which variables are to be initialised later. The notes, and the policy, are of the
    thread, and go with it. (Milliseconds to 2 s a network; with weights, VGG alone takes seconds and 600 MB.)
    """
    import keras

    import models

    def build(*arguments, policy="float32"):
        keras.config.set_dtype_policy(policy)
        with keras.StatelessScope(initialize_variables=False):
            return models.build(*arguments)

    def in_a_thread(*arguments, **keywords):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(build, *arguments, **keywords).result()

    return in_a_thread


def run_program(*flags, status=0, timeout=300) -> str:
    """All that the program prints, when it has ended with this status."""
    done = subprocess.run([sys.executable, "-m", "app", *flags], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def sha256(output: str) -> str:
    """The hash in a summary."""
    return re.search(r"sha256 +([0-9a-f]{64}) ", output)[1]


@pytest.fixture(scope="session")
def main_job(tmp_path_factory):
    """README's first command, on real data, which several files look at: (run directory, output)."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which all processes of this run of pytest share: the first makes it, the others wait
    with open(root / "main_job.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory, output = root / "main_job", root / "main_job.txt"
        if not output.exists():
            output.write_text(run_program("train", "--dataset=digits", "--workers=2", f"--run_dir={directory}"))
    return directory, output.read_text()


class Clusters:
    """Runs cases of `cases.py` on W worker processes, each list of cases in one started cluster."""

    def __init__(self, directory):
        self._directory, self._results = directory, {}

    def run(self, workers: int, names: tuple[str, ...]) -> list[dict]:
        """What each worker saw: [{case: result}] by worker."""
        if (workers, names) not in self._results:
            output = self._directory / f"{workers}-{names[0]}"
            output.mkdir()
            command = [sys.executable, "-m", "cluster.launcher", f"--workers={workers}", str(ROOT / "tests/cases.py")]
            done = subprocess.run([*command, str(output), *names], capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stdout + done.stderr
            self._results[workers, names] = [json.loads((output / f"worker-{i}.json").read_text()) for i in range(workers)]
        return self._results[workers, names]


@pytest.fixture(scope="session")
def clusters(tmp_path_factory):
    return Clusters(tmp_path_factory.mktemp("clusters"))
