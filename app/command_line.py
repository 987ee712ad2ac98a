"""Flags and recipes, read into a Config: absl's flags, and files of them, one a line."""

import dataclasses
import difflib
import pathlib
import typing

from absl import flags

from app import benchmark_flags, verify_flags
from app import config as config_module
from app.config import Config, UsageError

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
_TEXT = {str: "DEFINE_string", int: "DEFINE_integer", float: "DEFINE_float", bool: "DEFINE_bool"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false, or --name and --noname", "string": "a text"}
_CLUSTER = {
    "workers": "start so many worker processes on this machine; default: this process alone",
    "ps": "with --workers: start so many parameter servers and a coordinator beside them, with variables there; default: none",
    "worker_hosts": "addresses of all workers, host:port,host:port, on several machines (instead of TF_CONFIG)",
    "task_index": "which of them this process is, from 0",
    "max_restarts": "with --workers: start all again from the last checkpoint, so often, when one dies or fails [0]",
    "min_workers": "with --max_restarts: do not replace the dead, but go on with at least so many; default: replace them",
}
_WIDTH, _COLUMN = 128, 28


@dataclasses.dataclass(frozen=True)
class Options:
    """What a command line says beside the Config.

    Attributes:
      workers: of a cluster on this machine, or None.
      ps: parameter servers of that cluster; 0.
      worker_hosts, task_index: of a cluster of several machines; "" and None.
      max_restarts, min_workers: of a cluster on this machine; 0 and None.
      recipe: the file of flags that the Config is based on, relative to the project's folder; "" if there is none.
      extra: {further flag of the command: text, or ""}.
      own: the command's own flags as an object, or None.
    """

    workers: int | None
    worker_hosts: str
    task_index: int | None
    max_restarts: int
    min_workers: int | None
    recipe: str
    extra: dict[str, str]
    own: object = None
    ps: int = 0


def parse(
    arguments: list[str], extra: tuple[str, ...] = (), base: dict | None = None, own: type | None = None
) -> tuple[Config, Options]:
    """Reads flags, on top of a recipe: the --flagfile given, or else recipes/<dataset>-<model>.flags or <dataset>.flags.

    Args:
      arguments: flags, without program and command.
      extra: names of further flags that take text, for commands that need more than a Config.
      base: values instead of a recipe's: the configuration of an earlier run.
      own: a dataclass of further flags, with fields as Config's and a method `problems`.
    Raises:
      UsageError: with a line for each problem.
    """
    arguments = [_found(argument) for argument in _with_values(arguments)]
    given = _parsed(arguments, extra, own)
    files = [argument.partition("=")[2] for argument in arguments if argument.startswith("--flagfile=")]
    if base is not None:
        before = [f"--{name}={value}" for name, value in base.items()]
    elif files:
        before = []
    else:
        names = (f"{given.dataset}-{given.model}", given.dataset)
        files = [str(path) for name in names if (path := RECIPES / f"{name}.flags").exists()][:1]
        before = [f"--flagfile={path}" for path in files]
    given = _parsed([*before, *arguments], extra, own)
    problems = []
    if given.workers is not None and given.workers < 1:
        problems.append(f"--workers={given.workers}: at least 1")
    if given.ps is not None and (given.ps < 1 or given.workers is None):
        problems.append(f"--ps={given.ps}: {'at least 1' if given.ps < 1 else 'needs --workers, on this machine'}")
    problems += _restart_problems(given)
    try:
        config = config_module.resolved({f.name: getattr(given, f.name) for f in dataclasses.fields(Config)})
    except UsageError as error:
        problems += str(error).splitlines()
    own = own and own(**{f.name: getattr(given, f.name) for f in dataclasses.fields(own)})
    problems += own.problems() if own else ()
    if problems:
        raise UsageError("\n".join(problems))
    options = Options(
        given.workers,
        given.worker_hosts or "",
        given.task_index,
        given.max_restarts or 0,
        given.min_workers,
        ", ".join(str(pathlib.Path(file).resolve()).removeprefix(f"{ROOT}/") for file in files if file),
        {name: getattr(given, name) or "" for name in extra},
        own,
        given.ps or 0,
    )
    return config, options


def _restart_problems(given):
    if given.max_restarts is not None and given.max_restarts < 0:
        yield f"--max_restarts={given.max_restarts}: at least 0"
    if given.max_restarts and given.workers is None:
        yield f"--max_restarts={given.max_restarts} is for --workers; elsewhere the scheduler starts workers again"
    if given.min_workers is not None and not 1 <= given.min_workers <= (given.workers or 0):
        yield f"--min_workers={given.min_workers}: from 1 to --workers"
    elif given.min_workers and not given.max_restarts:
        yield f"--min_workers={given.min_workers} needs --max_restarts"


def help_text() -> str:
    """The flags by group, each with its meaning, its choices and its default."""
    groups: dict[str, list[str]] = {"Cluster": [_entry(f"--{name}", text) for name, text in _CLUSTER.items()]}
    further = (benchmark_flags.Flags, verify_flags.VerifyFlags, verify_flags.RepeatFlags)
    for f in (f for each in (Config, *further) for f in dataclasses.fields(each)):
        name = f"--[no]{f.name}" if f.type is bool else f"--{f.name}"
        choices = f" ({', '.join(f.metadata['choices'])})" if f.metadata["choices"] and f.name != "model" else ""
        default = "" if f.default in ("", False) else f" [{str(f.default).lower()}]"
        groups.setdefault(f.metadata["group"], []).append(_entry(name, f.metadata["help"] + choices + default))
    groups["Run"].append(_entry("--flagfile", "a recipe: flags in a file, one a line; later flags win"))
    return "\n\n".join(f"{group}\n" + "\n".join(lines) for group, lines in groups.items())


def _entry(name, text):
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > _WIDTH - _COLUMN:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return f"  {name:<{_COLUMN - 2}}" + f"\n{' ' * _COLUMN}".join(lines)


def _with_values(arguments):
    """`--flagfile FILE`, which absl knows too, as --flagfile=FILE."""
    arguments = list(arguments)
    while "--flagfile" in arguments[:-1]:
        at = arguments.index("--flagfile")
        arguments[at : at + 2] = [f"--flagfile={arguments[at + 1]}"]
    return arguments


def _found(argument):
    """A --flagfile that is not in the current folder is looked for in the project's."""
    name, _, path = argument.partition("=")
    if name == "--flagfile" and not pathlib.Path(path).exists() and (ROOT / path).exists():
        return f"{name}={ROOT / path}"
    return argument


def _parsed(arguments, extra=(), own=None):
    values = flags.FlagValues()
    for each in filter(None, (Config, own)):
        types = typing.get_type_hints(each)
        for f in dataclasses.fields(each):
            getattr(flags, _TEXT[types[f.name]])(f.name, f.default, f.metadata["help"], flag_values=values)
    for name in extra:
        flags.DEFINE_string(name, None, "", flag_values=values)
    for name in _CLUSTER:
        define = flags.DEFINE_string if name == "worker_hosts" else flags.DEFINE_integer
        define(name, None, _CLUSTER[name], flag_values=values)
    try:
        rest = values(["train", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname.removeprefix("no"), list(values), n=1)
        raise UsageError(f"--{error.flagname} is no flag{f'; did you mean --{near[0]}?' if near else ''}") from None
    except (flags.Error, ValueError) as error:
        if isinstance(error, flags.IllegalFlagValueError) and error.__context__:  # what int() and the like say
            given = str(error).removeprefix("flag ").removesuffix(f": {error.__context__}")
            kind = _KINDS[values[given.partition("=")[0].removeprefix("--")].flag_type()]
            raise UsageError(f"{' '.join(given.split())}: {kind}") from None
        raise UsageError(" ".join(str(error).removeprefix("ERROR:: ").replace("flag --", "--").split())) from None
    if rest:
        raise UsageError(f"{rest[0]!r} is not a flag; flags are written --name=value")
    return values
