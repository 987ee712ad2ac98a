"""The command line: `./run.sh [command] [flags]` ends here."""

import dataclasses
import difflib
import json
import os
import sys

import app
from app import benchmark_flags, command_line, config, doctor, early, verify_flags, work
from app.config import UsageError
from cluster import quiet, spec

USAGE = """usage: ./run.sh [command] [flags]

  train        train a model (the default; without flags: the digits, on two workers); --dry_run tells what would be done
  evaluate     evaluate a model on the held-out examples: --run_dir=DIR of a run, or --keras_file=FILE and the data's flags;
               --confusion=PNG draws the confusion matrix, --predictions=CSV writes every prediction, in input order
  benchmark    the speed of a step and where its time goes, on a batch in memory; --data=real for the data set; --scaling=1,2,4
               by workers; --allreduce for the reduction alone; --json, --csv, --picture write what was measured
  doctor       whether this machine could train, or a cluster: with --workers, or started in each of its processes; with the
               flags of train
  verify       prove it: the flags of train, on --on=1,2,4 workers one after the other, every step compared to the last bit
  repeat       what is noise? the flags of train, with --seeds=5 seeds: mean, spread and a picture of the final numbers
  compare      compare RUN_A RUN_B: at which step and in which stage two recorded runs part, and the cause, by replaying it;
               --spread=DIR of a repeat tells the final numbers' difference in units of the spread over seeds
  prepare      turn a data set into TFRecord shards and a manifest; training does so by itself for small sets
  models       list the networks: input, classes, trainable parameters, source
  tensorboard  show runs in a browser: --run_dir=DIR of one, or all in runs/; --port=N; on this machine alone, or --bind_all
  test         set up and run the tests; --soak for the long ones

A run is the same on any number of workers: the same weights, to the last bit.
With TF_CONFIG, --worker_hosts and --task_index, or under Slurm's srun, this process is that worker of that cluster: see
docs/clusters.md.

Data sets: {sets}, imagenet, or your own as package.module:function.
Networks: see ./run.sh models; also keras:EfficientNetV2B0 (any of keras.applications), or your own as package.module:function.
Recipes (--flagfile=recipes/NAME.flags): {recipes}.
The recipe of the data set, or of data set and network, is used if no other is named.

{flags}

  --help, --version"""


def main(arguments: list[str]) -> int:
    """Runs a command. Returns the exit status: 0; 1 if the run failed; 2 for a mistake in the flags or in the cluster."""
    if "--version" in arguments:
        print(f"lockstep {app.__version__}")
        return 0
    if {"--help", "-h", "help"} & set(arguments):
        sets = ", ".join(name for name in config.DATASETS if name != "imagenet")
        recipes = ", ".join(sorted(path.stem for path in command_line.RECIPES.glob("*.flags")))
        print(USAGE.format(flags=command_line.help_text(), sets=sets, recipes=recipes))
        return 0
    if not arguments:
        alone = spec.environment_names_a_cluster()
        arguments = ["train", "--dataset=digits"] + ([] if alone else ["--workers=2"])
    command, arguments = ("train", arguments) if arguments[0].startswith("-") else (arguments[0], arguments[1:])
    commands = {
        "train": _train,
        "evaluate": _evaluate,
        "benchmark": _benchmark,
        "doctor": _doctor,
        "prepare": _prepare,
        "verify": _verify,
        "compare": _compare,
        "repeat": _repeat,
        "rounding": _rounding,
        "models": _models,
        "tensorboard": _tensorboard,
    }
    try:
        if command not in commands:
            near = difflib.get_close_matches(command, [*commands, "test"], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{command!r} is no command; {hint}./run.sh --help lists them")
        return commands[command](arguments)
    except (UsageError, spec.ClusterError) as error:
        return work.told(error, 2)
    except KeyboardInterrupt:  # in a command that is this process's alone
        return work.told("interrupted", 130)


def _train(arguments):
    dry = {"--dry_run", "--dry-run", "--dry_run=true"} & set(arguments)
    arguments = [argument for argument in arguments if argument not in dry]
    settings, options = command_line.parse(arguments)
    if dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # nothing is computed
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if settings.verbose else "3")  # TensorFlow misses the GPU aloud
        work.settle(settings)
        early.check(settings, init=True)
        with quiet.hushed(not settings.verbose):
            from app import dry_run
            from cluster import parameter_servers
        member = work.member_of(options)
        workers = options.workers or (member.workers if member else 1)
        serving = workers if options.ps else parameter_servers.workers_of(member)
        print("\n".join(list(dry_run.lines(settings, 1 if serving else workers, options.recipe, serving))))
        return 0

    if options.workers is None and spec.is_evaluator():
        del os.environ["TF_CONFIG"]  # it trains nothing: to TensorFlow it is alone
        return work.on_workers("evaluator", settings, options, lambda: _follower(settings))

    def part():
        from app.train import train

        return lambda strategy: train(settings, strategy)

    return work.on_workers("train", settings, options, part)


def _follower(settings):
    from app.evaluator import follow

    return lambda strategy: follow(settings, strategy)


def _evaluate(arguments):
    names = ("keras_file", "confusion", "predictions")
    settings, options = command_line.parse(arguments, names)
    if not options.extra["keras_file"]:  # of a run: its own configuration comes first, then the flags given
        directory = settings.run_dir
        try:
            with open(os.path.join(directory, "config.json")) as file:
                recorded = json.load(file)
            base = {
                name: recorded[name] for name in config.Config.__dataclass_fields__ if name in recorded or name == "dataset"
            }
        except (OSError, ValueError, TypeError, KeyError):
            raise UsageError(f"--run_dir={directory} is no run, for it has no config.json; or name a --keras_file") from None
        settings, options = command_line.parse([*arguments, f"--run_dir={directory}"], names, base)
        options.extra["keras_file"] = os.path.join(directory, "model.keras")
        if "://" not in directory and not os.path.exists(options.extra["keras_file"]):
            raise UsageError(f"--run_dir={directory} holds a run that has not finished: there is no model.keras yet")
    early.check_keras_file(options.extra["keras_file"])
    for flag in ("confusion", "predictions"):
        early.check_output(flag, options.extra[flag])

    def part():
        from app.evaluate import evaluate

        return lambda strategy: evaluate(settings, strategy, **options.extra)

    return work.on_workers("evaluate", settings, options, part)


def _benchmark(arguments):
    settings, options = command_line.parse(benchmark_flags.with_default_data(arguments), own=benchmark_flags.Flags)
    flags, member = options.own, work.member_of(options)
    if (options.ps or (member and member.ps)) and (flags.scaling or flags.allreduce):
        raise UsageError(
            "--scaling and --allreduce measure workers that add together: leave them out, or the parameter servers"
        )
    settings = benchmark_flags.settled(settings, flags, options.workers, member)
    if flags.allreduce:
        options = dataclasses.replace(options, recipe="")  # it has no part in it
    if flags.scaling:
        from app import benchmark_scaling

        return benchmark_scaling.run(settings, flags)

    def part():
        import tensorflow as tf

        from app.benchmark import benchmark

        tf.config.threading.set_inter_op_parallelism_threads(flags.inter_op_threads)
        return lambda strategy: benchmark(settings, flags, strategy)

    return work.on_workers("benchmark", settings, options, part, reads=flags.data == "real" and not flags.allreduce)


def _doctor(arguments):
    settings, options = command_line.parse(arguments)
    part = lambda strategy: doctor.through_tensorflow(settings, strategy)  # noqa: E731
    return work.on_workers("doctor", settings, options, lambda: part, reads=False)


def _compare(arguments):
    from app import compare_command

    return compare_command.run(arguments)


def _verify(arguments):
    settings, options = command_line.parse(arguments, own=verify_flags.VerifyFlags)
    _refuse_ps(settings, options, "verify")
    settings, flags = verify_flags.settled_verify(settings, options.own, options, work.member_of(options))
    from app import verify

    return verify.run(settings, flags)


def _repeat(arguments):
    settings, options = command_line.parse(arguments, own=verify_flags.RepeatFlags)
    _refuse_ps(settings, options, "repeat")
    flags = verify_flags.settled_repeat(settings, options.own, options, work.member_of(options))
    from app import repeat

    return repeat.run(settings, flags, options)


def _refuse_ps(settings, options, command):
    for name in [name for name, given in (("ps", options.ps), ("asynchronous", settings.asynchronous)) if given]:
        raise UsageError(f"--{name} is for train and its like: {command} knows no parameter servers; leave it out")


def _rounding(arguments):
    """The reference that `verify --noidentical` runs."""
    settings, options = command_line.parse(arguments)

    def part():
        from app.rounding import Disturbance
        from app.train import train

        return lambda strategy: train(settings, strategy, [Disturbance(settings.seed)])

    return work.on_workers("train", settings, options, part)


def _prepare(arguments):
    settings, options = command_line.parse(arguments, ("for_training",))
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # it needs no GPU, and TensorFlow would take all of its memory
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # and says at error level that there is none; faults come as exceptions
    by_itself = bool(options.extra["for_training"])  # asked for by a command that has looked at the data
    if not by_itself:
        early.check(settings, network=False, by_itself=False)
    with quiet.hushed():
        from app import data
    manifest = data.prepare(settings, by_itself=by_itself)
    if by_itself:
        return 0
    print(
        f"{manifest.directory}: {manifest.train.examples:,} + {manifest.test.examples:,} examples of "
        f"{len(manifest.classes)} classes in {len(manifest.train.shards)} + {len(manifest.test.shards)} shards"
    )
    return 0


def _models(arguments):
    import models

    if arguments:
        raise UsageError(f"models takes no flags; got {arguments[0]!r}")
    print(models.listing())
    return 0


def _tensorboard(arguments):
    port, bind_all, logdir = "6006", False, "runs"
    for argument in arguments:
        name, _, value = argument.partition("=")
        match name:
            case "--port" if value.isdecimal() and int(value) < 65536:
                port = value
            case "--run_dir" | "--logdir" if value:
                logdir = value
            case "--bind_all" if not value:
                bind_all = True
            case _:
                raise UsageError(f"tensorboard takes --run_dir=DIR, --port=N and --bind_all; got {argument!r}")
    if "://" not in logdir and not os.path.isdir(logdir):
        raise UsageError(f"--run_dir={logdir} is no directory; train first, or name the run's directory")
    early.check_port(int(port), bind_all)
    address = ["--bind_all"] if bind_all else ["--host=localhost"]
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with quiet.hushed():
        import tensorflow  # noqa: F401  (TensorBoard would import it later, aloud)
        from tensorboard import main as tensorboard
    sys.argv = ["tensorboard", f"--logdir={logdir}", f"--port={port}", *address]
    return tensorboard.run_main()


if __name__ == "__main__":
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")  # a terminal may not know a name's letters
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # as `./run.sh models | head` ends it
        os._exit(128 + 13)
