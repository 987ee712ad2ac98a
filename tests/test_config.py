"""Flags: resolved once, refused in one line each, before TensorFlow is imported."""

import os
import subprocess
import sys
import time

import pytest

from app import command_line, config


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
        (["--epoch=3"], "--epochs"),
        (["--optimizer=sdg"], "did you mean sgd"),
        (["--workers=0"], "at least 1"),
        (["--logical_replicas=3"], "126 or 129"),
        (["--global_batch_size=0"], "at least 1"),
        (["--seed=99999999999"], "at most 2147483647"),
        (["--eval_at_steps=5,x"], "--eval_at_steps=5,x"),
        (["--learning_rate=fast"], "learning_rate"),
        (["--learning_rate=nan"], "--learning_rate=nan"),
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


@pytest.mark.parametrize(
    ("arguments", "tf_config", "says"),
    [
        (["--workers=3"], None, "1, 2, 4"),
        (["trian"], None, "'trian'"),
        (["--workers=2"], '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}', "TF_CONFIG"),
        ([], '{"clusters": {}}', "'cluster'"),
    ],
)
def test_a_mistake_ends_the_program_with_2_within_seconds_and_without_a_traceback(arguments, tf_config, says):
    environment = {**os.environ, **({"TF_CONFIG": tf_config} if tf_config else {})}
    started = time.monotonic()
    command = [sys.executable, "-m", "app", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 5
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, "-m", "app", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(name in done.stdout for name in [*config.Config.__dataclass_fields__, "workers"])
