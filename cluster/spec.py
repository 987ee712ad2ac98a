"""Who this process is in its cluster: told by TF_CONFIG, by two flags or by Slurm, and checked before TensorFlow sees it.

TF_CONFIG is a JSON object: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}. The cluster
may name one "chief", which is then worker number 0; otherwise worker 0 is the chief. With "ps" tasks, parameter servers, the
chief is needed: it coordinates, and the workers compute for it.
"""

import dataclasses
import difflib
import ipaddress
import json
import os
import re

from cluster import slurm

JOBS = ("chief", "worker", "ps")
EVALUATOR = "evaluator"  # no member of the cluster: it follows the checkpoints
_FORM = """{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}"""


class ClusterError(ValueError):
    """A cluster that cannot be used; each line of the message says what is wrong, with which value, and what to do."""


@dataclasses.dataclass(frozen=True)
class Member:
    """This process in its cluster.

    Attributes:
      number: 0 <= number < workers, the chief first, parameter servers last.
      workers: processes of the cluster.
      name: its job and index, as in 'worker 1'.
      addresses: of all of them, by number.
      tf_config: the TF_CONFIG that says all this; TensorFlow looks for it in os.environ["TF_CONFIG"], and nowhere else.
      origin: what told us: TF_CONFIG, --worker_hosts or Slurm.
      ps: how many of them are parameter servers.
    """

    number: int
    workers: int
    name: str
    addresses: tuple[str, ...]
    tf_config: str = dataclasses.field(default="", repr=False, compare=False)
    origin: str = dataclasses.field(default="TF_CONFIG", compare=False)
    ps: int = 0

    @property
    def is_chief(self) -> bool:
        return self.number == 0

    @property
    def trainers(self) -> int:
        """How many processes run the program: all; with parameter servers the coordinator alone, for which others compute."""
        return 1 if self.ps else self.workers

    def is_worker(self, number: int) -> bool:
        """Whether that process computes for a coordinator, and can be done without."""
        return self.ps > 0 and 0 < number < self.workers - self.ps

    def called(self, number: int) -> str:
        """How lines call a process: 'worker 1'; 'the chief', or, with parameter servers, 'the coordinator' and 'ps 0'."""
        if number == 0:
            return "the coordinator" if self.ps else "the chief"
        if not self.ps:
            return f"worker {number}"
        return f"worker {number - 1}" if self.is_worker(number) else f"ps {number - (self.workers - self.ps)}"


def from_environment(environ=None, worker_hosts="", task_index=None) -> Member | None:
    """This process, as TF_CONFIG says; or else the flags; or else Slurm, under srun with several tasks. None if none does.

    Args:
      environ: instead of os.environ.
      worker_hosts: "host:port,host:port", of all workers, the same in each.
      task_index: which of them this process is; a whole number, or its text.
    Raises:
      ClusterError: if what is told cannot be used.
    """
    environ = os.environ if environ is None else environ
    flags = _from_flags(worker_hosts, task_index)  # even if TF_CONFIG wins: half a pair is a mistake
    if (text := environ.get("TF_CONFIG")) is not None:
        return parse(text)
    if flags:
        return parse(flags, "--worker_hosts")
    step = _from_slurm(environ)
    return parse(step, "Slurm") if step else None


def is_evaluator(environ=None) -> bool:
    """Whether TF_CONFIG makes this process an evaluator, which follows the checkpoints, listed in the cluster or not.

    Raises:
      ClusterError: if TF_CONFIG cannot be used.
    """
    text = (os.environ if environ is None else environ).get("TF_CONFIG")
    return text is not None and _load(text)[1].get("type") == EVALUATOR


def environment_names_a_cluster(environ=None) -> bool:
    """Whether TF_CONFIG or Slurm tells of a cluster, usable or not."""
    try:
        return from_environment(environ) is not None
    except ClusterError:
        return True


def parse(text: str, origin: str = "TF_CONFIG") -> Member:
    """Reads a TF_CONFIG. Raises ClusterError."""
    cluster, task = _load(text)
    if EVALUATOR in cluster:  # it is no member: it trains nothing, and nobody waits for it
        cluster = {job: addresses for job, addresses in cluster.items() if job != EVALUATOR}
        text = json.dumps({"cluster": cluster, "task": task})
    problems = [*_cluster_problems(cluster), *_task_problems(task, cluster)]
    if problems:
        raise ClusterError("\n".join(problems))
    parts = [cluster.get(job, []) for job in JOBS]
    job, index = task["type"], _whole(task["index"])
    number = sum(map(len, parts[: JOBS.index(job)])) + index
    addresses = tuple(address for part in parts for address in part)
    return Member(number, len(addresses), f"{job} {index}", addresses, text, origin, len(parts[2]))


def local_cluster(addresses: list[str], ps: int = 0) -> list[str]:
    """A TF_CONFIG for each of the workers at these addresses; with `ps`, the first coordinates and so many are the last."""
    if not ps:
        return [_tf_config(addresses, index) for index in range(len(addresses))]
    jobs = {"chief": addresses[:1], "worker": addresses[1:-ps], "ps": addresses[-ps:]}
    tasks = [{"type": job, "index": index} for job, held in jobs.items() for index in range(len(held))]
    return [json.dumps({"cluster": jobs, "task": task}) for task in tasks]


def _tf_config(addresses, index):
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def _from_slurm(environ):
    try:
        found = slurm.cluster(environ)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    return _tf_config(*found) if found else None


def _from_flags(worker_hosts, task_index):
    if task_index in (None, ""):
        if worker_hosts:
            raise ClusterError(f"--worker_hosts={worker_hosts} needs --task_index, the place of this process in it, from 0 on")
        return None
    if not worker_hosts:
        raise ClusterError(f"--task_index={task_index} needs --worker_hosts=host:port,host:port, the same for all workers")
    addresses = [address.strip() for address in worker_hosts.split(",")]
    problems = list(_list_problems("--worker_hosts", addresses))
    problems += _repeated("--worker_hosts", [(str(number), address) for number, address in enumerate(addresses)])
    index = _whole(task_index)
    if index is None or index >= len(addresses):
        problems.append(f"--task_index={task_index}, but --worker_hosts has {_indices(addresses)}")
    if problems:
        raise ClusterError("\n".join(problems))
    return _tf_config(addresses, index)


def _load(text):
    """The objects 'cluster' and 'task' of a TF_CONFIG."""
    if not text.strip():
        raise ClusterError(f"TF_CONFIG is empty; unset it, or write it as {_FORM}")
    try:
        config = json.loads(text, object_pairs_hook=_object)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error}): {_short(text)}; write it as {_FORM}, in single quotes in a shell"
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be a JSON object with 'cluster' and 'task'; got {_short(config)}; write {_FORM}")
    if missing := [field for field in ("cluster", "task") if field not in config]:
        near = [(other, field) for field in missing for other in difflib.get_close_matches(field, config, n=1)]
        advice = ", ".join(f"rename {_short(other)} to '{field}'" for other, field in near) or f"write it as {_FORM}"
        raise ClusterError(f"TF_CONFIG lacks {_names(missing)}; it has {_names(config) or 'nothing'}: {advice}")
    if wrong := [field for field in ("cluster", "task") if not isinstance(config[field], dict) or not config[field]]:
        given = "\n".join(f"TF_CONFIG '{field}' is {_short(config[field])}; write it as in {_FORM}" for field in wrong)
        raise ClusterError(given)
    return config["cluster"], config["task"]


def _object(pairs):
    """A JSON object; json itself would silently keep the last of two equal keys, and lose the first one's workers."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ClusterError(f"TF_CONFIG has the key {_short(key)} twice in one object; put both values into one")
    return dict(pairs)


def _cluster_problems(cluster):
    for job, addresses in cluster.items():
        where = f"TF_CONFIG cluster has the job {_short(job)}"
        if job in JOBS:
            yield from _list_problems(f"TF_CONFIG cluster '{job}'", addresses)
        else:
            yield f"{where}, which is unknown: {_nearest(job)}"
    known = {job: cluster[job] for job in JOBS if isinstance(cluster.get(job), list)}
    if len(known.get("chief", [])) > 1:
        yield f"TF_CONFIG cluster has {len(known['chief'])} chiefs, {_names(known['chief'])}; leave one, the others are workers"
    if "ps" in known and (missing := [job for job in ("chief", "worker") if job not in cluster]):
        yield (
            f"TF_CONFIG cluster has 'ps' and no {_names(missing, 'or')}: with parameter servers the chief coordinates, and "
            f"workers compute: add {_names(missing)}"
        )
    names = [(f"{job} {number}", address) for job in known for number, address in enumerate(known[job])]
    yield from _repeated("TF_CONFIG cluster", names)


def _task_problems(task, cluster):
    job = task.get("type")
    if not isinstance(job, str):
        given = f"type is {_short(job)}" if "type" in task else "has no 'type'"
        yield f"TF_CONFIG task {given}; it must be one of the cluster's jobs, {_names(cluster)}"
    elif job in cluster:
        if job in JOBS and isinstance(cluster[job], list) and cluster[job]:
            index = _whole(task.get("index"))
            if index is None or index >= len(cluster[job]):
                given = f"index is {_short(task['index'])}" if "index" in task else "has no 'index'"
                yield f"TF_CONFIG task {given}; '{job}' has {_indices(cluster[job])}"
    elif job in JOBS:
        if "chief" in cluster or "worker" in cluster:  # otherwise the cluster's problem has been told
            yield f"TF_CONFIG task type is '{job}', but the cluster has {_names(cluster)}; use one of these, or add '{job}'"
    elif job == EVALUATOR:
        yield "TF_CONFIG task type is 'evaluator', which follows a training's checkpoints and does nothing else: use `train`"
    else:
        yield f"TF_CONFIG task type is {_short(job)}, which is unknown: {_nearest(job)}"


def _nearest(job):
    if job == "master":
        return "TensorFlow 1's 'master' is now 'chief'"
    near = difflib.get_close_matches(job.lower(), (*JOBS, EVALUATOR), n=1)
    return f"did you mean '{near[0]}'?" if near else f"use {_names(JOBS, 'or')}"


def _list_problems(where, addresses):
    if not isinstance(addresses, list) or not addresses:
        yield f"{where} is {_short(addresses)}; it must be a list of 'host:port', as in [\"10.0.0.1:2222\"]"
        return
    for number, address in enumerate(addresses):
        if problem := _address_problem(address):
            yield f"{where} has {_short(address)} as number {number}, {problem}; write 'host:port', as in '10.0.0.1:2222'"


def _address_problem(address):
    """What is wrong with an address, or None."""
    if not isinstance(address, str):
        return "which is no text"
    if not address:
        return "which is empty"
    if "://" in address:
        return "with a scheme"
    host, colon, port = address.rpartition(":")
    if not colon or re.fullmatch(r"\[[^]]*\]", address):
        return "without a port"
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return "with something else than an IPv6 address in brackets"
    elif ":" in host:
        return "where an IPv6 address has no brackets (as in '[::1]:2222') or there are two ports"
    elif not host:
        return "without a host"
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        return "with a host that is no name"
    if not 0 < (_whole(port) or 0) < 65536:
        return f"with the port {_short(port)} (1 to 65535)"
    return None


def _repeated(where, names):
    """A problem for each address that several have. Takes (name, address) pairs; equal means equal for a socket."""
    holders: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for name, address in names:
        if not _address_problem(address):
            host, _, port = address.rpartition(":")
            holders.setdefault((host.lower(), int(port)), []).append((name, address))
    for same in holders.values():
        if len(same) > 1:
            who = " and ".join(name for name, _ in same)
            yield f"{where} has the address {same[0][1]!r} twice, as {who}; give each process its own host:port"


def _whole(value):
    """A whole number from 0 on, or None; its text is accepted as TensorFlow does."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _indices(addresses):
    return f"the indices 0 to {len(addresses) - 1}" if len(addresses) > 1 else "the index 0 alone"


def _names(words, between="and"):
    words = [_short(word) for word in words]
    return f" {between} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _short(value):
    """A value on one line, without what is in the middle if it is long; text in quotes, anything else as JSON."""
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"
