"""`verify` and `--verify_against`: they say step, stage and tensor of a first difference, and nothing where there is none."""

import copy
import json
import math
import re

import numpy as np
import pytest
from conftest import run_program

from app import command_line, differences, verify, verify_flags, verify_page, verify_rounding
from app.config import UsageError

K, B, STEPS = 2, 4, 3
FLAGS = ["--dataset=synthetic:8x8x1:10:256", "--model=lenet", "--global_batch_size=32", "--logical_replicas=2", "--shards=4"]
FLAGS += ["--learning_rate=0.01"]


# ---- the comparison, on made-up records ----------------------------------------------------------------------------------


def digest(*tensors):
    """As a line holds some vectors of 8 elements; their projections are the elements, times sqrt(8)."""
    return {
        "hash": [f"{hash(tuple(t)) & (2**64 - 1):016x}" for t in tensors],
        "norm": [float(np.linalg.norm(t)) for t in tensors],
        "projections": [[math.sqrt(8) * x for x in t] for t in tensors],
    }


def vectors(t):
    return [np.arange(8) + 1.0 + t, np.ones(8) * (t + 1)]


@pytest.fixture
def record():
    """A record of three steps and an evaluation, on two workers."""
    header = {
        "format": 1,
        "made_by": "cluster.Trainer",
        "every": 1,
        "global_batch_size": B,
        "logical_replicas": K,
        "replicas": 2,
    }
    header |= {"seed": 1, "identical": True, "gradients": [0, 1], "metrics": [["loss/total", [], "float32"]]}
    header |= {kind: [[f"{kind}/a", [8], "float32"], [f"{kind}/b", [8], "float32"]] for kind in differences.STATES}
    lines = [header, {"step": 0, **{kind: digest(*vectors(0)) for kind in differences.STATES}}]
    for t in range(1, STEPS + 1):
        line = {"step": t, "loss": (1 / t).hex(), "metrics": {"loss": 1 / t}, "metric_sums": [[B / t]], "learning_rate": 0.1}
        line |= {"loss_scale": 1.0, "ids": [[0, i, t] for i in range(B)], "x": [f"x{t}{i}" for i in range(B)], "y": ["y"] * B}
        gradients = {"gradient_norm": [1.0, 2.0], "gradient_projections": [[1.0] * 8, [2.0] * 8]}
        line |= {"replicas": {"metric_sums": [[[2 / t]], [[2 / t]]], **gradients}}
        line |= {kind: digest(*vectors(t)) for kind in differences.TENSORS}
        lines.append(line | {"workers": {"weights": ["w", "w"], "statistics": ["s", "s"]}})
    lines.append({"evaluation_after": STEPS, "metrics": {"loss": 0.5, "top_1": 0.25}, "metric_sums": [[4.0]], "examples": 8})
    return lines


def changed_tensor(kind):
    def change(line):
        line[kind] = digest(vectors(2)[0], vectors(2)[1] * 2)

    return change


def set_(**values):
    return lambda line: line.update(values)


STAGES = {
    "data ids": (set_(ids=[[0, 1, 2], [0, 0, 2], [0, 2, 2], [0, 3, 2]], x=["x"] * B), "example 0, .* in another order"),
    "pixels": (set_(x=["x20", "x21", "x22", "other"], loss=(3.0).hex()), "example 3, of logical replica 1.*1 of 4 differ"),
    "labels": (set_(y=["y", "y", "z", "y"], loss=(3.0).hex()), "example 2"),
    "loss": (set_(loss=(0.75).hex(), replicas={"metric_sums": [[[1.0]], [[2.0]]]}), "of logical replica 1: 0.5 against 0.75"),
    "gradient": (
        lambda line: line["replicas"].update(gradient_projections=[[1.0] * 8, [3.0] * 8]) or changed_tensor("gradient")(line),
        "weights/b, of logical replica 1",
    ),
    "reduction": (changed_tensor("gradient"), "weights/b: .*2 times as large; 1 of 2 tensors differ"),
    "learning rate": (lambda line: line.update(learning_rate=0.2) or changed_tensor("update")(line), "0.1 against 0.2"),
    "update": (changed_tensor("update"), "weights/b"),
    "optimizer": (changed_tensor("optimizer"), "optimizer/b"),
    "statistics": (changed_tensor("statistics"), "statistics/b"),
    "weights": (changed_tensor("weights"), "weights/b: norm .* relative distance about 1,"),
    "workers": (set_(workers={"weights": ["w", "v"], "statistics": ["s", "s"]}), "weights: replica 1 has v, replica 0 w"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_difference_is_named_by_step_stage_and_tensor(record, stage):
    """Whatever differs after it: all that is later in the record is other, too."""
    change, text = STAGES[stage]
    other = copy.deepcopy(record)
    change(other[3])
    for kind in ("weights", "optimizer"):
        changed_tensor(kind)(other[4])
    other[-1]["metrics"]["top_1"] = 0.5
    found = differences.first(record, other)
    assert (found.step, found.stage) == (2, stage)
    assert re.search(text, str(found)), str(found)
    assert found.explanation


def test_differences_outside_steps(record):
    def found(place, change, lines=slice(None)):
        other = copy.deepcopy(record)
        change(other[place])
        return str(differences.first(record, other[lines]))

    assert found(0, set_(seed=2)) == "before the first step, configuration, seed: 1 against 2"
    assert found(1, changed_tensor("weights")).startswith("before the first step, initial weights, weights/a: norm ")
    assert found(-1, set_(examples=9)) == "step 3, evaluation, examples: 8 against 9"
    of_metric = {"metrics": {"loss": 0.5, "top_1": 0.375}, "metric_sums": [[5.0]]}
    assert found(-1, set_(**of_metric)) == "step 3, evaluation, top_1: [0.25] against [0.375]"
    assert found(0, set_(), slice(0, 4)) == "step 3, length: the records end with step 3 and step 2"


def test_equal_records_do_not_differ(record):
    """Whatever the number of workers; NaN is NaN; a record of fewer steps is compared as far as both go."""
    for line in record:
        if "loss" in line:
            line["metrics"]["top_1"] = line["metric_sums"][0][0] = math.nan
    other = json.loads(json.dumps(record))
    other[0] |= {"replicas": 1, "every": 2}
    for line in other[2:-1]:
        line["workers"] = {name: values[:1] for name, values in line["workers"].items()}
    assert differences.first(record, other) is None
    assert differences.first(record, [other[0], other[1], *other[3:]]) is None


def test_distance_is_that_of_the_vectors():
    """Exactly 0 of equal hashes, and unbiased with the signs of real projections."""
    rng = np.random.default_rng(0)
    a, d = rng.normal(size=2000), 1e-5 * rng.normal(size=2000)
    signs = rng.choice([-1.0, 1.0], [200, 8, 2000])
    estimates = []
    for sign in signs:
        of = [{"hash": [name], "norm": [np.linalg.norm(v)], "projections": [sign @ v]} for name, v in (("a", a), ("b", a + d))]
        estimates.append(differences.distance(*of))
    true = np.linalg.norm(d) / np.linalg.norm(a)
    assert np.sqrt(np.mean(np.square(estimates))) == pytest.approx(true, rel=0.05)
    assert np.std(estimates) < 0.27 * true
    assert differences.distance(of[0], {**of[1], "hash": ["a"]}) == 0
    assert differences.distance(of[0], {**of[1], "norm": [math.nan], "projections": [[math.nan] * 8]}) == math.inf


def runs(record, other, *more):
    of = [(1, "aa", record), (2, "aa", other), *more]
    summary = {"steps": STEPS, "loss": 0.5}
    return [{"workers": w, "sha256": s, "lines": lines, "seconds": 1.0, "summary": summary} for w, s, lines in of]


def judged(record, other, reference=None, **changes):
    settings, _ = command_line.parse([*FLAGS, f"--steps={STEPS}"])
    both = runs(record, other)
    both[1] |= changes
    found = verify.judged(settings, both, reference and {"lines": reference})
    found |= {"workers": [1, 2], "configuration": {"model": "lenet", "dataset": "<digits>"}}
    page = verify_page.page(found)
    assert found["verdict"] in page
    assert not re.search(r"<script|src=|href=\"http", page)
    return found, page


def test_verify_judges_identical_runs(record):
    found, page = judged(record, copy.deepcopy(record))
    assert found["line"] == "IDENTICAL: 3 steps on 1 and 2 workers, sha256 aa"
    assert "exactly 0 at every one of 3 steps" in page
    assert "&lt;digits&gt;" in page
    other = copy.deepcopy(record)
    changed_tensor("weights")(other[4])
    found, page = judged(record, other)
    assert found["line"].startswith("DIFFERENT: 1 worker against 2 workers: step 3, weights, weights/a")
    assert found["difference"]["run"] == 2
    assert 'class="other"' in page
    assert "step 3, result" in judged(record, copy.deepcopy(record), sha256="bb")[0]["line"]


def moved(record, by):
    """The record with all tensors but the first two lines' off by a relative `by` that doubles with each step."""
    other = copy.deepcopy(record)
    for line in other[2:-1]:
        for kind in differences.TENSORS:
            factor = 1 + by * 2 ** line["step"]
            line[kind] = digest(*(v * factor for v in vectors(line["step"])))
        line["loss"] = (float.fromhex(line["loss"]) * (1 + by)).hex()
    return other


def test_verify_measures_what_rounding_explains(record):
    """Three times as far as the disturbed run is rounding, thirty times is not; other data never are."""
    reference = moved(record, 3e-6)
    found, page = judged(record, moved(record, 9e-6), reference)
    assert found["line"].startswith(
        "EQUAL up to rounding: 3 steps on 1 and 2 workers; relative distances at step 1: loss 9e-06, "
    )
    assert re.search(r"loss 9e-06 at step \d \(3e-06\), gradient", found["line"])
    assert found["largest"]["weights"]["step"] == 3
    assert found["largest"]["weights"]["distance"] == pytest.approx(7.2e-5, rel=1e-3)
    assert "dotted: a run disturbed by rounding" in page
    assert judged(record, copy.deepcopy(record), reference)[0]["line"].endswith("on 1 and 2 workers; every bit agrees")
    found = judged(record, moved(record, 1e-4), reference)[0]
    assert found["line"].startswith(
        "DIFFERENT: 1 worker against 2 workers: step 1, loss, all tensors: relative distance 0.0001"
    )
    other = copy.deepcopy(record)
    other[3]["x"][0] = "other"
    assert "step 2, pixels" in judged(record, other, reference)[0]["line"]
    broken = moved(record, math.nan)
    assert judged(record, broken, reference)[0]["verdict"] == "DIFFERENT"
    assert 3e-6 * verify_rounding.ALLOWED > 9e-6


# ---- flags and directories -----------------------------------------------------------------------------------------------


def settled(*flags):
    settings, options = command_line.parse(list(flags), own=verify_flags.VerifyFlags)
    return verify_flags.settled_verify(settings, options.own, options, None)


def test_flags_are_checked_before_anything_starts():
    settings, flags = settled("--dataset=digits", "--global_batch_size=64")
    assert (flags.on, settings.steps, settings.fingerprint_every) == ("1,2", 100, 1)
    assert re.fullmatch(r"runs/verify-digits-small_cnn-[0-9a-f]{8}", flags.verify_dir)
    for wrong, text in {
        "--on=1,3": "3 workers of --on cannot share 4 logical replicas evenly: use one of 1, 2, 4",
        "--on=2": "two or more different numbers",
        "--on=2,2": "two or more different numbers",
        "--workers=2": "--on=1,2,4",
        "--run_dir=x": "--verify_dir",
        "--verify_against=x": "is for train",
        "--logical_replicas=1": "name others with --on",
    }.items():
        with pytest.raises(UsageError, match=re.escape(text)):
            settled("--dataset=digits", wrong)
    with pytest.raises(UsageError, match="--verify_against=x compares bits"):
        settled("--dataset=digits", "--noidentical", "--verify_against=x")


def test_only_what_an_earlier_verify_left_is_removed(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    (own / "w1").mkdir(parents=True)
    for name in ("verify.json", "w1.log", "w1/config.json"):
        (own / name).write_text("x")
    verify.fresh(str(own))
    assert list(own.iterdir()) == []
    other.mkdir()
    (other / "w1").mkdir()
    with pytest.raises(UsageError, match="holds something else"):
        verify.fresh(str(other))
    assert (other / "w1").exists()


# ---- real runs -----------------------------------------------------------------------------------------------------------


USER = """
import keras
import tensorflow as tf

def network(input_shape, classes):
    x = inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Lambda(lambda t: t + 0.1 * tf.random.normal(tf.shape(t)), name="jitter")(x)
    return keras.Model(inputs, keras.layers.Dense(classes)(x))
"""


def test_verify_fails_with_the_name_of_such_a_layer(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    output = run_program("verify", *FLAGS, "--model=mine:network", "--on=1,2", "--verify_dir=v", status=1)
    assert "FAILED: the run on 1 worker ended with status 2: layer jitter (Lambda) draws random numbers" in output
    assert json.loads((tmp_path / "v/verify.json").read_text())["verdict"] == "FAILED"


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """(directory, output) of a verify on one and two workers."""
    directory = tmp_path_factory.mktemp("verify") / "v"
    prepared = f"--prepared_dir={directory.parent}/prepared"
    return directory, run_program("verify", *FLAGS, prepared, "--on=1,2", f"--steps={STEPS}", f"--verify_dir={directory}")


def test_verify_proves_it_with_real_processes(verified):
    directory, output = verified
    sha256 = re.search(r"^IDENTICAL: 3 steps on 1 and 2 workers, sha256 ([0-9a-f]{64})$", output, re.M)[1]
    assert "2 workers: 3 steps in" in output
    found = json.loads((directory / "verify.json").read_text())
    assert (found["verdict"], found["sha256"], found["workers"]) == ("IDENTICAL", sha256, [1, 2])
    assert [row["step"] for row in found["by_step"]] == [1, 2, 3]
    assert all(len(set(hashes)) == 1 for row in found["by_step"] for hashes in row["hashes"].values())
    assert not any(value for row in found["by_step"] for values in row["distances"].values() for value in values)
    page = (directory / "verify.html").read_text()
    assert sha256 in page
    assert page.count("<svg") == 1


def test_a_job_is_checked_against_the_recorded_run(verified, tmp_path):
    """It ends at the first step that differs, with step, stage and tensor; here the record's second step is falsified."""
    lines = [json.loads(line) for line in (verified[0] / "w1/fingerprints.jsonl").read_text().splitlines()]
    at = [path for path, _, _ in lines[0]["weights"]].index("dense/kernel")
    assert lines[3]["step"] == 2
    lines[3]["update"]["hash"][at] = "0" * 16
    (tmp_path / "fingerprints.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "config.json").write_bytes((verified[0] / "w1/config.json").read_bytes())
    prepared = f"--prepared_dir={verified[0].parent}/prepared"
    flags = [*FLAGS, prepared, "--steps=9", f"--run_dir={tmp_path}/run", f"--verify_against={tmp_path}"]
    output = run_program("train", *flags, status=1)
    assert f"error: not the run in {tmp_path}: step 2, update, dense/kernel: norm " in output
    steps = [json.loads(line) for line in (tmp_path / "run/fingerprints.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]


def test_a_job_of_another_configuration_is_told_so(verified):
    from app import against

    def listener(*flags):
        return against.Against(command_line.parse([*FLAGS, f"--verify_against={verified[0]}/w2", *flags])[0])

    lines = [json.loads(line) for line in (verified[0] / "w1/fingerprints.jsonl").read_text().splitlines()]
    with pytest.raises(against.Differs, match="configuration, seed: 1 against 2"):
        listener("--seed=2")(lines[0])
    same = listener("--steps=500")
    for line in lines:
        same(line)
    assert same.summary() == f"verified 3 steps against {verified[0]}/w2, up to step 3: identical"
    with pytest.raises(UsageError, match="holds no fingerprints of a run"):
        listener("--verify_against=/nowhere")
