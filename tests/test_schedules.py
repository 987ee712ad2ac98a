"""Learning rates: the numbers of papers and of tf_cnn_benchmarks, the same in Python and in the graph, at every update."""

import math
import subprocess
import sys

import numpy as np
import pytest

import cluster
from app import schedules
from app.config import Config

IMAGENET, CIFAR, LONG = 1_281_167, 50_000, 10**7
RESNET = {"schedule": "step", "boundaries": "30,60,80,90", "warmup": 5.0, "learning_rate_for": 256}
PIECEWISE = "1;3;.1;5;.01"


def make(examples=IMAGENET, total_steps=LONG, **flags):
    config = Config(**flags)
    assert schedules.problems(config) == []
    return schedules.make(config, examples, total_steps)


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        (
            {**RESNET, "global_batch_size": 256, "learning_rate": 0.128},
            {0: 0, 12511: 0.064, 25022: 0.128, 150136: 0.128, 150137: 0.0128, 300273: 0.0128, 300274: 0.00128, LONG: 1.28e-5},
        ),
        (
            {"global_batch_size": 256, "learning_rate": 1.0, "warmup": 5.0},
            {0: 0, 12511: 0.5, 25022: 1, LONG: 1},
        ),
        (
            {
                "global_batch_size": 32,
                "learning_rate": 1.0,
                "schedule": "step",
                "decay_every": 2.0,
                "decay_rate": 0.5,
                "min_learning_rate": 0.375,
            },
            {0: 1, 80071: 1, 80072: 0.5, 160143: 0.5, 160144: 0.375, LONG: 0.375},
        ),
        (
            {"global_batch_size": 32, "schedule": "piecewise", "piecewise": PIECEWISE},
            {0: 1, 120108: 1, 120109: 0.1, 200181: 0.1, 200182: 0.01, LONG: 0.01},
        ),
        (
            {
                "global_batch_size": 64,
                "schedule": "piecewise",
                "piecewise": "0.5;1;0.25",
                "learning_rate_for": 32,
                "warmup": 1.0,
            },
            {0: 0, 10009: 0.5, 20018: 0.5, 20019: 0.5},
        ),
        (
            {"schedule": "step", "boundaries": "10,20.5", "schedule_unit": "steps", "warmup": 4.0, "min_learning_rate": 0.005},
            {0: 0, 1: 0.025, 4: 0.1, 9: 0.1, 10: 0.01, 20: 0.01, 21: 0.005},
        ),
    ],
)
def test_rates_at_steps_are_those_of_the_reference(flags, rates):
    schedule = make(**flags)
    assert {step: schedule.at(step) for step in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize(
    ("flags", "by_epoch"),
    [
        (
            {"schedule": "piecewise", "piecewise": "0.1;82;0.01;123;0.001;300;0.0002"},
            {81: 0.1, 83: 0.01, 124: 0.001, 301: 0.0002},
        ),
        ({"schedule": "step", "boundaries": "150,225,300"}, {149: 0.1, 151: 0.01, 226: 0.001, 301: 0.0001}),
    ],
)
def test_rates_of_cifar_resnets_and_densenets_change_at_their_epochs(flags, by_epoch):
    schedule = make(CIFAR, global_batch_size=128, learning_rate=0.1, **flags)
    steps = CIFAR / 128
    assert {epoch: schedule.at(round(epoch * steps)) for epoch in by_epoch} == pytest.approx(by_epoch)


@pytest.mark.parametrize(("base", "batch", "rate"), [(0.05, 256, 0.05), (0.128, 128, 0.064), (0.128, 512, 0.256)])
def test_the_rate_grows_with_the_batch_in_proportion(base, batch, rate):
    schedule = make(learning_rate=base, global_batch_size=batch, **RESNET)
    assert schedule.at(schedule.warmup_steps) == rate


def test_smooth_decays_begin_after_the_warm_up_and_end_with_the_run():
    common = {"schedule_unit": "steps", "warmup": 10.0, "learning_rate": 0.8, "total_steps": 110}
    cosine = make(schedule="cosine", min_learning_rate=0.2, **common)
    polynomial = make(schedule="polynomial", min_learning_rate=0.2, power=2.0, **common)
    exponential = make(schedule="exponential", min_learning_rate=0.01, decay_rate=0.25, decay_every=20.0, **common)
    for schedule in (cosine, polynomial, exponential):
        assert [schedule.at(t) for t in (0, 5, 10)] == pytest.approx([0, 0.4, 0.8])
    for t in (10, 37, 60, 109, 110, 500):
        u = min((t - 10) / 100, 1)
        assert cosine.at(t) == pytest.approx(0.2 + 0.6 * (1 + math.cos(math.pi * u)) / 2)
        assert polynomial.at(t) == pytest.approx(0.2 + 0.6 * (1 - u) ** 2)
        assert exponential.at(t) == pytest.approx(max(0.8 * 0.25 ** ((t - 10) / 20), 0.01))


def test_lengths_are_taken_as_the_decimals_that_were_written():
    """In floats 4.35 x 100 is below 435, and 1.1 x 10 above 11."""
    flags = {"schedule": "step", "global_batch_size": 1}
    assert make(100, decay_every=4.35, **flags).interval == 435
    assert make(10, boundaries="1.1", **flags).pieces[0][0] == 11


def test_a_run_cut_short_ends_within_its_warm_up():
    short = make(total_steps=100, global_batch_size=256, warmup=5.0, learning_rate=1.0)
    assert short.at(99) == pytest.approx(99 / 25_022)


def test_a_decay_more_often_than_once_a_step_is_refused():
    with pytest.raises(ValueError, match="--decay_every=0.5"):
        make(schedule="step", decay_every=0.5, schedule_unit="steps")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"schedule": "cosine", "power": 2.0}, "--power=2.0 is for --schedule=polynomial"),
        ({"decay_rate": 0.5}, "--schedule=step or exponential"),
        ({"piecewise": PIECEWISE}, "--schedule=piecewise"),
        ({"schedule": "piecewise"}, "--piecewise=:"),
        ({"schedule": "piecewise", "piecewise": "1;3"}, "--piecewise=1;3:"),
        ({"schedule": "piecewise", "piecewise": "1;3;.1;3;.01"}, "rising"),
        ({"schedule": "piecewise", "piecewise": "1;3;-.1"}, "--piecewise=1;3;-.1:"),
        ({"schedule": "piecewise", "piecewise": "1;3;nan"}, "--piecewise=1;3;nan:"),
        ({"schedule": "step"}, "needs --boundaries, as 30,60,80,90, or --decay_every"),
        ({"schedule": "step", "boundaries": "3", "decay_every": 2.0}, "--boundaries=3 and --decay_every=2.0: give one"),
        ({"schedule": "step", "boundaries": "30,,60"}, "--boundaries=30,,60:"),
        ({"schedule": "step", "boundaries": "60,30"}, "rise"),
        ({"schedule": "step", "boundaries": "0,30"}, "above 0"),
        ({"schedule": "exponential"}, "needs --decay_every"),
        ({"schedule": "step", "boundaries": "3,9", "warmup": 5.0}, "--warmup=5.0 goes on after the first change, at 3"),
        ({"schedule": "cosine", "min_learning_rate": 0.2}, "--min_learning_rate=0.2 is above the rate itself, 0.1"),
    ],
)
def test_a_contradiction_is_one_line_that_names_the_flag(flags, says):
    (problem,) = schedules.problems(Config(**flags))
    assert says in problem
    assert "\n" not in problem


def test_the_table_has_a_row_for_each_change():
    rows = schedules.table(make(total_steps=460_000, global_batch_size=256, learning_rate=0.128, **RESNET)).splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["0", "0.00", "0"],
        ["25,022", "5.00", "0.128"],
        ["150,137", "30.00", "0.0128"],
        ["300,274", "60.00", "0.00128"],
        ["400,365", "80.00", "0.000128"],
        ["450,411", "90.00", "1.28e-05"],
        ["459,999", "91.92", "1.28e-05"],
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"schedule": "cosine", "warmup": 1.0},
        {"schedule": "step", "decay_every": 2.4},
        {"schedule": "step", "boundaries": "1"},
    ],
)
def test_a_table_is_short_whatever_the_schedule(flags):
    for total_steps in (1, 300, 100_000):
        warmup = min(flags.get("warmup", 0.0), total_steps / 100)
        assert 2 <= len(schedules.table(make(12_800, total_steps, **{**flags, "warmup": warmup})).splitlines()) <= 12


def test_names_and_contradictions_need_no_tensorflow():
    program = "import sys, app.config; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {**RESNET, "global_batch_size": 256},
        {"schedule": "step", "decay_every": 2.4, "decay_rate": 0.97, "min_learning_rate": 1e-4},
        {"schedule": "piecewise", "piecewise": PIECEWISE, "warmup": 2.5},
        {"schedule": "exponential", "decay_every": 2.4, "decay_rate": 0.97, "warmup": 5.0},
        {"schedule": "cosine", "warmup": 5.0, "min_learning_rate": 1e-3},
        {"schedule": "polynomial", "power": 1.5},
    ],
)
def test_the_graph_has_the_rates_of_python_in_float32(tensorflow, flags):
    schedule = make(total_steps=460_000, **flags)
    edges = [*range(10), *(first + i for first, _ in schedule.pieces for i in (-1, 0, 1))]
    steps = np.unique([*edges, *np.random.default_rng(0).integers(0, 500_000, 2000)])
    seen = tensorflow.function(schedule)(tensorflow.constant(steps)).numpy()
    assert seen.dtype == np.float32
    np.testing.assert_array_max_ulp(seen, np.float32([schedule.at(t) for t in steps]), 1)


def weight_of_unit_gradients(strategy, schedule, dynamic=False):
    """Nine steps, four in an execution, of SGD on a weight whose gradient is 1, or not finite in the fifth step."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        inputs = keras.Input((1,))
        model = cluster.Trainer(
            keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)), 4, 2
        )
        optimizer = keras.optimizers.SGD(schedule.at(0))
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if dynamic else optimizer
        model.compile(optimizer, lambda y, output: keras.ops.mean(output), schedule=schedule, steps_per_execution=4)
    x = np.ones((36, 1), "float32")
    x[16] = np.inf if dynamic else 1
    model.fit(tf.data.Dataset.from_tensor_slices((x, x)).batch(4, drop_remainder=True), verbose=0)
    return float(model.model.trainable_variables[0].numpy()[0, 0]), float(model.optimizer.learning_rate.numpy())


@pytest.mark.parametrize(("replicas", "dynamic"), [(1, False), (2, False), (2, True)])
def test_every_update_has_its_rate_inside_executions_and_after_skipped_steps(devices, replicas, dynamic):
    schedule = make(36, 9, schedule="step", boundaries="6,8", schedule_unit="steps", warmup=4.0, global_batch_size=4)
    updates = 8 if dynamic else 9
    weight, rate = weight_of_unit_gradients(devices(replicas), schedule, dynamic)
    assert weight == pytest.approx(-sum(schedule.at(t) for t in range(updates)), rel=1e-6)
    assert rate == np.float32(schedule.at(updates - 1))
