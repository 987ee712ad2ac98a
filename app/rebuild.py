"""A recorded run, made ready to be run again in this process: from its configuration, or from what `cluster.watch` kept."""

import dataclasses
import os

import keras
import numpy as np
import tensorflow as tf

import cluster
from app import assembly, initial
from app import data as data_module
from app.config import Config, UsageError
from app.replay import NoState, Replay
from app.streams import EvaluationStreams, TrainingStreams
from cluster import digest


def replay(run, strategy) -> Replay:
    """The `Replay` of an `app.compare.Run` on a strategy of one replica.

    Raises:
      NoState: if there is nothing to make it from.
      UsageError: if the data of the recorded configuration cannot be used.
    """
    header = run.lines[0]
    if header.get("kept"):
        folders = [os.path.join(os.path.dirname(run.file), name) for name in header.get("kept_by_workers", [header["kept"]])]
        if missing := [folder for folder in folders if not os.path.isdir(folder)]:
            raise NoState(f"{missing[0]} is not there")
        own_statistics = header["replicas"] > 1  # as Keras has them under a strategy
        return Replay(_of_kept(folders[0], header, strategy), kept=folders, own_statistics=own_statistics)
    if run.config is None:
        raise NoState(f"{run.name} has no configuration to run again, and nothing was kept (watch(..., keep=))")
    config = Config(**{f.name: run.config[f.name] for f in dataclasses.fields(Config) if f.name in run.config})
    data = data_module.load(config, say=lambda line: None)
    if run.config["data_manifest"] != data.manifest.digest():
        raise UsageError(f"{run.name}: the prepared data is not what it was when the run was made: {data.manifest.directory}")
    steps_per_epoch = data.training.steps
    total_steps = config.steps or config.epochs * steps_per_epoch
    streams = _Streams(config, data)
    keras.utils.set_random_seed(config.seed % 2**32)  # of the initial weights, as when the run began
    plain, model = assembly.assemble(config, data, strategy, total_steps)
    initial.put(config, plain, None, lambda: assembly.network(config, data))
    evaluation = streams.held_out if data.evaluation else None
    return Replay(model, streams.training, evaluation=evaluation, reseeded=streams.reseeded, repainted=streams.repainted)


def _of_kept(kept, header, strategy):
    with strategy.scope():
        try:
            plain = keras.saving.load_model(os.path.join(kept, "model.keras"))  # in safe mode: no code of the file's runs
        except (TypeError, ValueError, OSError) as error:
            reason = " ".join(str(error).split()).partition(". ")[0][:200]
            raise NoState(f"{kept}/model.keras cannot be opened without its script's own code: {reason}") from None
        model = cluster.Trainer(plain, header["global_batch_size"], header["logical_replicas"], identical=False)
        optimizer = plain.optimizer.__class__.from_config(plain.optimizer.get_config())
        metrics = plain._compile_metrics._user_metrics if plain._compile_metrics else None
        model.compile(optimizer, plain.loss, metrics=metrics)
    return model


class _Streams:
    """The run's examples from any step on, and in other ways."""

    def __init__(self, config, data):
        self._config, self._data = config, data

    def training(self, first_step, seed=None, treatment=None):
        config, data = self._config, self._data
        return TrainingStreams(
            data.manifest,
            treatment or data.treatment,
            config.logical_replicas,
            config.global_batch_size,
            config.seed if seed is None else seed,
            first_step,
            config.shuffle_buffer,
            len(data.manifest.classes) if config.label_smoothing else 0,
        )

    def reseeded(self, seed, step):
        """The ids of a step's examples under another seed."""
        config = self._config
        streams = self.training(step - 1, seed)
        named = streams.identified(0, config.logical_replicas, config.replica_batch_size).take(config.global_batch_size)
        return [tuple(int(number) for number in element[:3]) for element in named]

    def repainted(self, step):
        """Yields what was done to the pixels and the hashes of a step's x, for other ways of augmentation."""
        treatment, config = self._data.treatment, self._config
        high = 1 << 32

        def keyed(change):
            return dataclasses.replace(treatment, train=lambda image, key: treatment.train(image, change(key)))

        yield (
            "no augmentation",
            self._pixels(step, dataclasses.replace(treatment, train=lambda image, _: treatment.evaluate(image))),
        )
        same = keyed(lambda key: tf.stack([key[0] // high * high, key[1]]))
        yield "augmentation that is the same in every epoch", self._pixels(step, same)
        for seed in range(10):
            if seed != config.seed:
                offset = (seed - config.seed) * high
                other = keyed(lambda key: key + tf.constant([offset, 0], tf.int64))
                yield f"augmentation by seed {seed}, not {config.seed}", self._pixels(step, other)

    def _pixels(self, step, treatment):
        config = self._config
        examples = self.training(step - 1, treatment=treatment).examples(0, config.logical_replicas, config.replica_batch_size)
        x, _ = next(iter(examples.batch(config.global_batch_size)))
        return digest.hex_digits(digest.of_examples(x, config.global_batch_size))

    def held_out(self):
        """(x, y) of the held-out examples, in input order."""
        config, data = self._config, self._data
        one_hot = len(data.manifest.classes) if config.label_smoothing else 0
        streams = EvaluationStreams(data.manifest, data.treatment, 1, config.global_batch_size, one_hot)
        elements = streams.examples(0, 1, config.global_batch_size).take(data.manifest.test.examples)
        pairs = [element for element, _ in elements]
        return np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])
