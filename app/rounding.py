"""What rounding can do to a run: a callback that moves every weight by sixteen units in its last place after every step.

It makes the reference of `verify --noidentical`. Two correct runs differ by the rounding of sums, which is less than one unit
in the last place of each weight a step; how that grows depends on network, data and rate, and no bound from theory is of use
after a few steps. So it is measured, on a run on one worker that is the same but for this callback. Sixteen, because a
gradient jumps where a ReLU tips over (by 1e-3 of its norm, seen with 4 x 32 digits): the more a run is disturbed, the sooner
it does, and the reference should be the first.
"""

import keras
import numpy as np

UNITS = 16


class Disturbance(keras.callbacks.Callback):
    """Moves each weight and moving statistic up or down, at random, by `UNITS` in the last place.

    It does so before the first step and after every execution; the signs follow from the seed and the step.
    """

    def __init__(self, seed):
        super().__init__()
        self._seed = seed

    def on_train_begin(self, logs=None):
        self._disturb()

    def on_train_batch_end(self, batch, logs=None):
        self._disturb()

    def _disturb(self):
        rng = np.random.default_rng([self._seed, self.model.step])
        plain = self.model.model
        for variable in [*plain.trainable_variables, *plain.non_trainable_variables]:
            value = keras.ops.convert_to_numpy(variable)
            if value.dtype in (np.float32, np.float64):
                signs = rng.choice(np.array([-UNITS, UNITS], value.dtype), value.shape)
                variable.assign(value + signs * np.spacing(np.abs(value)))
