"""Workers that hold other weights than the rest are found at the next recorded step, named, and end the run on all."""

import re

import cases
import keras
import pytest

from cluster.drift import Drift
from cluster.fingerprint import Recorder


class Disturb(keras.callbacks.Callback):
    """Changes one element of one device's copy of a weight after a step."""

    def __init__(self, device, after):
        super().__init__()
        self._device, self._after = device, after

    def on_train_batch_end(self, batch, logs=None):
        if self.model.step == self._after:
            bias = self.model.model.get_layer("normal").beta.value
            self.model.distribute_strategy.experimental_local_results(bias)[self._device][3].assign(7.0)


@pytest.mark.parametrize(
    ("devices_", "disturbed", "who"),
    [
        (2, 1, "device 1 of worker 0 holds other weights than the chief"),
        (3, 0, "device 0 of worker 0 holds other weights than 2 of 3"),
    ],
)
def test_a_device_with_other_weights_and_its_first_other_variable_are_named(devices, devices_, disturbed, who):
    """Disturbed after step 5; every third step is recorded. The majority is right, or, of two, the first."""
    fit = {"fingerprints": Recorder(None, 3), "total_steps": 7}
    with pytest.raises(Drift, match=rf"^step 6: {who}, first normal/beta: [0-9a-f]{{16}} against [0-9a-f]{{16}}\. ") as raised:
        cases.training(devices(devices_), 6, callbacks=[Disturb(disturbed, 5)], fit=fit)
    assert "\n" not in str(raised.value)


def test_where_nothing_is_recorded_nothing_is_compared(devices):
    assert cases.training(devices(2), callbacks=[Disturb(1, 1)], fit={"total_steps": 3})["steps"] == 3


def test_two_workers_end_together_and_say_the_same(clusters):
    first, second = (results["drift"] for results in clusters.run(2, ("drift",)))
    assert first == second
    step, line, path = first
    assert step == 4
    assert re.match(rf"step 4: worker 1 holds other weights than the chief, first {path}: ", line)
