"""What a run says of itself: before its first step, what is going to be done; at its end, what was."""

import shlex

from app.assembly import of_update


def plan(config, data, replicas, steps_per_epoch, epochs, serving=0):
    """What is going to be done, in lines; every quantity that was derived is said.

    Args:
      serving: workers that compute for a coordinator; 0: each of the `replicas` has its share.
    """
    train, held_out = data.manifest.train, data.manifest.test
    yield (
        f"{config.model} on {config.dataset}: {train.examples:,} examples in {len(train.shards)} shards "
        f"to train with, {held_out.examples:,} held out"
    )
    workers = f"{replicas} {'worker' if replicas == 1 else 'workers'}"
    share = f"{config.logical_replicas // replicas} on each of {workers}"
    if serving:
        share = f"each by whichever of {serving} {'worker' if serving == 1 else 'workers'} is free"
    yield (
        f"global batch {config.global_batch_size} = {config.logical_replicas} logical replicas x {config.replica_batch_size}; "
        f"{share}"
    )
    if config.asynchronous:
        yield (
            f"asynchronous: an update for each {config.replica_batch_size} examples, in the order in which gradients come: no "
            "two runs are the same"
        )
    if config.batch_norm == "global":
        yield f"batch normalisation over the whole batch of {config.global_batch_size}: one pass of each worker's examples"
    threads = f"{config.intra_op_threads} intra-op {'thread' if config.intra_op_threads == 1 else 'threads'}"
    step_or_steps = "step" if steps_per_epoch == 1 else "steps"
    an_epoch = f"{steps_per_epoch} {step_or_steps} (round({train.examples:,} / {of_update(config).global_batch_size}))"
    length = f"{config.steps:,} steps, an epoch being" if config.steps else f"{epochs} epoch{'s' * (epochs > 1)} of"
    yield f"{length} {an_epoch}; {threads} a worker (part of the run: the bits follow it)"
    if config.global_batch_size > train.examples:
        yield (
            f"warning: --global_batch_size={config.global_batch_size} is more than the {train.examples:,} training examples: a "
            "step sees some of them more than once"
        )


def summary(config, found: dict):
    """The lines at a run's end, from what summary.json holds."""
    workers = f"{found['replicas']} {'worker' if found['replicas'] == 1 else 'workers'}"
    steps = f"{found['steps']} steps" if found["first_step"] == 1 else f"steps {found['first_step']} to {found['steps']}"
    if found["first_step"] > found["steps"]:
        steps = "no step: only the end was missing,"
    yield f"trained {steps} in {found['fit_seconds']:.1f} s on {workers}"
    if config.asynchronous:
        yield f"staleness: mean {found['staleness_mean']:.2f}, largest {found['staleness_max']} updates"
    if found["skipped_steps"]:
        yield f"skipped {found['skipped_steps']} of them: the loss scale was too large for their gradients"
    if "val_top_1" in found:
        right, of = round(found["val_top_1"] * found["examples"]), found["examples"]
        best = f"best {found['best_val_top_1']:.4f} in epoch {found['best_epoch']}"
        by = " by the averaged weights" if config.ema else ""
        yield f"held out: {right:,} of {of:,} right{by}, top-1 {found['val_top_1']:.4f} ({best})"
    yield f"saved   {config.run_dir}: model.keras, config.json, metrics.jsonl, metrics.csv, summary.json"
    flag = shlex.quote(f"--run_dir={config.run_dir}")
    yield f"next    ./run.sh evaluate {flag}    ./run.sh tensorboard {flag}"
    same = ": the same for any number of workers" if config.identical and not config.asynchronous else ""
    yield f"sha256  {found['sha256']}  (weights, optimizer, metrics{same})"
