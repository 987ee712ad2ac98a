"""Who this process is: TF_CONFIG, read and checked before TensorFlow sees it.

TF_CONFIG is a JSON object: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}. The cluster
may name one "chief", which is then worker number 0; otherwise worker 0 is the chief.
"""

import dataclasses
import json
import os


class ClusterError(ValueError):
    """A TF_CONFIG that cannot be used: one line that names the field, what it holds, and what it should hold."""


@dataclasses.dataclass(frozen=True)
class Member:
    """This process in its cluster.

    Attributes:
      number: 0 <= number < workers, the chief first.
      workers: processes that train.
      name: its job and index, as in 'worker 1'.
      addresses: of all of them, by number.
    """

    number: int
    workers: int
    name: str
    addresses: tuple[str, ...]

    @property
    def is_chief(self) -> bool:
        return self.number == 0


def from_environment(environ=None) -> Member | None:
    """The member that TF_CONFIG names, or None without TF_CONFIG.

    Raises:
      ClusterError: if TF_CONFIG is there and cannot be used.
    """
    text = (os.environ if environ is None else environ).get("TF_CONFIG")
    return parse(text) if text is not None else None


def parse(text: str) -> Member:
    """Reads a TF_CONFIG. Raises ClusterError."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}): {text!r}") from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be a JSON object with 'cluster' and 'task'; got {text!r}")
    for field in ("cluster", "task"):
        if not isinstance(config.get(field), dict) or not config[field]:
            raise ClusterError(f"TF_CONFIG lacks the object '{field}'; it has {sorted(config)}")
    cluster, task = config["cluster"], config["task"]
    for job, addresses in cluster.items():
        if job not in ("chief", "worker"):
            raise ClusterError(f"TF_CONFIG cluster has the job {job!r}; only 'chief' and 'worker' train")
        if not isinstance(addresses, list) or not addresses or not all(_is_address(a) for a in addresses):
            raise ClusterError(f"TF_CONFIG cluster '{job}' must be a list of 'host:port'; got {addresses!r}")
    if len(cluster.get("chief", [])) > 1:
        raise ClusterError(f"TF_CONFIG names {len(cluster['chief'])} chiefs; there is one at most")
    addresses = [*cluster.get("chief", []), *cluster.get("worker", [])]
    twice = {a for a in addresses if addresses.count(a) > 1}
    if twice:
        raise ClusterError(f"TF_CONFIG cluster has the same address twice: {sorted(twice)}")
    job, index = task.get("type"), task.get("index")
    if job not in cluster:
        hint = " (the 'master' of TensorFlow 1 is the 'chief' now)" if job == "master" else ""
        raise ClusterError(f"TF_CONFIG task type is {job!r}, but the cluster has {sorted(cluster)}{hint}")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(cluster[job]):
        raise ClusterError(
            f"TF_CONFIG task index is {task.get('index')!r}; '{job}' has the indices 0 to {len(cluster[job]) - 1}"
        )
    number = index if job == "chief" else index + len(cluster.get("chief", []))
    return Member(number, len(addresses), f"{job} {index}", tuple(addresses))


def local_cluster(addresses: list[str]) -> list[str]:
    """A TF_CONFIG for each of the workers at these addresses."""
    cluster = {"worker": addresses}
    return [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}) for i in range(len(addresses))]


def _is_address(address) -> bool:
    if not isinstance(address, str) or "://" in address:
        return False
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
