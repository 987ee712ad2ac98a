"""Checks a running job, on every worker, against the recorded fingerprints of another run, and ends it at the first difference.

    ./run.sh train [flags] --verify_against=RUN_DIR

RUN_DIR is the run directory of the same configuration on one machine, and every worker has to be able to read it. The job
records what the recorded run has recorded, and each line is compared as soon as it is known, to the last bit. A job that goes
on longer than the recorded run is checked as far as that goes.
"""

import hashlib
import json
import os

import tensorflow as tf

from app import differences
from app.config import Config, UsageError
from cluster import fingerprint, spec
from cluster.agreement import agree

_LENGTH = ("steps", "epochs")  # may differ: what is compared is what both runs have


class Differs(Exception):
    """The run is not the recorded one: one line with step, stage and tensor."""


def opened(config: Config) -> "Against | None":
    """The recorded run that the configuration names, or None. The workers agree on it first: all have to read the same.

    Raises:
      UsageError: if there is no such record, in one line; cluster.spec.ClusterError: if some workers have another, or none.
    """
    if not config.verify_against:
        return None
    me = spec.from_environment()
    try:
        recorded = Against(config)
    except UsageError as error:
        if me:  # the others learn it from the disagreement; if nobody has it, there is none
            agree(me, {"record for --verify_against": str(error)})
        raise
    agree(me, {"record for --verify_against": recorded.digest})
    return recorded


class Against:
    """The recorded run; pass it to `fingerprint.Recorder` as `listen`.

    Attributes:
      every: how often the recorded run was recorded.
      digest: of what it recorded; the workers have to agree on it.
      steps: how many steps were compared and found equal.

    Raises:
      UsageError: if there is no such record, in one line.
    """

    def __init__(self, config: Config):
        self._directory, self.steps, self.last = config.verify_against, 0, 0
        try:
            lines = fingerprint.read(os.path.join(self._directory, "fingerprints.jsonl"))
            recorded = json.loads(tf.io.gfile.GFile(os.path.join(self._directory, "config.json")).read())
        except (OSError, tf.errors.OpError, ValueError) as error:
            reason = getattr(error, "message", str(error))
            raise UsageError(f"--verify_against={self._directory} holds no fingerprints of a run: {reason}") from None
        if not any("loss" in line for line in lines):
            raise UsageError(f"--verify_against={self._directory} holds no fingerprints of a run: no step is recorded")
        self.every, self._header = lines[0]["every"], lines[0]
        self.digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
        self._lines, self._keys = differences.keyed(lines), differences.Keys()
        self.last = max(self._lines)[0]
        self._other = [
            differences.Difference(0, "configuration", name, f"{recorded[name]!r} against {value!r}")
            for name, value in config.result_fields().items()
            if name not in _LENGTH and name in recorded and recorded[name] != value
        ]

    def __call__(self, line):
        """Compares a line. Raises Differs."""
        for found in self._other[:1]:
            raise self._differs(found)
        recorded = self._lines.get(self._keys.of(line))
        if found := recorded and differences.of_line(self._header, recorded, line):
            raise self._differs(found)
        self.steps += bool(recorded) and "loss" in line

    def _differs(self, found):
        also = f"; and {len(self._other) - 1} more flags" if len(self._other) > 1 else ""
        return Differs(f"not the run in {self._directory}: {found}{also} ({found.explanation})")

    def summary(self) -> str:
        """What was found, for the end of a run that did not differ."""
        if not self.steps:
            return f"nothing verified: {self._directory} has recorded no step of this run"
        return f"verified {self.steps} steps against {self._directory}, up to step {self.last}: identical"
