"""How a command becomes work: of this process alone, of a worker of a cluster, or of a local cluster that it starts."""

import json
import os
import re
import subprocess
import sys

from app import config, doctor, early, run_dir, startup
from app.config import UsageError
from cluster import latecomer, launcher, preflight, quiet, spec, tree


def member_of(options):
    """This process in its cluster; TF_CONFIG is set for TensorFlow, wherever the cluster comes from."""
    member = spec.from_environment(worker_hosts=options.worker_hosts, task_index=options.task_index)
    if member:
        os.environ["TF_CONFIG"] = member.tf_config
    return member


def on_workers(command, settings, options, part, reads=True):
    """This process's part of a command, or, with --workers, a local cluster of processes that do theirs.

    Args:
      command: its name, and settings and options, what it was asked.
      part: imports what the command needs, and returns its function of the strategy.
      reads: whether it needs the data set, prepared.
    """
    workers, member = options.workers, member_of(options)
    if workers is not None and member:
        raise UsageError(
            f"--workers={workers} starts a cluster here, but {member.origin} says that this is {member.name} of one. "
            "Leave one of them out"
        )
    replicas = workers or (member.workers if member else 1)
    if options.ps or (member and member.ps):
        replicas = 1  # any worker computes any logical replica
        if settings.batch_norm == "global":
            raise UsageError(
                "--batch_norm=global adds over the workers within the passes, and with parameter servers none meets another: "
                "use --batch_norm=replica, or workers without ps"
            )
    elif settings.asynchronous and command in ("train", "benchmark"):
        raise UsageError("--asynchronous needs parameter servers: --workers=2 --ps=1 on this machine, or `ps` in TF_CONFIG")
    what = "--workers={}" if workers else "a cluster of {} workers"
    problem = config.batch_problem(settings.global_batch_size, settings.logical_replicas, replicas, what)
    if problem and command != "doctor":  # which says it beside the rest
        raise UsageError(problem)
    if workers is None:
        return _work(command, settings, part, member, options.recipe, reads)
    if command == "train" and (ended := run_dir.finished(settings)):
        print(ended)
        return 0
    if command != "doctor":  # which says it beside the rest
        early.check(settings, data=reads, network=command != "evaluate", init=command == "train")
    if options.recipe and not settings.quiet:
        print(f"recipe {options.recipe}", flush=True)
    program = [sys.executable, "-m", "app"]
    if reads and not os.path.exists(settings.prepared_path()):  # once, instead of in each worker
        done = subprocess.run([*program, "prepare", "--for_training=yes", *settings.to_flags()])
        if done.returncode:
            return done.returncode
    flags = [f"--{name}={value}" for name, value in options.extra.items() if value]
    flags += options.own.to_flags() if options.own else []
    startup.pass_on(startup.process_began())
    own = [*program, command, "--flagfile=", *settings.to_flags(), *flags]  # no recipe: it has been read
    fewer = None
    if options.min_workers:
        fewer = lambda left: max(  # noqa: E731
            (n for n in tree.divisors(settings.logical_replicas) if options.min_workers <= n <= left), default=0
        )
    return launcher.run(own, workers, options.max_restarts, fewer, lambda: run_dir.checkpointed(settings.run_dir), options.ps)


def settle(settings):
    """What has to be in the environment before TensorFlow is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if settings.verbose else "3")
    sys.path.append(os.getcwd())  # for the user's own package.module:function; last, so that it hides nothing of ours


def _met(command, settings, member, reads):
    """Meets the other workers, before TensorFlow is imported, which takes seconds; `cluster.run` looks again when it is.

    Returns:
      (what this process says about itself, what the chief says that all are to end with instead: (exit status, text), or None).
    """
    instead, examine = None, command == "doctor"
    if command == "train":
        try:
            instead = (ended := run_dir.finished(settings)) and (0, ended)
        except UsageError as error:
            instead = 2, f"error: {error}"
    reads_weights = command == "train" and (member is None or member.is_chief)
    problems = [] if instead or examine else early.problems(settings, reads, command != "evaluate", init=reads_weights)
    if problems and not member:
        raise UsageError("\n".join(problems))
    card = doctor.card(settings, member, examine, problems) if member or examine else None
    if member and latecomer.is_one(member):
        return card, None
    if member:
        show = doctor.shown(settings, card, member) if examine else None
        word, seconds = json.dumps(instead), settings.start_timeout_s
        instead = json.loads(preflight.check(member, card, seconds, word, settings.identical, "imports", show))
        startup.mark("meeting")
    elif examine:
        doctor.alone(settings, card)
    return card, instead


def _work(command, settings, part, member, recipe, reads):
    """Does this process's part; ends the process."""
    settle(settings)
    card, instead = _met(command, settings, member, reads)
    if instead:
        print(instead[1], file=sys.stderr if instead[0] else sys.stdout)
        return instead[0]
    if recipe and not settings.quiet and (member is None or member.is_chief):
        print(f"recipe {recipe}", flush=True)
    with quiet.hushed(not settings.verbose):
        from app.against import Differs
        from app.faults import DataFault
        from cluster import drift, runtime, wishes

        work = part()
    startup.mark("imports")

    def guarded(strategy):
        startup.mark("cluster")
        try:
            work(strategy)
        except UsageError as error:
            return told(error, 2)
        except (DataFault, Differs, drift.Drift, wishes.NonFinite) as error:
            return told(error, 1)
        except wishes.Stopped:
            return wishes.RESUMABLE
        except Exception as error:  # a full disk, whoever met it
            if not re.search("No space left|Disk quota", str(error)):
                raise
            return told(f"{str(error).splitlines()[0]}: make room; the same command goes on from the last checkpoint", 1)
        return 0

    return runtime.run(
        guarded,
        settings.identical,
        settings.intra_op_threads,
        settings.seed,
        settings.communication,
        settings.verbose,
        start_timeout_s=settings.start_timeout_s,
        card=card,
        step_timeout_s=settings.step_timeout_s,
    )


def told(error, status):
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return status
