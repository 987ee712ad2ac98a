"""The benchmark: its arithmetic by hand, its flags, its lines and files on two real workers, its parts against a training."""

import csv
import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, run_program

from app import benchmark_flags, benchmark_report, benchmark_scaling, command_line, config

NUMBER = r"-?\d[\d,]*\.\d+"


# ---- arithmetic ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_line_are_those_of_hand_arithmetic():
    """Steps of 100 images in 1, 2, 4 and 4 s: speeds 100, 50, 25, 25; mean 50, variance (2500 + 0 + 625 + 625) / 4 = 937.5."""
    mean, uncertainty, jitter = benchmark_report.speed([100] * 4, [1, 2, 4, 4])
    assert mean == 400 / 11
    assert uncertainty == pytest.approx(math.sqrt(937.5) / 2)
    assert jitter == pytest.approx(1.4826 * 12.5)  # median 37.5; deviations 62.5, 12.5, 12.5, 12.5
    assert benchmark_report.speed([10], [2]) == (5, 0, 0)
    assert benchmark_report.speed([100, 50], [1, 1])[0] == 75  # the last batch of an evaluation may be smaller


def test_lines_are_those_of_tf_cnn_benchmarks():
    rows = [{"step": i + 1, "images": 100, "seconds": s, "loss": 7.12345} for i, s in enumerate((1, 2, 4, 4))]
    assert benchmark_report.header(rows[0]) == "Step  Img/sec  total_loss"
    assert benchmark_report.step_line(rows) == "4  images/sec: 36.4 +/- 15.3 (jitter = 18.5)  7.123"
    rows[-1] |= {"top_1": 0.12344, "top_5": 0.5678}
    assert benchmark_report.header(rows[-1]) == "Step  Img/sec  total_loss  top-1  top-5"
    assert benchmark_report.step_line(rows) == "4  images/sec: 36.4 +/- 15.3 (jitter = 18.5)  7.123  0.1234  0.5678"
    assert benchmark_report.total_line(709.8) == "total images/sec: 709.80"


def test_a_steps_time_is_its_parts():
    rows = [{"seconds": 10.0, "in_graph_s": 9.0, "input_wait_s": 1.0}] * 3 + [
        {"seconds": 99.0, "in_graph_s": 99.0, "input_wait_s": 9}
    ]
    parts = {"call": [0.5, 0.25], "passes": [4.0, 5.375, 6.0], "reduction": [2.375], "update": [1.875]}
    found = benchmark_report.breakdown(rows, parts)
    assert found == {"input wait": 1, "passes": 5, "reduction": 2, "update": 1.5, "rest": -0.5, "host": 1}
    assert benchmark_report.breakdown(rows, {}) == {"input wait": 1, "graph": 8, "host": 1}
    lines = list(benchmark_report.breakdown_lines([found, found]))
    assert re.fullmatch(r"  passes +5000\.00 +50\.0% +5000\.00 +50\.0%", lines[2])
    assert re.fullmatch(r"  step +10000\.00 +10000\.00", lines[-1])
    assert "largest" in next(benchmark_report.breakdown_lines([found] * 5))


def test_bandwidth_is_that_of_the_algorithm_and_a_reduction_ends_with_the_last_worker():
    """A ring all-reduce of S bytes over N sends 2 (N-1)/N S from each: of 4 bytes over 4 in a second 6 bytes."""
    assert benchmark_report.bandwidth(4, 4, 1.0) == 6
    workers = [{"8": {"ring": [1.0, 2.0, 9.0]}}, {"8": {"ring": [2.0, 1.0, 9.0]}}]
    (row,) = benchmark_report.reductions(workers, replicas=2)
    assert row["median_s"] == 2  # of 2, 2, 9
    assert (row["bytes_per_s"], row["bytes_per_s_by_worker"]) == (4, [4, 4])


def test_efficiency_is_against_the_fewest_workers_of_the_same_kind():
    def run(batch, workers, images_per_sec):
        return {"batch": batch, "workers": workers, "images_per_sec": images_per_sec}

    rows = benchmark_report.scaling(
        [run("global", 2, 100), run("global", 4, 150), run("worker", 2, 100), run("worker", 4, 190)]
    )
    assert [(row["speed_up"], row["efficiency"]) for row in rows] == [(1, 1), (1.5, 0.75), (1, 1), (1.9, 0.95)]


# ---- flags ---------------------------------------------------------------------------------------------------------------


def settled(*arguments):
    arguments = benchmark_flags.with_default_data(list(arguments))
    settings, options = command_line.parse(arguments, own=benchmark_flags.Flags)
    return benchmark_flags.settled(settings, options.own, options.workers, None), options.own


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--warmup_step=1"], "did you mean --warmup_steps"),
        (["--warmup_steps=0"], "--warmup_steps=0: at least 1"),
        (["--data=reel"], "synthetic, real"),
        (["--scaling=2,x"], "--scaling=2,x"),
        (["--scaling=1,3"], "--scaling=3 cannot share 4"),
        (["--scaling=1,2", "--workers=2"], "leave out --workers=2"),
        (["--scaling=1,2", "--allreduce"], "two measurements"),
        (["--scaling=1,2", "--data=real", "--shards=4"], "multiple of 8"),
        (["--allreduce_bytes=1,1000"], "4 bytes or more"),
        (["--profile_steps=9:3"], "as 100:110"),
        (["--profile_steps=100:111"], "there are 110 steps"),
        (["--profile_steps=1:2", "--forward_only"], "leave out --forward_only"),
        (["--json=/no/such/folder/x.json"], "--json=/no/such/folder/x.json"),
    ],
)
def test_a_mistake_is_one_line(arguments, says):
    with pytest.raises(config.UsageError) as error:
        settled(*arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_ends_the_program_with_2_before_tensorflow_is_imported():
    program = (
        "import sys; from app.__main__ import main; status = main(['benchmark', '--scaling=0']);"
        "assert not {'tensorflow', 'keras'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_nothing_goes_where_trainings_go_and_a_network_alone_gets_its_own_images():
    settings, _ = settled("--model=resnet20")
    assert settings.dataset == "synthetic:32x32x3:10:1024"
    assert settings.run_dir.startswith("runs/benchmark-")
    assert settled("--run_dir=here")[0].run_dir == "here"
    assert settled("--model=resnet20", "--dataset=digits")[0].dataset == "digits"
    assert settled()[0].dataset == "digits"


def test_flags_reach_the_workers_as_they_were_given():
    _, flags = settled("--forward_only", "--nobreakdown", "--warmup_steps=3", "--scaling=4,1,2", "--json=x.json")
    assert flags.widths == [1, 2, 4]
    assert command_line.parse(flags.to_flags(), own=benchmark_flags.Flags)[1].own == flags


def test_scaling_runs_each_cluster_once_and_ends_with_the_first_that_fails(monkeypatch, capsys, tmp_path):
    seen = []

    def cluster(command, workers):
        options = dict(flag.removeprefix("--").split("=", 1) for flag in command[4:])
        seen.append((workers, int(options["global_batch_size"]), int(options["logical_replicas"])))
        if workers == 4:
            return 7
        worker = {"breakdown_s": {}, "startup_s": {}, "resident_peak_bytes": 1}
        speed = {"images_per_sec": 100.0 * workers, "uncertainty": 0, "jitter": 0, "median_step_s": 0.5, "seconds": 1}
        configuration = {"global_batch_size": seen[-1][1], "logical_replicas": seen[-1][2]}
        with open(options["json"], "w") as file:
            json.dump({**speed, "configuration": configuration, "workers": [worker] * workers, "load_average": 0}, file)
        return 0

    monkeypatch.setattr(benchmark_scaling.launcher, "run", cluster)
    settings, flags = settled(
        "--scaling=1,2", f"--json={tmp_path}/x.json", f"--csv={tmp_path}/x.csv", f"--picture={tmp_path}/x.png"
    )
    assert benchmark_scaling.run(settings, flags) == 0
    assert seen == [(1, 128, 4), (2, 128, 4), (2, 256, 8)]
    rows = json.loads((tmp_path / "x.json").read_text())["scaling"]
    assert [(row["batch"], row["workers"], row["efficiency"]) for row in rows] == [
        ("global", 1, 1), ("global", 2, 1), ("worker", 1, 1), ("worker", 2, 1)
    ]  # fmt: skip
    assert [row["workers"] for row in csv.DictReader((tmp_path / "x.csv").open())] == ["1", "2", "1", "2"]
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert len(re.findall(r"  2 workers +(?:128 +4|256 +8) +200\.0 +500\.0 +2\.00 +100\.0%", capsys.readouterr().out)) == 2
    assert benchmark_scaling.run(settings, dataclasses.replace(flags, scaling="1,4")) == 7
    assert seen[-1] == (4, 128, 4)


# ---- real processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two workers train small_cnn for 2 + 12 steps: (folder of what was written, lines without the workers' numbers)."""
    folder = tmp_path_factory.mktemp("benchmark")
    files = [f"--json={folder}/found.json", f"--csv={folder}/found.csv", f"--picture={folder}/found.png"]
    length = ["--warmup_steps=2", "--benchmark_steps=12", "--display_every=4", "--profile_steps=4:5"]
    small = ["--global_batch_size=64", "--logical_replicas=2", f"--run_dir={folder}/run"]
    output = run_program("benchmark", "--workers=2", *length, *small, *files)
    return folder, [line.removeprefix("[0] ") for line in output.splitlines()]


def test_two_workers_print_the_lines_that_people_parse(measured):
    _, lines = measured
    at = lines.index("Step  Img/sec  total_loss  top-1  top-5")
    figures = rf"images/sec: {NUMBER} \+/- {NUMBER} \(jitter = {NUMBER}\)  {NUMBER}  [01]\.\d{{4}}  [01]\.\d{{4}}"
    steps = [line for line in lines[at:] if "images/sec: " in line and "total" not in line]
    assert [line.split()[0] for line in steps] == ["4", "8", "12"]
    assert all(re.fullmatch(rf"\d+  {figures}", line) for line in steps)
    assert sum(bool(re.fullmatch(rf"total images/sec: {NUMBER}", line)) for line in lines) == 1
    assert "global batch 64 = 2 logical replicas x 32; 1 on each of 2 workers" in lines
    for part in ("input wait", "passes", "reduction", "update", "rest", "host"):
        assert any(re.fullmatch(rf"  {part}( +{NUMBER} +{NUMBER}%){{2}}", line) for line in lines), part


def test_what_is_written_is_what_is_printed(measured):
    folder, lines = measured
    found = json.loads((folder / "found.json").read_text())
    assert [step["step"] for step in found["steps"]] == list(range(1, 13))
    seconds = sum(step["seconds"] for step in found["steps"])
    assert found["images_per_sec"] == pytest.approx(64 * 12 / seconds)
    assert f"total images/sec: {found['images_per_sec']:.2f}" in lines
    assert benchmark_report.step_line(found["steps"][:8]) in lines
    assert found["replicas"] == len(found["workers"]) == 2
    assert sum(found["workers"][0]["breakdown_s"].values()) == pytest.approx(np.median([s["seconds"] for s in found["steps"]]))
    for worker in found["workers"]:
        parts, startup = worker["breakdown_s"], worker["startup_s"]
        assert all(parts[name] >= 0 for name in ("input wait", "passes", "reduction", "update", "host"))
        assert parts["passes"] > parts["host"]
        assert {"launcher", "imports", "cluster", "data", "network", "tracing", "first step"} <= set(startup)
        assert all(value >= 0 for value in startup.values())
        assert worker["resident_peak_bytes"] > 100e6
    rows = list(csv.DictReader((folder / "found.csv").open()))
    assert [float(row["seconds"]) for row in rows] == [step["seconds"] for step in found["steps"]]
    assert (folder / "found.png").read_bytes()[:4] == b"\x89PNG"


def test_each_worker_leaves_a_trace_in_its_own_folder_and_nothing_else_is_written(measured):
    folder, _ = measured
    files = [path.relative_to(folder / "run") for path in (folder / "run").rglob("*") if path.is_file()]
    assert sorted(path.parts[0] for path in files) == ["worker-0", "worker-1"]
    assert all(re.fullmatch(r"worker-\d/plugins/profile/[\w]+/[^/]+\.xplane\.pb", str(path)) for path in files)
    assert all((folder / "run" / path).stat().st_size > 1000 for path in files)


def test_reductions_of_both_forms_are_swept_on_two_workers(tmp_path):
    path = tmp_path / "found.json"
    sizes = ["--allreduce_bytes=100000,1000", "--benchmark_steps=5"]
    output = run_program("benchmark", "--allreduce", "--workers=2", *sizes, f"--json={path}")
    rows = json.loads(path.read_text())["allreduce"]
    asked = [(1000, "ordered"), (1000, "ring"), (100_000, "ordered"), (100_000, "ring")]
    assert [(row["bytes"], row["form"]) for row in rows] == asked
    for row in rows:
        assert row["rounds"] == 5
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["median_s"])  # 2 (N-1)/N is 1
        assert len(row["bytes_per_s_by_worker"]) == 2
        cells = rf"{row['bytes']:,} +{row['form']} +{1e3 * row['median_s']:.3f} +{NUMBER} +{NUMBER}"
        assert re.search(rf"^\[0\] +{cells}$", output, re.M)


def test_ctrl_c_ends_all_clusters_of_a_scaling():
    command = [sys.executable, "-m", "app", "benchmark", "--scaling=1,2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout.readline() == "1 worker, global batch 128, 4 logical replicas\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "2 workers" not in output


@pytest.mark.soak
def test_scaling_on_one_and_two_workers_with_the_data_set(tmp_path):
    flags = ["--warmup_steps=2", "--benchmark_steps=5", "--data=real", "--dataset=digits", "--forward_only"]
    output = run_program("benchmark", "--scaling=1,2", *flags)
    assert len(re.findall(rf"^  [12] workers? +\d+ +\d +{NUMBER} +{NUMBER} +{NUMBER} +{NUMBER}%$", output, re.M)) == 4


# ---- in this process -----------------------------------------------------------------------------------------------------


def test_invented_data_has_the_shape_of_the_data_set(tensorflow):
    """What is read of the digits, and what stands for it."""
    from app import benchmark_data, data

    settings, flags = settled("--dataset=digits", "--data=real")
    read = data.load(settings, lambda *_: None)
    shape, classes = benchmark_data._shape(settings)
    assert (shape, classes) == (read.image_shape, len(read.manifest.classes))
    for one_hot, evaluation, streams in ((False, False, read.training), (False, True, read.evaluation)):
        invented = benchmark_data.InMemory(shape, classes, 128, 1, one_hot, evaluation)
        assert invented.element_spec == streams.element_spec
        batch = next(iter(invented.examples(1, 3, 4).batch(8, drop_remainder=True)))
        tensorflow.nest.map_structure(lambda s, t: s.shape.assert_is_compatible_with(t.shape[1:]), invented.element_spec, batch)
        again = next(iter(invented.examples(2, 3, 4).batch(4, drop_remainder=True)))
        np.testing.assert_array_equal(tensorflow.nest.flatten(batch)[0][4:], tensorflow.nest.flatten(again)[0])


def test_the_parts_of_a_step_do_the_step(devices):
    """Passes, reduction and update, each by itself, change the weights as `fit` does; a replica has two nodes of the tree."""
    import keras

    import cluster
    from app.benchmark_data import InMemory
    from cluster import step_parts

    batch, logical, rate = 12, 6, 0.125
    strategy, streams = devices(2), InMemory((4, 4, 1), 3, batch, seed=5)

    with strategy.scope():
        inputs = keras.Input((4, 4, 1))
        outputs = keras.layers.Dense(3, kernel_initializer="zeros")(keras.layers.Flatten()(inputs))
        trainer = cluster.Trainer(keras.Model(inputs, outputs), batch, logical)
        trainer.compile(keras.optimizers.SGD(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    states = []
    for _ in range(2):
        trainer.fit(streams, steps_per_epoch=1, verbose=0)
        states.append(trainer.model.get_weights())
    before, after = states
    trainer.model.set_weights(before)
    made = trainer.step
    seconds = step_parts.measure(trainer, streams, True, rounds=2)
    assert {name: len(times) for name, times in seconds.items()} == {"call": 2, "passes": 2, "reduction": 2, "update": 2}
    updates = trainer.step - made  # of one gradient, that of the weights before
    for now, start, once in zip(trainer.model.get_weights(), before, after, strict=True):
        assert np.abs(once - start).max() > 1e-4
        np.testing.assert_allclose(now - start, updates * (once - start), rtol=1e-4, atol=1e-6)

    evaluated = InMemory((4, 4, 1), 3, batch, seed=5, evaluation=True)
    trainer.evaluate(evaluated, steps=1, verbose=0)
    assert set(step_parts.measure(trainer, evaluated, False, rounds=1)) == {"call", "passes", "reduction", "update"}
