"""Before TensorFlow starts: all workers meet, and have in common what they must; or each ends with a line that says why.

A worker tells the others facts, by group: {"source": {"app/train.py": sha256, ...}, "versions": {...}, ...}. What differs
from the chief's is named with both values. A fact that is None is not known, and differs from nothing.
"""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import sys
from collections.abc import Callable

from cluster import greeting, rendezvous
from cluster.meeting import Found
from cluster.spec import ClusterError, Member

# What to do when a group of facts differs. Facts of unknown groups have to be the same as well.
_ADVICE = {
    "source": "copy the same version of the program to all machines",
    "versions": "install the same requirements.txt on all machines",
    "configuration": "start all workers with the same flags",
    "devices": "give all workers the same devices (CUDA_VISIBLE_DEVICES)",
    "machine": "use machines of one kind",
    "data": "prepare the same data on all machines, or share the folder",
}
_OF_BITS = {"machine"}  # groups that change the last bits alone, and so prevent nothing where bits are not promised
# What oneDNN and Eigen choose their kernels by.
_FEATURES = re.compile(r"sse4_[12]|avx\w*|fma|f16c|amx_\w+|asimd\w*|sve\w*|sme\d?|bf16|i8mm")
VARIABLES = (
    "TF_ENABLE_ONEDNN_OPTS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "NVIDIA_TF32_OVERRIDE",
)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # as gRPC looks for them, small letters alone
_SKEW_S = 2  # clocks that differ by more are worth a warning
_SHOWN = 4  # facts of a group that are named in a line
_warned: set[str] = set()


@dataclasses.dataclass
class Card:
    """What a process says about itself.

    Attributes:
      facts: by group and name, JSON values: what has to be the same on all workers.
      about: {name: JSON value}, which may differ.
      problems, warnings: sentences about this process alone; a problem prevents the start.
    """

    facts: dict[str, dict] = dataclasses.field(default_factory=dict)
    about: dict[str, object] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)

    def add(self, facts: dict[str, dict]) -> "Card":
        """Further facts; those that are there already stay."""
        self.facts = {group: {**facts.get(group, {}), **self.facts.get(group, {})} for group in {**facts, **self.facts}}
        return self


def check(
    me: Member,
    card: Card | None = None,
    timeout_s: float = 60,
    word: str = "",
    identical: bool = True,
    stage: str = "start",
    show: Callable[[Found], None] | None = None,
) -> str:
    """Returns the chief's word when all workers have met and fit together. Every worker calls it.

    Args:
      me: this process; its address is used meanwhile, and free afterwards.
      card: about this process; `own_facts` are added.
      timeout_s: how long to wait for the others.
      word: on the chief, for all.
      identical: the same bits are promised: machines have to be of one kind.
      stage: of several checks of the same processes.
      show: on the chief, is given what was found; without it warnings are printed, once a process.
    Raises:
      ClusterError: on every worker, with a line for each problem.
    """
    card = (card or Card()).add(own_facts())
    proxy = bypass_proxies(me)
    said = {
        "facts": card.facts,
        "about": {"host": socket.gethostname(), "process": os.getpid(), **card.about},
        "problems": [f"{greeting.called(me, me.number)}: {problem}" for problem in card.problems],
        "warnings": [*card.warnings, *([proxy] if proxy else [])],
    }
    found = rendezvous.meet(me, timeout_s, word, said, stage, lambda found: _judge(found, me, identical))
    if me.is_chief:
        if show:
            show(found)
        else:
            for warning in sorted(set(found.warnings) - _warned, key=found.warnings.index):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        _warned.update(found.warnings)
    if found.problems:
        raise ClusterError("\n".join(found.problems))
    return found.word


def own_facts() -> dict[str, dict]:
    """What can be known of this process without TensorFlow."""
    root = pathlib.Path(__file__).parent.parent
    versions = {"Python": platform.python_version()} | {
        name: version(name.lower()) for name in ("TensorFlow", "Keras", "NumPy")
    }
    return {"source": source(sorted(root.glob("cluster/*.py")), root), "versions": versions, "machine": machine()}


def source(files, root) -> dict[str, str]:
    """{path from `root`, or the name alone outside of it: the beginning of the sha256} of files that can be read."""
    found = {}
    for file in map(pathlib.Path, files):
        try:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        except OSError:
            continue
        file = file.resolve()
        found[str(file.relative_to(root) if file.is_relative_to(root) else file.name)] = digest
    return found


def version(package: str) -> str | None:
    """Of an installed package, without importing it."""
    for name in (package, f"{package}-cpu", f"{package}-gpu", f"tf-nightly{'' if package == 'tensorflow' else '-' + package}"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def machine(cpuinfo: str = "/proc/cpuinfo", environ=None) -> dict:
    """What the bits of a computation depend on, beside versions: the processor's features, and switches in the environment."""
    environ = os.environ if environ is None else environ
    try:
        text = pathlib.Path(cpuinfo).read_text(errors="replace")
        words = set(re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)[1].split())
        features = sorted(word for word in words if _FEATURES.fullmatch(word))
    except (OSError, TypeError):
        features = None
    switches = {name: environ.get(name, "") for name in VARIABLES}
    return {"architecture": platform.machine(), "CPU features": features, **switches}


def bypass_proxies(me: Member, environ=None) -> str | None:
    """Lets gRPC reach the cluster's addresses past a proxy, through which two workers on one machine do not find each other.

    gRPC looks for `no_grpc_proxy`, else `no_proxy`; the first is set, so that other programs' `no_proxy` stays as it is. A
    warning is returned if a proxy was set. (tensorflow#50626; tests/test_doctor.py runs a cluster behind a proxy that is not
    there.)
    """
    environ = os.environ if environ is None else environ
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    if not proxy:
        return None
    before = environ.get("no_grpc_proxy", environ.get("no_proxy", "")).split(",")
    hosts = [greeting.host_and_port(address)[0] for address in me.addresses]
    environ["no_grpc_proxy"] = ",".join(dict.fromkeys(filter(None, [*before, *hosts])))
    place = environ[proxy].rpartition("@")[2].rpartition("//")[2].strip("/")  # without name and password
    return f"{proxy} is set, to {place}: not used between the workers (no_grpc_proxy names their addresses now)"


def _judge(found: Found, me: Member, identical: bool) -> tuple[list[str], list[str]]:
    """(problems, warnings) that the cards of all, and their clocks, show together."""
    problems, warnings, chief = [], [], found.cards[0]
    called = me.called if me.ps else "worker number {}".format
    for number in sorted(set(found.cards) - {0}):
        for group, line in differences(found.cards[number].get("facts", {}), chief["facts"]):
            bits = group in _OF_BITS
            text = f"{called(number)} has {line}; {_ADVICE.get(group, 'it has to be the same everywhere')}"
            text += ", or give up the same bits: --noidentical" if bits and identical else ""
            (warnings if bits and not identical else problems).append(text)
    for number, (trip, ahead) in sorted(found.trips.items()):
        if abs(ahead) - trip > _SKEW_S:
            off = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} the chief's"
            warnings.append(f"the clock of {called(number)} is {off}: times in logs will not fit together")
    warners: dict[str, list[int]] = {}
    for number, card in sorted(found.cards.items()):
        for warning in card.get("warnings", ()):
            warners.setdefault(warning, []).append(number)
    for warning, numbers in warners.items():
        who = f"worker number{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{' ...' * (len(numbers) > 8)}: "
        warnings.append(f"{who if len(numbers) < me.workers else ''}{warning}")
    return problems, warnings


def differences(theirs: dict[str, dict], ours: dict[str, dict]):
    """Yields (group, 'another <name>: <theirs>; the chief has <ours>; another ...') for each group that differs."""
    for group in dict.fromkeys([*ours, *theirs]):
        there, here = theirs.get(group, {}), ours.get(group, {})
        absent = "no such file" if group == "source" and there and here else None
        pairs = {name: (there.get(name, absent), here.get(name, absent)) for name in dict.fromkeys([*here, *there])}
        pairs = {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
        if set(pairs) <= {"revision"}:  # the files are the same
            continue
        shown = [f"another {_difference(name, *pair)}" for name, pair in list(pairs.items())[:_SHOWN]]
        if len(pairs) > _SHOWN:
            shown.append(f"and {len(pairs) - _SHOWN} more")
        yield group, "; ".join(shown)


def _difference(name, theirs, ours):
    if isinstance(theirs, list) and isinstance(ours, list):  # of words
        more, less = (" ".join(sorted(set(a) - set(b))) for a, b in ((theirs, ours), (ours, theirs)))
        return f"{name}: " + ", ".join(filter(None, [f"it has {more}" if more else "", f"it lacks {less}" if less else ""]))
    return f"{name}: {_shown(theirs)}; the chief has {_shown(ours)}"


def _shown(value):
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}"
