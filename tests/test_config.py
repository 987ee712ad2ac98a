"""Flags and recipes: resolved once; a mistake is refused in one line, before TensorFlow is imported."""

import concurrent.futures
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest

from app import command_line, config, manifest, schedules
from cluster.launcher import free_addresses


def test_the_recipe_of_a_data_set_is_its_default_and_flags_come_on_top():
    resolved, options = command_line.parse(["--dataset=digits", "--epochs=3", "--workers=2"])
    assert (resolved.optimizer, resolved.epochs, resolved.logical_replicas, options.workers) == ("adam", 3, 4, 2)
    assert command_line.parse(resolved.to_flags())[0] == resolved


def test_run_directories_differ_exactly_if_results_may():
    def directory(*flags):
        return command_line.parse(list(flags))[0].run_dir

    assert directory() == directory("--workers=2") == directory("--communication=ring", "--steps_per_execution=4")
    assert len({directory(), directory("--seed=2"), directory("--logical_replicas=2"), directory("--noidentical")}) == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dataset=digit"], "did you mean digits"),
        (["--model=small_cn"], "did you mean small_cnn"),
        (["--model=keras:Nothing"], "--model=keras:Nothing: network 'keras:Nothing' is unknown"),
        (["--model=keras:Resnet50"], "did you mean keras:ResNet50?"),
        (["--epoch=3"], "--epochs"),
        (["--optimizer=sdg"], "did you mean sgd"),
        (["--workers=0"], "at least 1"),
        (["--logical_replicas=3"], "126 or 129"),
        (["--global_batch_size=0"], "at least 1"),
        (["--seed=99999999999"], "at most 2147483647"),
        (["--eval_at_steps=5,x"], "--eval_at_steps=5,x"),
        (["--learning_rate=fast"], "learning_rate"),
        (["--learning_rate=nan"], "--learning_rate=nan"),
        (["--batch_norm=global"], "--noidentical"),
        (["--batch_norm=global", "--noidentical", "--jit_compile"], "--jit_compile"),
        (["--batch_norm=batch"], "replica, global"),
        (["stray"], "'stray'"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_do(flags, says):
    with pytest.raises(config.UsageError) as error:
        command_line.parse(flags)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(config.UsageError) as error:
        command_line.parse(["--model=x", "--schedule=y", "--epochs=0"])
    assert len(str(error.value).splitlines()) == 3


TWO = ["127.0.0.1:{free}", "127.0.0.1:1"]
TF_CONFIG = json.dumps({"cluster": {"worker": TWO}, "task": {"type": "worker", "index": 0}})
KEYWORD = '{"cluster": {"master": ["a:1"]}, "task": {"type": "master", "index": 0}}'

# name: (arguments, what the one line says, TF_CONFIG). {port} is taken, {free} is not; {tmp} has one file, a text, and a.keras,
# {run} a run that is not finished, {lacking} and {cut} data that lacks a file, or a byte of it.
MISTAKES = {
    "data set": ("--dataset=fashion_mnst", "--dataset=fashion_mnst is unknown; did you mean fashion_mnist?", None),
    "network": ("--model=resnet-50", "--model=resnet-50 is unknown; did you mean resnet50?", None),
    "network's form": ("--model=keras:", "--model=keras:", None),
    "optimizer": ("--optimizer=adamm", "did you mean adam?", None),
    "schedule": ("--schedule=cosinus", "did you mean cosine?", None),
    "nothing near": ("--schedule=xyz", "--schedule=xyz is unknown. One of: constant, step, ", None),
    "flag": ("--epoch=3", "--epoch is no flag; did you mean --epochs?", None),
    "value": ("--epochs=three", "--epochs=three: a whole number", None),
    "boolean": ("--noquiet=1", "--noquiet", None),
    "a schedule's flag": ("--dataset=mnist --piecewise=1;3;.1", "--piecewise=1;3;.1 is for --schedule=piecewise", None),
    "a schedule's lack": ("--dataset=mnist --schedule=step", "needs --boundaries, as 30,60,80,90, or --decay_every", None),
    "two clippings": ("--clip_norm=1 --clip_value=1", "--clip_norm=1.0 and --clip_value=1.0: give one", None),
    "loss scale": ("--loss_scale=128", "--loss_scale=128 is for --dtype=mixed_float16", None),
    "an optimizer's flag": ("--optimizer=sgd --rho=0.5", "--rho=0.5: --optimizer=sgd has none", None),
    "N and K": ("--workers=3", "--workers=3 cannot share 4 logical replicas evenly: use one of 1, 2, 4", None),
    "B and K": ("--global_batch_size=130 --logical_replicas=4", "use a batch of 128 or 132", None),
    "shards and K": ("--shards=63 --logical_replicas=4", "use --shards=64, or --logical_replicas out of 1, 3, 7, 9", None),
    "no flagfile": ("--flagfile={tmp}/none.flags", "{tmp}/none.flags", None),
    "command": ("trian", "'trian' is no command; did you mean train?", None),
    "another command": ("tensorbord", "did you mean tensorboard?", None),
    "not a flag": ("train digits", "'digits' is not a flag", None),
    "no run to evaluate": ("evaluate --run_dir={tmp}/none", "--run_dir={tmp}/none is no run", None),
    "something else to evaluate": ("evaluate --run_dir={tmp}", "--run_dir={tmp} is no run", None),
    "nothing to show": ("tensorboard --run_dir={tmp}/none", "--run_dir={tmp}/none is no directory", None),
    "raw data": ("--dataset=mnist --data_dir={tmp}/none", "mnist: looked for train-images-idx3-ubyte, ", None),
    "raw data of CIFAR": ("--workers=2 --dataset=cifar10 --data_dir={tmp}", "cifar10: looked for data_batch_1.bin, ", None),
    "raw data, not named": ("--dry_run --dataset=cifar100", "--data_dir is not given", None),
    "no folder": ("benchmark --data=real --dataset=folder --data_dir={tmp}/none", "folder: {tmp}/none is no folder", None),
    "no folder of ImageNet": ("prepare --dataset=imagenet --data_dir={tmp}/none", "imagenet: {tmp}/none cannot be read", None),
    "no files of ImageNet": (
        "verify --steps=1 --dataset=imagenet --data_dir={tmp}",
        "imagenet: looked for train-00000-of-... in {tmp}",
        None,
    ),
    "raw data of seeds": ("repeat --dataset=mnist --data_dir={tmp}", "mnist: looked for ", None),
    "raw data by workers": ("benchmark --data=real --scaling=1,2 --dataset=mnist --data_dir={tmp}", "mnist: looked for ", None),
    "a module": ("--model=resnet50x:net", "--model=resnet50x:net: cannot import it: ModuleNotFoundError: No module", None),
    "a data set's module": ("--dataset=no_such_module:load", "no_such_module:load: cannot import it: ", None),
    "a shard": ("--prepared_dir={lacking}", "{lacking}/digits-64shards-seed0 cannot be used; remove the folder", None),
    "a shard's size": ("--workers=2 --prepared_dir={cut}", "has 9 bytes; by the manifest it has 10", None),
    "no model": ("evaluate --keras_file={tmp}/none.keras", "--keras_file={tmp}/none.keras does not exist", None),
    "no model's file": ("evaluate --keras_file={tmp}/thesis.tex", "--keras_file={tmp}/thesis.tex is no model", None),
    "a folder for predictions": (
        "evaluate --keras_file={tmp}/a.keras --predictions={tmp}",
        "--predictions={tmp} is a fol",
        None,
    ),
    "nowhere for a picture": (
        "evaluate --keras_file={tmp}/a.keras --confusion={tmp}/none/a.png",
        "--confusion={tmp}/none/a.png: there is no folder {tmp}/none",
        None,
    ),
    "a port that is taken": ("tensorboard --run_dir={tmp} --port={port}", "--port={port}: another program has it", None),
    "port to show it": ("tensorboard --run_dir={tmp} --port=99999", "--port=99999", None),
    "something else there": ("--run_dir={tmp}", "--run_dir={tmp} holds something else (a.keras, thesis.tex), and no run", None),
    "a file there": ("--run_dir={tmp}/thesis.tex", "--run_dir={tmp}/thesis.tex cannot be used: Not a directory", None),
    "another run": ("--run_dir={run} --prepared_dir={tmp} --seed=2", "holds another run: seed is 1 there and 2 here", None),
    "dry run of nothing": ("--dry_run --dataset=digit", "did you mean digits?", None),
    "hosts without index": ("--worker_hosts=a:1,b:2", "--worker_hosts=a:1,b:2 needs --task_index", None),
    "index without hosts": ("--task_index=0", "--task_index=0 needs --worker_hosts", None),
    "two clusters": ("--workers=2", "--workers=2 starts a cluster here, but TF_CONFIG says", TF_CONFIG),
    "two clusters by flags": ("--workers=2 --worker_hosts=a:1,b:2 --task_index=0", "--worker_hosts says", None),
    "not JSON": ("", "TF_CONFIG is not JSON", "{cluster:"),
    "clusters": (
        "",
        "rename 'clusters' to 'cluster'",
        '{"clusters": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
    ),
    "master": ("", "'master' is now 'chief'", KEYWORD),
    "a cluster of three": ("", "a cluster of 3 workers cannot share 4", TF_CONFIG.replace('"127.0.0.1:1"', '"a:1", "b:1"')),
    "own port": (
        "",
        "worker 0 cannot open its address 127.0.0.1:{port}: Address already in use",
        json.dumps({"cluster": {"worker": ["127.0.0.1:{port}"]}, "task": {"type": "worker", "index": 0}}),
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """{name: (seconds, what the program did)} of all MISTAKES, two at a time. Whoever imports TensorFlow fails."""
    tmp, run, stub, lacking, cut = (tmp_path_factory.mktemp(name) for name in ("tmp", "run", "stub", "lacking", "cut"))
    (tmp / "thesis.tex").write_text("")
    (stub / "tensorflow.py").write_text("raise RuntimeError('TensorFlow is imported')")
    (run / "config.json").write_text(json.dumps(dataclasses.asdict(command_line.parse(["--dataset=digits"])[0])))
    (run / "metrics.jsonl").write_text("{}")
    with zipfile.ZipFile(tmp / "a.keras", "w") as archive:
        for name in ("config.json", "model.weights.h5"):
            archive.writestr(name, "")
    shard = manifest.Split((manifest.Shard("train-0.tfrecord", 1, 10, "", np.zeros(1, np.int64)),))
    for folder in (lacking, cut):
        made = manifest.Manifest("digits", ("a",), None, "encoded", "x", (), (), 0, 0, shard, manifest.Split(()))
        manifest.save(made, folder / "digits-64shards-seed0")
    (cut / "digits-64shards-seed0" / "train-0.tfrecord").write_text("x" * 9)
    (free,) = (address.rpartition(":")[2] for address in free_addresses(1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"tmp": tmp, "run": run, "lacking": lacking, "cut": cut, "free": free, "port": taken.getsockname()[1]}

        def filled(text):
            return re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), text)

        def answer(mistake):
            arguments, says, tf_config = mistake
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stub), os.environ["PYTHONPATH"]])}
            environment |= {"TF_CONFIG": filled(tf_config)} if tf_config else {}
            command = [sys.executable, "-m", "app", *map(filled, arguments.split())]
            began = time.monotonic()
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
            return time.monotonic() - began, done, filled(says)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return dict(zip(MISTAKES, pool.map(answer, MISTAKES.values()), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_the_program_with_2_and_one_line_within_seconds_before_tensorflow_is_imported(answers, name):
    seconds, done, says = answers[name]
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and says in line
    assert seconds < 5


# ---- recipes -------------------------------------------------------------------------------------------------------------

RECIPES = {path.stem: path for path in command_line.RECIPES.glob("*.flags")}
IMAGENET = ("imagenet-resnet50", "imagenet-resnet50-tf_cnn_benchmarks")


def recipe(name, *flags):
    return command_line.parse([f"--flagfile={RECIPES[name]}", *flags])[0]


def rates(config, examples, total_steps, steps):
    schedule = schedules.make(config, examples, total_steps)
    return [schedule.at(step) for step in steps]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_flags_after_a_comment_and_the_default_of_its_data_set_and_network(name):
    lines = RECIPES[name].read_text().splitlines()
    flags = [line for line in lines if line.startswith("--")]
    assert lines[0].startswith("# ") and all(line.startswith("# ") for line in lines if line not in flags)
    assert recipe(name) == command_line.parse(["--flagfile=", *flags])[0]
    dataset, _, model = name.partition("-")
    assert recipe(name).dataset == dataset and recipe(name).model.startswith(model.partition("-")[0])
    _, options = command_line.parse([f"--dataset={dataset}", f"--model={recipe(name).model}"])
    assert options.recipe == f"recipes/{name}.flags" or name == IMAGENET[1]


@pytest.mark.parametrize("name", ["cifar10-resnet20", "cifar10-resnet56"])
def test_cifar10_is_trained_as_by_he_et_al(name):
    """Section 4.2: batch 128, weight decay 0.0001, momentum 0.9, rate 0.1, divided by 10 at 32k and 48k of 64k iterations."""
    config = recipe(name)
    assert (config.global_batch_size, config.steps, config.optimizer, config.momentum) == (128, 64_000, "momentum", 0.9)
    assert (config.weight_decay, config.weight_decay_kind, config.label_smoothing) == (1e-4, "l2", 0)
    steps = [0, 31_999, 32_000, 47_999, 48_000, 63_999]
    assert rates(config, 50_000, 64_000, steps) == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize(("batch", "rate", "logical_replicas"), [(256, 0.1, 8), (8192, 3.2, 256)])
def test_imagenet_is_trained_as_by_goyal_et_al(batch, rate, logical_replicas):
    """Sections 2.1, 2.2, 5.1: 0.1 per 256, warm-up of 5 epochs, a tenth at 30, 60 and 80 of 90; 32 images share statistics."""
    config = recipe("imagenet-resnet50", f"--global_batch_size={batch}")
    assert (config.epochs, config.optimizer, config.momentum, config.weight_decay) == (90, "nesterov", 0.9, 1e-4)
    assert (config.logical_replicas, config.replica_batch_size) == (logical_replicas, 32)
    epoch = 1_281_167 / batch
    at = [0, 2.5, 5.1, 29.9, 30.1, 59.9, 60.1, 79.9, 80.1, 89.9]
    expected = [0, rate / 2, rate, rate, rate / 10, rate / 10, rate / 100, rate / 100, rate / 1000, rate / 1000]
    seen = rates(config, 1_281_167, round(90 * epoch), [round(epochs * epoch) for epochs in at])
    assert seen == pytest.approx(expected, rel=0.003)  # in the warm-up, half a step of 156 is as much


def test_imagenet_is_trained_by_the_rates_of_tf_cnn_benchmarks():
    config = recipe("imagenet-resnet50-tf_cnn_benchmarks")
    assert (config.global_batch_size, config.optimizer, config.momentum, config.weight_decay) == (256, "nesterov", 0.9, 4e-5)
    reference = {0: 0, 150_136: 0.128, 150_137: 0.0128, 300_273: 0.0128, 300_274: 0.00128, 10_000_000: 1.28e-5}
    assert rates(config, 1_281_167, 10**7, reference) == pytest.approx(list(reference.values()), rel=1e-9)
    halved, doubled = (recipe("imagenet-resnet50-tf_cnn_benchmarks", f"--global_batch_size={b}") for b in (128, 512))
    assert [schedules.base_rate(c) for c in (halved, doubled)] == pytest.approx([0.064, 0.256])


def test_small_sets_end_with_a_cosine_that_ends_at_zero():
    expected = {"digits": 0.002, "fashion_mnist": 0.002, "fashion_mnist-lenet": 0.02, "fashion_mnist-resnet20": 0.1}
    for name, rate in expected.items():
        config = recipe(name)
        start, last = rates(config, 60_000, 2000, [100, 2000])
        assert rate * 0.98 < start <= rate and last == pytest.approx(0, abs=1e-12), name
    assert set(RECIPES) - set(expected) == {*(f"cifar10-resnet{n}" for n in (20, 56)), *IMAGENET}


def test_a_flagfile_can_be_given_as_two_words_and_an_empty_one_is_no_recipe():
    one, two = (
        command_line.parse(flags) for flags in (["--flagfile=recipes/digits.flags"], ["--flagfile", "recipes/digits.flags"])
    )
    assert one == two
    plain, options = command_line.parse(["--flagfile="])
    assert (plain, options.recipe) == (config.resolved(dataclasses.asdict(config.Config())), "")


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, "-m", "app", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(name in done.stdout for name in [*config.Config.__dataclass_fields__, "workers"])
