"""The `evaluator` task of a cluster: follows a run's checkpoints, and evaluates each once, beside the training.

It reads the run directory and trains nothing. What it finds goes to evaluator/ in that directory: metrics.jsonl, and
TensorBoard's events. It ends when the training has ended and the last checkpoint is evaluated.
"""

import dataclasses
import json
import os
import time

import tensorflow as tf

from app import checkpoints, monitoring, run_dir
from app.assembly import assemble, open_data
from app.config import Config, UsageError
from app.terminal import Terminal
from cluster import checkpoint, lifeline

_LOOK_EVERY_S = 1.0
_TELL_EVERY_S = 60.0


def follow(config: Config, strategy) -> int:
    """Evaluates every checkpoint of the run in `config.run_dir` that is there long enough to be read, until the run has ended.

    Args:
      config: the training's.
      strategy: of this process alone.
    Returns:
      How many it has evaluated, those of an earlier start included.
    Raises:
      UsageError: if nothing is held out; if the directory holds another run; or if nothing has happened for
        --evaluator_timeout_min.
    """
    terminal = Terminal(quiet=config.quiet)
    data = open_data(config, strategy, None, terminal.say)
    if data.evaluation is None:
        raise UsageError(f"{config.dataset} has no held-out examples to evaluate")
    sole = dataclasses.replace(config, asynchronous=False)  # an evaluation is the same
    _, model = assemble(sole, data, strategy, config.steps or config.epochs * data.training.steps)
    own = os.path.join(config.run_dir, "evaluator")
    run_dir.make(own)
    lines = os.path.join(own, "metrics.jsonl")
    done = _steps_in(lines)
    terminal.say(f"evaluator: following {config.run_dir}")
    with tf.io.gfile.GFile(lines, "a") as file:
        events = monitoring.EvaluatorEvents(own)
        for state in _states(config, done, terminal.say):
            began = time.monotonic()
            checkpoint.put_back_weights(state, model)
            logs = model.evaluate(data.evaluation, verbose=0, return_dict=True)
            lifeline.sign(None)
            record = {"step": state.step, **logs, "examples": model.examples_evaluated, "seconds": time.monotonic() - began}
            file.write(json.dumps({"event": "evaluation", **monitoring.plain(record)}) + "\n")
            file.flush()
            events.evaluation(record)
            numbers = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
            terminal.say(f"step {state.step}  held out: {numbers}  [{record['examples']} examples]")
        events.close()
    terminal.result(f"evaluated {len(done)} checkpoints of {config.run_dir}, whose training has ended")
    return len(done)


def _steps_in(path):
    """The steps that an earlier start has evaluated."""
    if not tf.io.gfile.exists(path):
        return set()
    return {json.loads(line)["step"] for line in tf.io.gfile.GFile(path).read().splitlines() if line.endswith("}")}


def _states(config, done, say):
    """Yields the checkpoints that are not `done`, the oldest first, as they come; ends with the run."""
    news, told = time.monotonic(), time.monotonic()
    known = False
    while True:
        ended = tf.io.gfile.exists(os.path.join(config.run_dir, "summary.json"))  # asked first: nothing comes after it
        listed = checkpoints.listed(os.path.join(config.run_dir, "checkpoints"))
        if listed and not known:
            run_dir.finished(config)  # raises if they are another run's
            known = True
        for step, name in reversed(listed):
            if step not in done and (state := _read(os.path.join(config.run_dir, "checkpoints", name), say)):
                yield state
                news = told = time.monotonic()
            done.add(step)
        if ended:
            return
        now = time.monotonic()
        if config.evaluator_timeout_min and now - news > 60 * config.evaluator_timeout_min:
            minutes = f"--evaluator_timeout_min={config.evaluator_timeout_min:g}"
            raise UsageError(f"no checkpoint has come to {config.run_dir} for {minutes}: start the training, then this again")
        if now - told > _TELL_EVERY_S:
            told = now
            say(f"waiting for a checkpoint in {config.run_dir}")
        time.sleep(_LOOK_EVERY_S)


def _read(path, say):
    """The checkpoint, or None: removed by the training meanwhile, or damaged."""
    try:
        return checkpoint.from_bytes(tf.io.gfile.GFile(path, "rb").read())
    except tf.errors.NotFoundError:
        say(f"{path} was removed before it could be read: a larger --keep_checkpoints gives more time")
    except checkpoint.Damaged as error:
        say(f"warning: {path} is passed over: {error}")
    return None
