"""The cluster that srun has started: the address of each task, and which of them this process is, from SLURM_* alone.

The variables are those of srun's manual, 'OUTPUT ENVIRONMENT VARIABLES'. Slurm's own step variables come first: the others
are those of the whole allocation in some versions and with srun --preserve-env.
"""

import itertools
import math
import re

_LAST_STEP = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID in slurm.h; above: the batch script's step, an interactive shell's, ...
_MOST = 65_536  # hosts, and tasks of a host: a list of more is a mistake, and would fill the memory
_FIRST_PORT, _PORTS = 15_000, 16_384  # up to 31383; Linux gives its ephemeral ports from 32768 on
_HOST = r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+"
_REMEDY = "start the program with srun, or tell the cluster by TF_CONFIG or by --worker_hosts and --task_index"


def cluster(environ) -> tuple[list[str], int] | None:
    """(addresses of all tasks of this srun, number of this one), or None where there is no such cluster.

    There is none outside of Slurm, in the body of a batch script, in an interactive shell, and for a single task. Tasks are
    numbered node by node: as SLURM_PROCID, unless srun was told another --distribution.

    Raises:
      ValueError: in one line, if the variables are incomplete or do not fit together.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not re.fullmatch("[0-9]{1,10}", step) or int(step) > _LAST_STEP:
        return None
    tasks, tasks_given = _read(environ, whole, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks == 1:
        return None
    names, names_given = _read(environ, hosts, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    counts, counts_given = _read(environ, tasks_per_node, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    job, _ = _read(environ, whole, "SLURM_JOB_ID")
    if len(names) != len(counts) or len(set(names)) < len(names) or sum(counts) != tasks:
        raise ValueError(f"{names_given}, {counts_given} and {tasks_given} do not fit together; {_REMEDY}")
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    addresses = [f"{names[node]}:{port(job, int(step), local)}" for node, local in places]
    return addresses, places.index(_own_place(environ, places))


def hosts(text: str) -> list[str]:
    """The names in a host list of Slurm: 'gpu[01-03,07],login1' is gpu01, gpu02, gpu03, gpu07, login1."""
    if not re.fullmatch(f"{_HOST}(,{_HOST})*", text):
        raise ValueError("must be a list of hosts, as in gpu[01-03,07],login1")
    names = []
    for entry in re.findall(_HOST, text):
        parts = re.split(r"\[(.*?)\]", entry)
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        if len(names) + math.prod(map(len, choices)) > _MOST:
            raise ValueError(f"has more than {_MOST:,} hosts")
        names += map("".join, itertools.product(*choices))
    return names


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node: '2(x3),1' is 2, 2, 2, 1."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part)
        if not match:
            raise ValueError("must be the tasks of each node, as in 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def port(job: int, step: int, local: int) -> int:
    """The port of a node's task number `local`: no other of that step and node has it, and 256 jobs in a row differ."""
    return _FIRST_PORT + (64 * job + 16 * step + local) % _PORTS


def whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError("must be a whole number")
    return int(text)


def _own_place(environ, places):
    """(node, number on that node) of this process."""
    rank, _ = _read(environ, whole, "SLURM_PROCID")
    if rank >= len(places):
        raise ValueError(f"SLURM_PROCID={rank}, but the step has {len(places)} tasks, 0 to {len(places) - 1}; {_REMEDY}")
    if "SLURM_NODEID" not in environ:  # then srun's default distribution is assumed
        place = places[rank]
    else:
        place = _read(environ, whole, "SLURM_NODEID")[0], _read(environ, whole, "SLURM_LOCALID")[0]
    if place not in places or environ.get("SLURM_LOCALID", str(place[1])) != str(place[1]):
        given = ", ".join(f"{name}={environ[name]}" for name in ("SLURM_NODEID", "SLURM_LOCALID") if name in environ)
        raise ValueError(f"SLURM_PROCID={rank} and {given} do not fit the tasks of each node; {_REMEDY}")
    return place


def _numbers(text):
    """'01-03,07', from within brackets, is 01, 02, 03, 07."""
    numbers = []
    for part in text.split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + _MOST:
            raise ValueError(f"has the range [{text}]; it must be as in [01-03,07]")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _read(environ, reader, *names):
    """(what `reader` makes of the first of these variables that is set, 'NAME=text')."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        raise ValueError(f"{' or '.join(names)} is not set, though SLURM_STEP_ID is; {_REMEDY}")
    given = f"{name}={environ[name]}"
    try:
        return reader(environ[name].strip()), given
    except ValueError as error:
        raise ValueError(f"{given} {error}; {_REMEDY}") from None
