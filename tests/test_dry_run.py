"""--dry_run: what it says is what a training would do, by hand, and it does nothing of it."""

import dataclasses
import json
import math
import os
import re

import pytest

import models
from app import command_line
from app.config import UsageError
from app.manifest import load


@pytest.fixture
def dry_run(tensorflow, tmp_path):
    """The lines for a run directory that is not there: dry_run("--model=lenet", workers=2)."""

    def lines(*flags, workers=1):
        from app import dry_run

        config, options = command_line.parse([f"--run_dir={tmp_path}/run", *flags])
        found = list(dry_run.lines(config, workers, options.recipe))
        assert os.listdir(tmp_path) == []
        return found

    return lines


def numbers(text):
    """0-2, 5 as [0, 1, 2, 5]."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


def rates(lines):
    """{step: rate} of the table."""
    rows = [line.split() for line in lines if re.fullmatch(r" +[\d,]+ +\d+\.\d\d  \S+", line)]
    return {int(step.replace(",", "")): float(rate) for step, _, rate in rows}


def test_the_digits_on_two_workers_are_derived_as_by_hand(dry_run, tmp_path):
    lines = dry_run("--dataset=digits", workers=2)
    assert lines[lines.index("recipe recipes/digits.flags") :][:6] == [  # before: what preparing the data says
        "recipe recipes/digits.flags",
        "small_cnn on digits: 1,437 examples in 64 shards to train with, 360 held out",
        "global batch 128 = 4 logical replicas x 32; 2 on each of 2 workers",
        "40 epochs of 11 steps (round(1,437 / 128)); 1 intra-op thread a worker (part of the run: the bits follow it)",
        "440 steps of 128 examples: 56,320 in all",
        "small_cnn for images of (8, 8, 1): 99,754 parameters, 99,370 of them trained",
    ]
    assert lines[-1] == f"it would be written to {tmp_path}/run"
    assert lines[-2] == "each with --intra_op_threads=1, float32, on its GPUs if it has any, else the CPU"
    cosine = {step: 0.002 * (1 + math.cos(math.pi * step / 440)) / 2 for step in (0, 110, 220, 330, 439)}
    assert rates(lines) == pytest.approx(cosine, rel=1e-5)
    megabytes = {name: float(size) for size, name in re.findall(r"^ +([\d.,]+) MB  (.*)$", "\n".join(lines), re.M)}
    *parts, total = megabytes.values()
    assert sum(parts) == pytest.approx(total, abs=0.4)
    assert megabytes["weights and moving statistics"] == round(4 * 99_754 / 1e6, 1)
    assert megabytes["optimizer"] == round(2 * 4 * 99_370 / 1e6, 1)  # Adam's two averages


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_read_every_shard_once(dry_run, workers):
    lines = dry_run("--dataset=digits", workers=workers)
    found = [re.fullmatch(r"worker (\d+): logical replicas (.*), shards (.*) \((\d+) files, ([\d.]+) MB\)", x) for x in lines]
    found = [match for match in found if match]
    assert [int(match[1]) for match in found] == list(range(workers))
    assert [numbers(match[2]) for match in found] == [
        list(range(4 * w // workers, 4 * (w + 1) // workers)) for w in range(workers)
    ]
    assert sorted(shard for match in found for shard in numbers(match[3])) == list(range(64))
    assert {int(match[4]) for match in found} == {64 // workers}
    manifest = load(command_line.parse(["--dataset=digits"])[0].prepared_path())
    for match in found:
        size = sum(manifest.train.shards[shard].bytes for shard in numbers(match[3]))
        assert float(match[5]) == round(size / 1e6, 1)


@pytest.mark.parametrize("model", ["lenet", "resnet20"])
def test_trained_parameters_are_those_of_the_table_of_networks(dry_run, tmp_path_factory, model):
    network = models.NAMES[model]
    shape = "x".join(map(str, network.input_shape))
    prepared = tmp_path_factory.mktemp("prepared")
    flags = [f"--dataset=synthetic:{shape}:10:128", f"--model={model}", "--shards=4", f"--prepared_dir={prepared}"]
    lines = dry_run(*flags, "--steps=7", "--schedule=step", "--schedule_unit=steps", "--boundaries=3,5")
    assert any(line.endswith(f"parameters, {network.parameters:,} of them trained") for line in lines)
    assert "7 steps, an epoch being 1 step " in "\n".join(lines)
    assert not any(line.startswith("warning") for line in lines)
    batch = "--global_batch_size=256"
    assert (
        "warning: --global_batch_size=256 is more than the 128 training examples: a step sees some of them more than once"
        in dry_run(*flags, "--logical_replicas=4", batch)
    )
    assert rates(lines) == pytest.approx({0: 0.1, 3: 0.01, 5: 0.001, 6: 0.001})


@pytest.mark.parametrize(
    ("flags", "workers", "says"),
    [
        (["--dataset=digits"], 3, "--workers=3 cannot share 4 logical replicas evenly: use one of 1, 2, 4"),
        (["--dataset=digits", "--run_dir={tmp_path}"], 1, "holds something else"),
        (["--dataset=mnist", "--data_dir={tmp_path}", "--prepared_dir={tmp_path}/p"], 1, "train-images-idx3-ubyte"),
        (["--dataset=digits", "--model=resnet50x:net"], 1, "--model=resnet50x:net"),
    ],
)
def test_what_would_stop_the_training_is_told_in_one_line(tensorflow, tmp_path, flags, workers, says):
    from app import dry_run

    (tmp_path / "thesis.tex").write_text("")
    config, _ = command_line.parse([f"--run_dir={tmp_path}/run", *(flag.format(tmp_path=tmp_path) for flag in flags)])
    with pytest.raises(UsageError) as error:
        list(dry_run.lines(config, workers, ""))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_finished_run_is_not_run_again_and_it_says_so(tensorflow, tmp_path):
    from app import dry_run

    config, _ = command_line.parse(["--dataset=digits", f"--run_dir={tmp_path}"])
    list(dry_run.lines(config, 2, ""))  # which prepares the data if need be
    recorded = {**dataclasses.asdict(config), "data_manifest": load(config.prepared_path()).digest()}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    (tmp_path / "summary.json").write_text('{"steps": 440, "sha256": "0123"}')
    last = list(dry_run.lines(config, 2, ""))[-1]
    assert last.startswith(f"{tmp_path} holds this run, finished: 440 steps, sha256 0123.")
