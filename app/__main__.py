"""The command line: `./run.sh [command] [flags]` ends here."""

import os
import sys

import app
from app import config as config_module
from cluster import launcher, quiet, spec

USAGE = """usage: ./run.sh [command] [flags]

  train    train a model (the default; without flags: the digits, on two workers)
  test     set up and run the tests; --soak for the long ones

A run is the same on any number of workers: the same weights, to the last bit.
With TF_CONFIG in the environment this process is that worker of that cluster.

{flags}

  --help, --version"""


def main(arguments: list[str]) -> int:
    """Runs a command. Returns the exit status: 0; 1 if the run failed; 2 for a mistake in the flags or in TF_CONFIG."""
    if "--version" in arguments:
        print(f"lockstep {app.__version__}")
        return 0
    if {"--help", "-h", "help"} & set(arguments):
        print(USAGE.format(flags=config_module.help_text()))
        return 0
    if not arguments:
        arguments = ["train", "--dataset=digits"] + ([] if "TF_CONFIG" in os.environ else ["--workers=2"])
    command, arguments = ("train", arguments) if arguments[0].startswith("-") else (arguments[0], arguments[1:])
    try:
        if command != "train":
            raise config_module.UsageError(f"{command!r} is no command; ./run.sh --help lists them")
        return _train(arguments)
    except (config_module.UsageError, spec.ClusterError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2


def _train(arguments):
    config, workers = config_module.parse(arguments)
    member = spec.from_environment()
    if workers is not None:
        if member:
            raise config_module.UsageError(
                f"--workers={workers} starts a cluster here, but TF_CONFIG says that this is {member.name} of one. "
                "Leave one of them out"
            )
        if problem := config_module.batch_problem(config.global_batch_size, config.logical_replicas, workers):
            raise config_module.UsageError(problem)
        return launcher.run([sys.executable, "-m", "app", "train", *config.to_flags()], workers)
    return _work(config)


def _work(config):
    """This process's part in training; ends the process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet.hushed():
        from app.train import train
        from cluster import runtime

    def part(strategy):
        try:
            train(config, strategy)
        except config_module.UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    runtime.run(part, config.identical, config.intra_op_threads, config.seed, config.communication)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
