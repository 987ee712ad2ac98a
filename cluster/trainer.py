"""A Keras model that trains the same weights on any number of workers: Keras's own `fit`, a step of logical replicas.

    with strategy.scope():
        model = cluster.Trainer(plain_model, global_batch_size=256)
        model.compile("sgd", "sparse_categorical_crossentropy", ["accuracy"])
    model.fit(dataset_of_global_batches, epochs=3)

A run is defined over K logical replicas of b = B/K examples. A step is the passes of all K (`replica_pass.py`), their sum
in one fixed tree (`reduction.py`), one division by K, and one optimizer update with the finished global gradient
(`step.py`). How many workers there are decides who computes which pass, and nothing else.
"""

import itertools
import os

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from tensorflow.python.framework.config import is_op_determinism_enabled

from cluster import checkpoint, datasets, global_batch_norm, lifeline, losses, tree, wishes
from cluster.mirrored_steps import MirroredSteps
from cluster.reduction import Reduction
from cluster.remote_steps import RemoteSteps
from cluster.step import Step


class Trainer(keras.Model):
    """Wraps a plain Keras model for `fit`, `evaluate` and callbacks on one or many workers.

    The plain model stays what it is (`trainer.model`): `save`, `save_weights` and `load_weights` go to it, so a saved file
    opens where this package is not installed. Every worker may call them; only the chief writes.

    Args:
      model: a keras.Model made under the scope of the tf.distribute strategy to train with.
      global_batch_size: B, examples a step over all workers.
      logical_replicas: K; must divide B, and the number N of the strategy's replicas must divide it. Default: the
        largest power of two that divides B and leaves 32 examples each.
      seed: keys the random layers, together with step, logical replica and layer.
      identical: add in tree order, the same bits for every N (default); False: by ring all-reduce, equal up to rounding.
      communication: TensorFlow's hint, 'auto', 'ring' or 'nccl'; it changes no order of addition.
      batch_norm: batch normalisation takes its statistics over the examples of a logical 'replica', or over the 'global' batch
        (`global_batch_norm.py`), which needs identical=False and a model without random layers.
      asynchronous: with ParameterServerStrategy, an update for each result when it comes: of one logical replica, K = 1.

    Under ParameterServerStrategy the data has to be streams that tell a batch by its place, `batch_at(step, k)`: see
    `remote_steps.py`.

    Raises:
      ValueError: if K does not divide B or N does not divide K (the message names what would do), or if `identical` is
        asked of a TensorFlow that is not deterministic (see `cluster.runtime.configure`), or with batch_norm='global'.
      global_batch_norm.Refused: a ValueError, for layers that have no place in a pass of all of a worker's examples.
    """

    def __init__(
        self,
        model,
        global_batch_size,
        logical_replicas=None,
        seed=0,
        identical=True,
        communication="auto",
        batch_norm="replica",
        asynchronous=False,
    ):
        super().__init__(name=f"{model.name}_trainer")
        if identical and not is_op_determinism_enabled():
            raise ValueError("identical=True needs deterministic operations: call cluster.runtime.configure() first.")
        if batch_norm == "global":
            if identical:
                raise ValueError("batch_norm='global' adds within the passes, in another order for every N: identical=False.")
            global_batch_norm.check_layers(model)
        self.batch_norm, self.asynchronous = batch_norm, asynchronous
        self.model = model
        self.global_batch_size = global_batch_size
        self.logical_replicas = logical_replicas or tree.default_logical_replicas(global_batch_size)
        if global_batch_size % self.logical_replicas:
            near = global_batch_size // self.logical_replicas * self.logical_replicas or self.logical_replicas
            raise ValueError(
                f"{self.logical_replicas} logical replicas do not divide the global batch of {global_batch_size}. Use a "
                f"batch of {near} or {near + self.logical_replicas}, or K out of {tree.divisors(global_batch_size)}."
            )
        self.seed = seed
        self._remote, strategy = None, self.distribute_strategy
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            if batch_norm == "global":
                raise ValueError("batch_norm='global' adds over workers within the passes; with parameter servers none can.")
            self._remote = RemoteSteps(self, strategy)
            strategy = tf.distribute.OneDeviceStrategy("CPU:0")  # the coordinator alone adds
        elif asynchronous:
            raise ValueError("asynchronous=True needs tf.distribute.ParameterServerStrategy.")
        if asynchronous and self.logical_replicas > 1:
            raise ValueError(f"asynchronous=True makes an update of one logical replica; got {self.logical_replicas} of them.")
        together = batch_norm == "global"
        self.reduction = Reduction(strategy, self.logical_replicas, identical, communication, together=together)
        self._training_metrics = True
        self._steps_per_epoch, self._steps_done = None, 0
        self._records, self._record_names = [], []
        self.wished, self._resume = (False, False), None
        self._recorder, self._ids = None, 0

    def call(self, inputs, training=None):
        return self.model(inputs, training=training)

    @property
    def step(self) -> int:
        """t, the number of training steps taken."""
        return int(self._step.count.numpy())

    @property
    def coordinator_spent(self) -> list[tuple[float, float, int]] | None:
        """With parameter servers, of the last steps: seconds of waiting for results, and of the update; bytes that came."""
        return self._remote and list(self._remote.spent)

    @property
    def steps_to_come(self) -> int:
        """How many steps the epoch, or the run if that is less, had to come at the last execution's end."""
        return min(self._steps_per_epoch - self._steps_done, self._steps_left)

    def compile(
        self, optimizer="rmsprop", loss=None, loss_weights=None, metrics=None, *, jit_compile=False, schedule=None, **kwargs
    ):
        """Keras's `compile`. `jit_compile=True` applies to the passes: XLA has no collectives on CPU.

        Args:
          schedule: the learning rate of each update, a function of the number of updates made (a scalar integer tensor), set
            in the graph; the optimizer's own rate has to be a number then. Unlike a keras LearningRateSchedule it does not go
            into saved files. None: the optimizer's own rate, or its own schedule.
        Other arguments: as in Keras.

        Raises:
          ValueError: for `run_eagerly`; for `gradient_accumulation_steps`, which logical replicas replace; for
            `ema_overwrite_frequency`; for losses whose reduction cannot mean the same for every N (`losses.check`).
        """
        if kwargs.get("run_eagerly"):
            raise ValueError("run_eagerly=True is not supported: a step is one graph on all workers.")
        losses.check(loss)
        kwargs |= {"loss_weights": loss_weights, "metrics": metrics, "jit_compile": False}
        # The plain model is compiled as well: a saved file then holds optimizer and loss, as of any Keras model.
        self.model.compile(optimizer, loss, **kwargs)
        optimizer = self.model.optimizer
        for part in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
            if part.gradient_accumulation_steps:
                raise ValueError(
                    f"gradient_accumulation_steps={part.gradient_accumulation_steps} is not supported: logical replicas "
                    "accumulate. Multiply global_batch_size and logical_replicas by it instead."
                )
            if part.use_ema and part.ema_overwrite_frequency:
                raise ValueError(
                    f"ema_overwrite_frequency={part.ema_overwrite_frequency} is not supported: Keras fails at it under "
                    "tf.distribute. Without it, fit ends with the averages as weights."
                )
            # It gets the finished global gradient; Keras would add that up over the replicas once more, in
            # keras/src/backend/tensorflow/optimizer.py. (test_two_workers_train_the_same_weights_as_one tells.)
            part._all_reduce_sum_gradients = lambda gradients_and_variables: gradients_and_variables
        super().compile(optimizer, losses.over_replicas(loss, self.reduction.leaves), **kwargs)
        self.schedule = schedule
        self._step = Step(self)
        self._jit_passes = jit_compile is True

    # ---- fit and evaluate: Keras's own, on checked data --------------------------------------------------------------

    def fit(
        self,
        x=None,
        *,
        steps_per_epoch=None,
        total_steps=None,
        validation_data=None,
        validation_steps=None,
        class_weight=None,
        fingerprints=None,
        resume=None,
        **kwargs,
    ):
        """Keras's `fit` on a tf.data.Dataset of global batches (x, y[, sample_weight]), or on streams.

        Args:
          x: a tf.data.Dataset of batches of exactly B examples, finite, or endless with `steps_per_epoch`; or
            `datasets.Streams`, of which each worker reads its part alone.
          validation_data: a tf.data.Dataset of batches of any size, arrays (x, y[, sample_weight]), or `datasets.Streams`.
          total_steps: stop after so many steps, also in the middle of an epoch; those of a resumed run count.
          fingerprints: a `fingerprint.Recorder`, on every worker; it changes no bit of the training.
          resume: a `checkpoint.Checkpoint` to go on from, on every worker the same; `x` begins at its step. Callbacks' states
            are not put back here: see `checkpoint.put_back_callbacks`.
          class_weight, validation_steps, other arguments: as in Keras.
        Raises:
          ValueError: see `datasets.training`, `datasets.evaluation` and `losses`.
          checkpoint.Damaged: if `resume` is of another network or optimizer.
          drift.Drift: at a recorded step after which the workers do not hold the same weights.
          wishes.Stopped: if a worker wished it during an evaluation; wishes.NonFinite: at a loss or gradient that is not.
        """
        self._assert_compile_called("fit")
        self._recorder = fingerprints
        ids = x.ids.shape[0] if fingerprints and hasattr(x, "ids") else 0
        if ids != self._ids:
            self._ids, self.train_function = ids, None
        if hasattr(x, "examples"):
            if class_weight:
                raise ValueError("class_weight is for a tf.data.Dataset; let the streams yield (x, y, sample_weight) instead.")
            spec, steps_per_epoch = self._batch_spec(x), steps_per_epoch or x.steps
            x = self._distribute(x, bool(ids), training=True)
        else:
            self._need_streams()
            if class_weight:
                x = x.map(make_class_weight_map_fn(class_weight))
            x, steps_per_epoch = datasets.training(x, self.global_batch_size, self.distribute_strategy, steps_per_epoch)
            spec = x.element_spec
        lifeline.sign("tracing")
        self._prepare(True, spec)
        if validation_data is not None:
            validation_data, validation_steps = self._evaluation_data(validation_data, validation_steps)
        self._resume = resume
        if resume:
            checkpoint.put_back(resume, self)
            ended = resume.facts["stopped"] and not resume.in_epoch
            kwargs["initial_epoch"] = kwargs.get("epochs", 1) if ended else resume.epoch
        self._t = self.step
        self._steps_per_epoch, self._steps_done = steps_per_epoch, resume.in_epoch % steps_per_epoch if resume else 0
        self._steps_left = float("inf") if total_steps is None else total_steps - (self._t if resume else 0)
        if self._recorder:
            self._recorder.begin(self)
        try:
            return super().fit(
                x,
                steps_per_epoch=steps_per_epoch,
                validation_data=validation_data,
                validation_steps=validation_steps,
                **{**kwargs, "shuffle": False},  # the data set has its order
            )
        finally:
            lifeline.sign(None)
            if self._recorder:
                self._recorder.end()
            self._recorder = self._resume = None

    def evaluate(self, x=None, y=None, batch_size=None, verbose="auto", sample_weight=None, steps=None, **kwargs):
        """Keras's `evaluate`: every example once, the same numbers on every worker, to the last bit for every N."""
        self._assert_compile_called("evaluate")
        self._evaluation = f"evaluation after step {self.step}"  # asked once: with parameter servers it is not here
        steps_per_execution, self.steps_per_execution = self.steps_per_execution, 1
        self._training_metrics = False
        try:
            if kwargs.get("_use_cached_eval_dataset"):  # called by fit
                self._eval_epoch_iterator.steps_per_execution = 1
            else:
                data = x if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
                x, steps = self._evaluation_data(data, steps, batch_size)
            found = super().evaluate(x, verbose=verbose, steps=steps, **kwargs)
            if self._recorder:
                self._recorder.evaluated(self.step, *self._results(False), self.examples_evaluated)
            return found
        finally:
            self.steps_per_execution, self._training_metrics = steps_per_execution, True

    def _evaluation_data(self, data, steps, batch_size=None):
        if hasattr(data, "examples"):
            self._prepare(False, self._batch_spec(data)[0])
            return self._distribute(data), steps or data.steps
        self._need_streams()
        data, steps = datasets.evaluation(
            data, self.distribute_strategy, self.logical_replicas, batch_size or self.global_batch_size, steps
        )
        self._prepare(False, data.element_spec[0])
        return data, steps

    def _need_streams(self):
        if self._remote:
            raise ValueError("With parameter servers, data has to be streams that tell a batch by its place: see Trainer.")

    def _batch_spec(self, streams):
        return datasets.batch_spec(streams.element_spec, self.global_batch_size)

    def _distribute(self, streams, ids=False, training=False):
        if self._remote:
            return self._remote.distribute(streams, training)
        return datasets.distribute(streams, self.distribute_strategy, self.logical_replicas, self.global_batch_size, ids)

    def _prepare(self, training, spec):
        """Builds model, loss, metrics and optimizer from the data's specs, and traces the pass."""
        if tf.distribute.has_strategy():
            raise ValueError("Call fit and evaluate outside strategy.scope().")
        spec = spec if isinstance(spec, tuple) else (spec,)
        if not self._step.sums[True]:
            with self.distribute_strategy.scope():
                self._symbolic_build(data_batch=spec)
            losses.check_metrics(self, spec)
        if self._step.trace(training, spec, self._jit_passes):
            if training:
                self.train_function = None
            else:
                self.test_function = None

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # Keras would reduce the first batch over the workers to learn its shapes, and fail: "Attempt to convert a value
        # (PerReplica...) to a Tensor" (keras#20585). `_prepare` has built everything from the specs.
        # In `fit` it is called with what goes through the epochs. (tests/test_resume.py tells if that should change.)
        if self._resume and self._resume.in_epoch and self._training_metrics:
            stopped, left = self._resume.facts["stopped"], self._steps_per_epoch - self._resume.in_epoch
            iterator._enumerate_iterator = lambda: self._rest_of_epoch(iterator, 0 if stopped else left)

    def _rest_of_epoch(self, iterator, steps):
        """The executions of the `steps` that a resumed epoch still has, numbered as in the whole epoch."""
        del iterator._enumerate_iterator  # the next epochs are whole
        every, all_steps = self.steps_per_execution, self._steps_per_epoch
        return itertools.islice(iterator._enumerate_iterator(), -(-all_steps // every) - -(-steps // every), None)

    def make_train_function(self, force=False):
        if force or self.train_function is None:
            steps_here = self._remote or MirroredSteps(self)
            several_steps, observed_step = steps_here.several_steps, steps_here.observed_step

            def train_function(iterator):
                steps = min(self.steps_per_execution, self.steps_to_come)  # cut at the epoch's and the run's end
                self._records = []
                lifeline.sign(f"step {self._t + 1}")
                for observed, count in self._recorded_or_not(steps):
                    if observed:
                        logs, records, told, ending = observed_step(iterator)
                        self._recorder.stepped(self._t + 1, *self._results(True, told.sums), told.seen)
                    else:
                        logs, records, ending = several_steps(iterator, tf.constant(count))
                    self._records.append(records)
                    if self._count_steps(*ending):
                        break
                return logs

            self.train_function = train_function

    def _count_steps(self, done, wish, bad):
        """Takes note of steps made, of a wish to stop, and of what is not finite. Returns whether to make no more."""
        done, bad = int(done), int(bad)
        self._t += done
        self._steps_done = (self._steps_done + done) % self._steps_per_epoch
        self._steps_left -= done
        self.stop_training |= self._steps_left == 0
        self.wished = wish.numpy() > 0
        if bad >= 0:
            weights = self.model.trainable_variables
            what = f"the gradient of {weights[bad].path}" if bad < len(weights) else "the loss"
            raise wishes.NonFinite(f"step {self._t}: {what} is not finite")
        return self.wished[wishes.STOP]

    def _recorded_or_not(self, steps):
        """The next `steps` steps in runs that are made in one call: (whether to record, number of steps)."""
        if self._recorder is None:
            return [(False, steps)]
        due = [self._recorder.due(self._t + 1 + i) for i in range(steps)]
        runs = [(recorded, len(list(run))) for recorded, run in itertools.groupby(due)]
        return [part for recorded, count in runs for part in ([(True, 1)] * count if recorded else [(False, count)])]

    def make_test_function(self, force=False):
        if force or self.test_function is None:
            evaluate_step = (self._remote or MirroredSteps(self)).evaluate_step

            def test_function(iterator):
                lifeline.sign(self._evaluation)
                logs, _, (_, wish, _) = evaluate_step(iterator, tf.constant(1))
                if wish[wishes.STOP] > 0:
                    raise wishes.Stopped
                return logs

            self.test_function = test_function

    def _metric_names(self):
        with keras.StatelessScope(self._step.metric_values(True)):
            return list(super().get_metrics_result())

    def _record(self, told, wait, more=()):
        with keras.StatelessScope(self._step.metric_values(True, told.sums)):
            values = super().get_metrics_result()
        values |= {"learning_rate": told.learning_rate, "gradient_norm": told.norm, "input_wait_s": wait, **dict(more)}
        self._record_names = list(values)
        return [tf.cast(value, tf.float32) for value in values.values()]

    def _results(self, training, sums=None):
        """The metrics by name and the metric sums, of an evaluation or of one step."""
        with keras.StatelessScope(self._step.metric_values(training, sums)):
            metrics = {name: float(value) for name, value in super().get_metrics_result().items()}
        return metrics, [np.asarray(s).ravel().tolist() for s in (self._step.sums[training] if sums is None else sums)]

    def records(self) -> list[dict[str, float]]:
        """What is known of each step of the last execution, the oldest first; for callbacks, in `on_train_batch_end`.

        The metrics of that step alone, over the global batch; `learning_rate`; `gradient_norm`, of the global gradient before
        clipping; and `input_wait_s`, how long this worker waited for its data. All but the last are the same on every worker.
        If asynchronous, `staleness`: how many updates were made since the step's weights were read.
        """
        tables = [[stack.numpy().tolist() for stack in stacks] for stacks in self._records]
        rows = [row for columns in tables for row in zip(*columns, strict=True)]
        return [dict(zip(self._record_names, row, strict=True)) for row in rows]

    @property
    def examples_evaluated(self) -> int:
        """How many examples the last evaluation counted, over all workers."""
        return int(self.metric_value(self._loss_tracker.count))

    def metric_value(self, variable):
        """What the last evaluation left in a metric's variable, over all workers, as a NumPy array."""
        return next(total for v, total in self._step.metric_values(False) if v is variable).numpy()

    # ---- metrics: finished sums over all workers ---------------------------------------------------------------------

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if self._compile_metrics is not None:
            # Losses convert half precision by themselves; top-k metrics fail on it (InTopKV2 takes float32 alone).
            half = ("float16", "bfloat16")
            y_pred = keras.tree.map_structure(
                lambda t: keras.ops.cast(t, "float32") if keras.backend.standardize_dtype(t.dtype) in half else t, y_pred
            )
            self._compile_metrics.update_state(y, y_pred, sample_weight)
        return {}  # a logical replica's share has no result of its own

    def get_metrics_result(self):
        with keras.StatelessScope(self._step.metric_values(self._training_metrics)):
            return super().get_metrics_result()

    def _get_metrics_result_or_logs(self, logs):
        # Keras would give {} for an epoch that has no step left, as of a run that was stopped before its evaluation.
        return self.get_metrics_result()

    def reset_metrics(self):
        self._step.reset(self._training_metrics)
        if self._resume and self._training_metrics:  # the epoch that goes on
            if self._resume.in_epoch:
                checkpoint.put_back(self._resume, self)
                self.stop_training = self._resume.facts["stopped"]
            self._resume = None

    # ---- saving: the plain model, by the chief -----------------------------------------------------------------------

    def save(self, filepath, overwrite=True, **kwargs):
        """Saves the plain model, compiled, under a temporary name that is then renamed; on the chief only."""
        self._write(lambda path: self.model.save(path, **kwargs), filepath, overwrite)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        self._write(lambda path: self.model.save_weights(path, **kwargs), filepath, overwrite)

    def load_weights(self, filepath, **kwargs):
        self.model.load_weights(filepath, **kwargs)

    def _write(self, write, filepath, overwrite):
        if not self.distribute_strategy.extended.should_checkpoint:
            return
        directory, name = os.path.split(os.fspath(filepath))
        if not overwrite and tf.io.gfile.exists(filepath):
            raise ValueError(f"{filepath} exists, and overwrite=False.")
        temporary = os.path.join(directory, f".{os.getpid()}-{name}")  # keeps the ending, by which Keras goes
        write(temporary)
        tf.io.gfile.rename(temporary, os.fspath(filepath), overwrite=True)
