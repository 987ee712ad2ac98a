"""The learning rate of every update: one formula in float64, for Python and for the graph, of the number of updates made.

The rate is put into the optimizer's own `learning_rate` variable before each update (`cluster.Trainer.compile(schedule=...)`),
and no keras.optimizers.schedules object is given to the optimizer: Keras's classes know no warm-up before steps, a class of
ours in a saved file would keep it from opening elsewhere, and Keras evaluates such an object anew for every decayed variable.
This way a saved file holds a number, and callbacks can read it.

Only the call in the graph needs TensorFlow.
"""

import dataclasses
import math
from fractions import Fraction

import numpy as np

SCHEDULES = ("constant", "step", "piecewise", "exponential", "cosine", "polynomial")
_USED_BY = {
    "boundaries": ("step",),
    "decay_every": ("step", "exponential"),
    "decay_rate": ("step", "exponential"),
    "piecewise": ("piecewise",),
    "min_learning_rate": ("step", "exponential", "cosine", "polynomial"),
    "power": ("polynomial",),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The rate as a function of the step: `at` in Python, a call in the graph.

    Attributes:
      kind: one of SCHEDULES.
      rate: at the end of the warm-up, scaled for the global batch.
      steps_per_epoch: examples / B, a real number.
      total_steps: length of the run.
      warmup_steps: W; the rate is rate x t / W before step W.
      pieces: ((first step, rate from there on), ...), rising.
      interval: steps between two decays of `step`, a whole number, or steps in which `exponential` decays once.
      factor, minimum, power: of `step` and `exponential`; the floor or the end; of `polynomial`.
    """

    kind: str
    rate: float
    steps_per_epoch: float
    total_steps: int
    warmup_steps: int = 0
    pieces: tuple[tuple[int, float], ...] = ()
    interval: float = 0.0
    factor: float = 1.0
    minimum: float = 0.0
    power: float = 1.0

    @property
    def constant(self) -> bool:
        """Whether every step has the same rate; then nothing need set it, and callbacks may."""
        return self.kind == "constant" and not self.warmup_steps

    def at(self, step: int) -> float:
        """The rate of the update that follows `step` updates."""
        return float(self._rate(np.float64(step), np))

    def __call__(self, iterations):
        """The same number as a scalar tensor of Keras's floatx; `iterations` is the optimizer's, an integer scalar."""
        import keras
        import tensorflow as tf

        return tf.cast(self._rate(tf.cast(tf.convert_to_tensor(iterations), tf.float64), tf), keras.config.floatx())

    def _rate(self, t, xp):
        rate = self._decayed(t, xp)
        return xp.where(t < self.warmup_steps, self.rate * (t / self.warmup_steps), rate) if self.warmup_steps else rate

    def _decayed(self, t, xp):
        after = xp.maximum(t - self.warmup_steps, 0.0)
        progress = xp.minimum(after / max(self.total_steps - self.warmup_steps, 1), 1.0)
        rate = 0.0 * t + self.rate
        if self.kind == "cosine":
            rate = self.minimum + (self.rate - self.minimum) * (0.5 + 0.5 * xp.cos(math.pi * progress))
        elif self.kind == "polynomial":
            rate = self.minimum + (self.rate - self.minimum) * (1.0 - progress) ** self.power
        elif self.interval:
            decays = xp.floor(t / self.interval) if self.kind == "step" else after / self.interval
            rate = xp.maximum(self.rate * self.factor**decays, self.minimum)
        for first, value in self.pieces:
            rate = xp.where(t < first, rate, value)
        return rate


def make(config, examples: int, total_steps: int) -> Schedule:
    """The configured schedule. Warm-up: linear from 0 to the rate (Goyal et al. 2017, 2.2).

    An epoch is examples / B steps as a real number, whatever the run's whole-step epochs are. `step` and `piecewise` count
    from the start of the run, as papers do; the smooth ones begin where the warm-up ends. Of lengths that are no whole steps:

    * `step` with boundaries multiplies at the first step at or after each, as tf_cnn_benchmarks' ImageNet ResNets do.
    * `step` every so often, `piecewise` and the warm-up round down, as there: every 2.4 epochs of 100.3 steps are every 240.

    `piecewise` names its rates itself: --learning_rate, which every recipe has, plays no part. --learning_rate_for=n multiplies
    all rates but the minimum by B / n (Goyal et al. 2017, 2.1). Cosine: Loshchilov & Hutter 2017, without restarts.

    Args:
      config: `problems(config)` is empty.
      examples: training examples.
      total_steps: of the run; `cosine` and `polynomial` end there. A run that is cut short may end within the warm-up.
    Raises:
      ValueError: if a decay comes more often than once a step.
    """
    per_unit = Fraction(examples, config.global_batch_size) if config.schedule_unit == "epochs" else Fraction(1)
    rate = base_rate(config)
    if config.schedule == "piecewise":
        values, boundaries = _piecewise(config.piecewise)
        rate, *values = [value * _scale(config) for value in values]
        steps = [math.floor(boundary * per_unit) for boundary in boundaries]
    else:
        boundaries = _boundaries(config.boundaries) if config.boundaries else []
        values = [max(rate * config.decay_rate ** (i + 1), config.min_learning_rate) for i in range(len(boundaries))]
        steps = [math.ceil(boundary * per_unit) for boundary in boundaries]
    interval = _exact(config.decay_every) * per_unit
    if 0 < interval < 1 and config.schedule == "step":
        raise ValueError(f"--decay_every={config.decay_every} {config.schedule_unit} are less than a step: use a larger one")
    warmup_steps = math.floor(_exact(config.warmup) * per_unit)
    return Schedule(
        config.schedule,
        rate,
        examples / config.global_batch_size,
        total_steps,
        warmup_steps,
        tuple(zip(steps, values, strict=True)),
        math.floor(interval) if config.schedule == "step" else float(interval),
        config.decay_rate,
        config.min_learning_rate,
        config.power,
    )


def base_rate(config) -> float:
    """--learning_rate for this global batch: times B / n with --learning_rate_for=n."""
    return config.learning_rate * _scale(config)


def problems(config) -> list[str]:
    """What contradicts itself in the flags of the schedule: a line each, with the flag, its value, and what to do."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    found = [
        f"--{name}={getattr(config, name)} is for --schedule={' or '.join(users)}; --schedule={config.schedule} does without: "
        f"leave it out, or take it back with --{name}={defaults[name]}"
        for name, users in _USED_BY.items()
        if config.schedule not in users and getattr(config, name) != defaults[name]
    ]
    try:
        first = _first_change(config)
    except ValueError as error:
        found.append(str(error))
        first = 0
    if 0 < first < _exact(config.warmup):
        found.append(f"--warmup={config.warmup} goes on after the first change, at {float(first):g}: use a shorter one")
    if config.schedule in _USED_BY["min_learning_rate"] and config.min_learning_rate > base_rate(config):
        found.append(
            f"--min_learning_rate={config.min_learning_rate} is above the rate itself, {base_rate(config):g}: use a lower one"
        )
    return found


def table(schedule: Schedule) -> str:
    """The rate at the start, the end of the warm-up, the changes (or quarters of a smooth decay) and the last step."""
    start, end = schedule.warmup_steps, schedule.total_steps
    if schedule.pieces:
        changes = [first for first, _ in schedule.pieces if first < end]
    elif schedule.kind == "step":
        changes = range(schedule.interval, end, schedule.interval)
    else:
        changes = [start + (end - start) * i // 4 for i in (1, 2, 3) if schedule.kind != "constant"]
    shown = [*changes] if len(changes) < 8 else [*changes[:4], *changes[-3:]]
    lines = [f"{'step':>10}{'epoch':>9}  learning rate"]
    for step in sorted({0, min(start, end - 1), *shown, end - 1}):
        lines.append(f"{step:>10,}{step / schedule.steps_per_epoch:>9.2f}  {schedule.at(step):.6g}")
        if len(changes) >= 8 and step == shown[3]:
            lines.append(f"{'...':>10}")
    return "\n".join(lines)


def _scale(config):
    return config.global_batch_size / config.learning_rate_for if config.learning_rate_for else 1.0


def _first_change(config):
    """Where `step` or `piecewise` first changes the rate, in the schedule's unit; 0: nowhere. ValueError if no flag says."""
    if config.schedule == "step":
        if config.boundaries and config.decay_every:
            raise ValueError(f"--boundaries={config.boundaries} and --decay_every={config.decay_every}: give one of them")
        if not config.boundaries and not config.decay_every:
            raise ValueError("--schedule=step needs --boundaries, as 30,60,80,90, or --decay_every")
        return _boundaries(config.boundaries)[0] if config.boundaries else _exact(config.decay_every)
    if config.schedule == "exponential" and not config.decay_every:
        raise ValueError("--schedule=exponential needs --decay_every: how long it takes to multiply by --decay_rate once")
    return next(iter(_piecewise(config.piecewise)[1]), 0) if config.schedule == "piecewise" else 0


def _exact(number: float | str) -> Fraction:
    """The decimal number as it was written: 4.35 x 100 steps are 435, and not 434."""
    return Fraction(repr(float(number)))


def _boundaries(text):
    try:
        boundaries = [_exact(part) for part in text.split(",")]
    except ValueError:
        boundaries = []
    if not boundaries or not _rise(boundaries):
        raise ValueError(f"--boundaries={text}: numbers above 0 that rise, as 30,60,80,90")
    return boundaries


def _piecewise(text):
    """(rates, the boundaries between them) of 'rate;boundary;rate;...'."""
    try:
        numbers = [_exact(part) for part in text.split(";")]
    except ValueError:
        numbers = []
    rates, boundaries = [float(number) for number in numbers[::2]], numbers[1::2]
    if len(numbers) % 2 == 0 or min(rates) < 0 or not _rise(boundaries):
        raise ValueError(
            f"--piecewise={text}: rates and the rising boundaries between them, rate;boundary;rate, as 0.1;30;0.01;60;0.001 "
            "(with --schedule=piecewise)"
        )
    return rates, boundaries


def _rise(numbers):
    return all(low < high for low, high in zip([Fraction(0), *numbers], numbers, strict=False))
