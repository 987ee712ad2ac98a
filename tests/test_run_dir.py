"""A run directory: what a run leaves in it and who wrote that, which ones are refused; a finished run stays as it is."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from conftest import ROOT, run_program, sha256

from app import command_line, run_dir
from app.config import Config, UsageError
from cluster import spec
from cluster.launcher import free_addresses

IN_SECONDS = 5
EVENTS = r"events\.out\.tfevents\.\d+\..+\.(\d+)\.\d+"  # time, host, process, number: TensorBoard's name for the file

# Fields that say where and how a run is computed; every other one decides its result.
NO_RESULT = {
    "data_dir",
    "prepared_dir",
    "eval_every_steps",
    "eval_at_steps",
    "eval_at_start",
    "steps_per_execution",
    "communication",
    "start_timeout_s",
    "checkpoint_every_steps",
    "checkpoint_every_min",
    "keep_checkpoints",
    "max_skipped_steps",
    "step_timeout_s",
    "evaluator_timeout_min",
    "run_dir",
    "tensorboard",
    "log_every_steps",
    "profile_steps",
    "fingerprint_every",
    "verify_against",
    "quiet",
    "verbose",
}


def files_of(directory):
    """{relative path: (size, time of the last change)} of all files."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_a_run_leaves_these_files_and_nothing_else(main_job):
    directory, _ = main_job
    left = [re.sub(EVENTS, "events", name) for name in files_of(directory)]
    events = [f"{folder}/events" for folder in ("train", "validation", "worker-0", "worker-1")]
    documents = ["config.json", "metrics.csv", "metrics.jsonl", "model.keras", "summary.json"]
    if json.loads((directory / "config.json").read_text()).get("fingerprint_every"):
        documents.append("fingerprints.jsonl")
    checkpoints = [name for name in left if re.fullmatch(r"checkpoints/step-\d{8}\.npz", name)]
    assert 2 <= len(checkpoints) <= 3 and "checkpoints/step-00000440.npz" in checkpoints  # the last two, and the best
    assert sorted(left) == sorted([*documents, *events, *checkpoints, "worker-0/log.txt", "worker-1/log.txt"])
    folders = ["checkpoints", "train", "validation", "worker-0", "worker-1"]
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == folders


def test_the_chief_writes_what_is_global_and_each_worker_its_own_folder(main_job):
    """Names of event files hold the number of the process that wrote them."""
    directory, output = main_job
    process = {os.path.dirname(name): match[1] for name in files_of(directory) if (match := re.search(EVENTS, name))}
    assert process["train"] == process["validation"] == process["worker-0"] != process["worker-1"]
    log = (directory / "worker-0" / "log.txt").read_text().splitlines()
    assert len(log) > 40
    assert any(line.startswith("global batch 128 = 4 logical replicas") for line in log)  # the plan too
    assert set(log) <= {line.removeprefix("[0] ") for line in output.splitlines()}
    assert (directory / "worker-1" / "log.txt").read_text() == ""  # it had nothing to say


def test_config_json_holds_the_configuration_resolved_and_what_it_ran_with(main_job):
    directory, _ = main_job
    recorded = json.loads((directory / "config.json").read_text())
    config, _ = command_line.parse(["--dataset=digits", f"--run_dir={directory}"])
    assert {name: recorded[name] for name in Config.__dataclass_fields__} == dataclasses.asdict(config)
    assert (recorded["logical_replicas"], recorded["intra_op_threads"], recorded["replicas"]) == (4, 1, 2)
    assert (recorded["classes"], recorded["label_offset"]) == ([str(digit) for digit in range(10)], 0)
    assert len(set(recorded["cluster"])) == len(recorded["devices"]) == 2
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    assert recorded["versions"].items() >= {**versions, "python": platform.python_version()}.items()
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert recorded["source_revision"].rstrip("+") == (git.stdout.strip() if git.returncode == 0 else "unknown")


def test_summary_json_holds_what_was_printed(main_job):
    directory, output = main_job
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["sha256"], summary["steps"], summary["replicas"]) == (sha256(output), 440, 2)
    printed = f"held out: {round(summary['val_top_1'] * 360)} of 360 right, top-1 {summary['val_top_1']:.4f}"
    assert f"{printed} (best {summary['best_val_top_1']:.4f} in epoch {summary['best_epoch']})" in output
    assert f"./run.sh evaluate --run_dir={directory}" in output
    assert f"./run.sh tensorboard --run_dir={directory}" in output


def test_model_keras_opens_with_plain_keras(main_job, tensorflow):
    import keras

    directory, _ = main_job
    model = keras.models.load_model(directory / "model.keras")
    assert model.count_params() == json.loads((directory / "summary.json").read_text())["parameters"] == 99_754


@pytest.fixture
def without_tensorflow(tmp_path, monkeypatch):
    """Whoever imports TensorFlow fails."""
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('TensorFlow is imported')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))


@pytest.mark.parametrize("workers", [None, 2, 4])
def test_a_finished_run_started_again_says_so_in_seconds_and_stays_as_it_is(main_job, without_tensorflow, workers):
    directory, output = main_job
    before, began = files_of(directory), time.monotonic()
    flags = [f"--workers={workers}"] if workers else []
    again = run_program("train", "--dataset=digits", f"--run_dir={directory}", *flags)
    assert time.monotonic() - began < IN_SECONDS
    assert again.splitlines() == [
        f"{directory} holds this run, finished: 440 steps, sha256 {sha256(output)}. Delete the directory, or name another "
        "--run_dir, to train it again"
    ]
    assert files_of(directory) == before


SMALL = ["--dataset=synthetic:8x8x1:3:256", "--global_batch_size=32", "--logical_replicas=2", "--shards=4", "--steps=2"]


def on_two_machines(folders, *flags):
    """[(status, output)] of the two workers of a cluster, each with a disk of its own."""
    processes = []
    for folder, tf_config in zip(folders, spec.local_cluster(free_addresses(2)), strict=True):
        places = [f"--run_dir={folder}/run", f"--prepared_dir={folder}/prepared"]
        command = [sys.executable, "-m", "app", "train", *SMALL, *places, *flags]
        environment = {**os.environ, "TF_CONFIG": tf_config}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_on_a_disk_of_its_own_a_worker_finds_its_own_folder_alone_and_hears_when_all_is_done(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    (status, output), other = on_two_machines(folders, "--quiet")
    assert (status, other) == (0, (0, ""))  # who is not the chief is silent
    assert [line.split()[0] for line in output.splitlines()] == ["trained", "held", "saved", "next", "sha256"]
    assert {name.split("/")[0] for name in files_of(folders[1] / "run")} == {"worker-1"}
    assert "worker-1" not in os.listdir(folders[0] / "run")
    before = [files_of(folder) for folder in folders]
    again = on_two_machines(folders)
    for status, text in again:
        assert status == 0
        [line] = text.splitlines()
        assert re.search(f"holds this run, finished: 2 steps, sha256 {sha256(output)}", line)
    assert [files_of(folder) for folder in folders] == before


def configured(directory, *flags):
    return command_line.parse(["--prepared_dir=/nowhere", f"--run_dir={directory}", *flags])[0]


def leave(directory, files):
    """Makes files, {name: text}; of config.json, the text or a Config."""
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**dataclasses.asdict(text), "replicas": 2}) if isinstance(text, Config) else text
        (directory / name).write_text(text)


def test_another_configuration_is_refused_with_the_fields_that_differ(tmp_path):
    theirs = configured(tmp_path, "--seed=3", "--learning_rate=0.5", "--quiet", "--steps_per_execution=8")
    leave(tmp_path, {"config.json": theirs, "summary.json": '{"steps": 1, "sha256": "0"}'})
    with pytest.raises(UsageError) as error:
        run_dir.finished(configured(tmp_path))
    [line] = str(error.value).splitlines()
    assert "another run: seed is 3 there and 1 here; learning_rate is 0.5 there and 0.002 here." in line
    assert "quiet" not in line and "steps_per_execution" not in line


def test_a_run_on_other_data_of_the_same_name_is_another_run(main_job, tmp_path):
    """As after a change of the raw data, or with --data_dir and --prepared_dir of another set of pictures."""
    directory, _ = main_job
    recorded = json.loads((directory / "config.json").read_text())
    leave(tmp_path, {"config.json": json.dumps({**recorded, "data_manifest": "0" * 64})})
    leave(tmp_path, {"summary.json": (directory / "summary.json").read_text()})
    with pytest.raises(UsageError, match="holds another run: the data in data/prepared/digits-64shards-seed0 is another"):
        run_dir.finished(command_line.parse(["--dataset=digits", f"--run_dir={tmp_path}"])[0])


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "x"},
        {"worker-0/log.txt": "", "thesis.tex": "x"},
        {"train/cats/1.jpg": "x", "validation/cats/2.jpg": "x"},  # a data set of pictures
        {"model.keras": "x"},
        {"config.json": '{"hidden_size": 768, "vocab_size": 30522}', "vocab.txt": "x"},  # some other program's
        {"config.json": "[]"},
        {"config.json": "{"},
        {"paper.tmp": "x"},
    ],
    ids=str,
)
def test_a_directory_with_something_else_is_refused_and_not_touched(tmp_path, files):
    leave(tmp_path, files)
    before = files_of(tmp_path)
    with pytest.raises(UsageError, match="holds something else") as error:
        run_dir.finished(configured(tmp_path))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert files_of(tmp_path) == before


def test_an_unfinished_run_is_taken_up_whether_it_has_trained_or_not(tmp_path):
    config = configured(tmp_path)
    started = {"config.json": config, "metrics.jsonl": "", "metrics.csv": "", "worker-0/log.txt": "", "train/events": "x"}
    for number, files in enumerate([{}, {"worker-0/log.txt": ""}, {"config.json.tmp": "{", "worker-1/events": "x"}, started]):
        folder = tmp_path / str(number)
        folder.mkdir()
        leave(folder, files)
        assert run_dir.finished(configured(folder)) is None
    leave(tmp_path / "3", {"metrics.jsonl": '{"event": "step", "step": 1}\n'})
    assert run_dir.finished(configured(tmp_path / "3")) is None
    assert run_dir.finished(configured(tmp_path / "not" / "there")) is None
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("why", ["Is a directory", "it is no text"])
def test_metrics_that_cannot_be_read_are_told_in_one_line(tmp_path, why):
    leave(tmp_path, {"config.json": configured(tmp_path)})
    if why == "Is a directory":
        (tmp_path / "metrics.jsonl").mkdir()
    else:
        (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError) as error:
        run_dir.finished(configured(tmp_path))
    assert str(error.value) == f"--run_dir={tmp_path}: metrics.jsonl cannot be read ({why}): name a new directory"


@contextlib.contextmanager
def without_privileges():
    """root may write anywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("folder", ["", "run", "a/b/run"])
def test_a_directory_that_cannot_be_written_is_refused(folder):
    with tempfile.TemporaryDirectory() as theirs:  # not in pytest's, which is root's alone
        os.chmod(theirs, 0o555)
        path = os.path.join(theirs, folder)
        with without_privileges(), pytest.raises(UsageError, match=f"--run_dir={path} cannot be written") as error:
            run_dir.finished(configured(path))
        assert "\n" not in str(error.value)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match=f"--run_dir={path} cannot be used: Not a directory"):
            run_dir.finished(configured(path))


def other(field):
    """Another value of a field."""
    if field.type is bool:
        return not field.default
    return "another" if field.type is str else field.default + 1


def test_default_names_differ_exactly_if_results_may():
    fields, base = dataclasses.fields(Config), Config()
    changed = {f.name: dataclasses.replace(base, **{f.name: other(f)}).default_run_dir() for f in fields}
    assert {name for name, directory in changed.items() if directory == base.default_run_dir()} == NO_RESULT & set(changed)
    different = [directory for name, directory in changed.items() if name not in NO_RESULT]
    assert len({*different, base.default_run_dir()}) == len(different) + 1


def test_the_default_name_is_the_same_for_every_worker_and_any_number_of_them():
    cluster = ["--worker_hosts=one:1,two:1"]
    starts = [[], ["--workers=1"], ["--workers=4"], [*cluster, "--task_index=0"], [*cluster, "--task_index=1"]]
    assert len({command_line.parse(["--dataset=digits", *flags])[0].run_dir for flags in starts}) == 1


def test_default_names_are_plain_whatever_the_names_of_set_and_network_are():
    datasets = ("synthetic:8x8x1:3:256", "synthetic:8x8x1:3:25", "my.data:digits", "my.data:digits2", "my_data:digits")
    models = ("keras:EfficientNetV2B0", "my.nets:small", "my.nets:small2", "resnet50_v1.5")
    names = [Config(dataset=dataset, model=model).default_run_dir() for dataset in datasets for model in models]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"runs/[A-Za-z0-9][A-Za-z0-9_.-]*-[0-9a-f]{8}", name) for name in names), names


def test_a_file_is_written_whole_or_not_at_all(tensorflow, tmp_path):
    path = tmp_path / "config.json"
    run_dir.write(str(path), "one")
    with pytest.raises(TypeError):
        run_dir.write(str(path), np.ones(3))
    assert path.read_text() == "one"
    run_dir.write(str(path), "two")
    assert (path.read_text(), os.listdir(tmp_path)) == ("two", ["config.json"])
