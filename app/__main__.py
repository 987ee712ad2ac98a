"""The command line: `./run.sh [command] [flags]` ends here."""

import json
import os
import subprocess
import sys

import app
from app import config as config_module
from cluster import launcher, quiet, spec

USAGE = """usage: ./run.sh [command] [flags]

  train     train a model (the default; without flags: the digits, on two workers)
  evaluate  evaluate a model on the held-out examples: --run_dir=DIR of a run, or --keras_file=FILE and the data's flags;
            --confusion=PNG draws the confusion matrix, --predictions=CSV writes every prediction, in input order
  prepare   turn a data set into TFRecord shards and a manifest; training does so by itself for small sets
  test      set up and run the tests; --soak for the long ones

A run is the same on any number of workers: the same weights, to the last bit.
With TF_CONFIG in the environment this process is that worker of that cluster.
Data sets: {sets}, imagenet, or your own as package.module:function.

{flags}

  --help, --version"""


def main(arguments: list[str]) -> int:
    """Runs a command. Returns the exit status: 0; 1 if the run failed; 2 for a mistake in the flags or in TF_CONFIG."""
    if "--version" in arguments:
        print(f"lockstep {app.__version__}")
        return 0
    if {"--help", "-h", "help"} & set(arguments):
        sets = ", ".join(name for name in config_module.DATASETS if name != "imagenet")
        print(USAGE.format(flags=config_module.help_text(), sets=sets))
        return 0
    if not arguments:
        arguments = ["train", "--dataset=digits"] + ([] if "TF_CONFIG" in os.environ else ["--workers=2"])
    command, arguments = ("train", arguments) if arguments[0].startswith("-") else (arguments[0], arguments[1:])
    commands = {"train": _train, "evaluate": _evaluate, "prepare": _prepare}
    try:
        if command not in commands:
            raise config_module.UsageError(f"{command!r} is no command; ./run.sh --help lists them")
        return commands[command](arguments)
    except (config_module.UsageError, spec.ClusterError) as error:
        return _told(error, 2)
    except KeyboardInterrupt:  # in a command that is this process's alone
        return _told("interrupted", 130)


def _train(arguments):
    config, workers, _ = config_module.parse(arguments)
    return _on_workers("train", config, workers, {}, lambda train, _: lambda strategy: train(config, strategy))


def _evaluate(arguments):
    names = ("keras_file", "confusion", "predictions")
    config, workers, extra = config_module.parse(arguments, names)
    if not extra["keras_file"]:  # of a run: its own configuration comes first, then the flags given
        try:
            with open(os.path.join(config.run_dir, "config.json")) as file:
                recorded = json.load(file)
            base = {name: recorded[name] for name in config_module.Config.__dataclass_fields__}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise config_module.UsageError(f"--run_dir={config.run_dir} is no run: {error}; or name a --keras_file") from None
        run_dir = config.run_dir
        config, workers, extra = config_module.parse([*arguments, f"--run_dir={run_dir}"], names, base)
        extra["keras_file"] = os.path.join(run_dir, "model.keras")
    return _on_workers(
        "evaluate", config, workers, extra, lambda _, evaluate: lambda strategy: evaluate(config, strategy, **extra)
    )


def _prepare(arguments):
    config, _, extra = config_module.parse(arguments, ("for_training",))
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # it needs no GPU, and TensorFlow would take all of its memory
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # and says at error level that there is none; faults come as exceptions
    with quiet.hushed():
        from app import data
    if extra["for_training"]:
        data.prepare(config, limit=data.BY_ITSELF)
        return 0
    manifest = data.prepare(config)
    print(
        f"{manifest.directory}: {manifest.train.examples:,} + {manifest.test.examples:,} examples of "
        f"{len(manifest.classes)} classes in {len(manifest.train.shards)} + {len(manifest.test.shards)} shards"
    )
    return 0


def _on_workers(command, config, workers, extra, part):
    """This process's part of a command, or, with --workers, a local cluster of processes that do theirs."""
    member = spec.from_environment()
    if workers is None:
        return _work(config, part)
    if member:
        raise config_module.UsageError(
            f"--workers={workers} starts a cluster here, but TF_CONFIG says that this is {member.name} of one. "
            "Leave one of them out"
        )
    if problem := config_module.batch_problem(config.global_batch_size, config.logical_replicas, workers):
        raise config_module.UsageError(problem)
    program = [sys.executable, "-m", "app"]
    if not os.path.exists(config.prepared_path()):  # once, instead of in each worker
        done = subprocess.run([*program, "prepare", "--for_training=yes", *config.to_flags()])
        if done.returncode:
            return done.returncode
    flags = [f"--{name}={value}" for name, value in extra.items() if value]
    return launcher.run([*program, command, *config.to_flags(), *flags], workers)


def _work(config, part):
    """Does this process's part; ends the process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.append(os.getcwd())  # for the user's own package.module:function; last, so that it hides nothing of ours
    with quiet.hushed():
        from app.evaluate import evaluate
        from app.faults import DataFault
        from app.train import train
        from cluster import runtime

    def guarded(strategy):
        try:
            part(train, evaluate)(strategy)
        except config_module.UsageError as error:
            return _told(error, 2)
        except DataFault as error:
            return _told(error, 1)
        return 0

    runtime.run(guarded, config.identical, config.intra_op_threads, config.seed, config.communication)


def _told(error, status):
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
