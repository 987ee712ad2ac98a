"""A run's data: prepared where it is not yet, read as one stream a logical replica, the same for every number of workers."""

import dataclasses
import os

from app import early, imagenet, preprocessing, sources
from app import prepare as prepare_module
from app.config import Config, UsageError
from app.manifest import Manifest, ManifestError
from app.records import RecordError
from app.streams import EvaluationStreams, ShardsError, TrainingStreams, UnitStreams

_MISTAKES = (sources.SourceError, prepare_module.PrepareError, ManifestError, RecordError, ShardsError)


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains and evaluates with.

    Attributes:
      manifest: of the prepared data.
      treatment: what becomes of an image; `treatment.shape` is what the network is given.
      training, evaluation: streams for `cluster.Trainer`; evaluation is None if nothing is held out.
    """

    manifest: Manifest
    treatment: preprocessing.Preprocessing
    training: TrainingStreams
    evaluation: EvaluationStreams | None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[height, width, channels] of what the network is given."""
        return self.treatment.shape


def prepare(config: Config, say=print, by_itself: bool = False) -> Manifest:
    """The manifest of the configuration's data set, which is prepared if it is not yet.

    Args:
      by_itself: refuse to prepare a large set, which is to be asked for.
    Raises:
      UsageError: in one line, for whatever is wrong with the raw or the prepared data.
    """
    bad = {"on_bad_record": config.on_bad_record, "max_bad_records": config.max_bad_records}
    place = config.prepared_path()
    try:
        if config.dataset == "imagenet":
            look = config.on_bad_record == "skip"  # what is to be left out has to be known before training
            return imagenet.scan_imagenet(config.data_dir, config.prepared_dir, say, verify_images=look, **bad)
        problem = None
        if by_itself and not os.path.exists(place):
            problem = early.too_many(config, len(sources.open_source(config.dataset, config.data_dir).train))
        if problem:
            raise UsageError(problem)
        return prepare_module.prepare(
            config.dataset, config.data_dir, config.prepared_dir, config.shards, config.prepare_seed, say, **bad
        )
    except _MISTAKES as error:
        raise UsageError(str(error)) from None


def load(config: Config, say=print, first_step=0) -> Data:
    """Opens the data of a run, to begin with the batch after `first_step` steps; see `prepare`."""
    manifest = prepare(config, say, by_itself=True)
    treatment = preprocessing.make(
        manifest.preprocessing, manifest.image_shape, manifest.mean or None, manifest.std or None, config.image_size
    )
    replicas, batch = config.logical_replicas, config.global_batch_size
    one_hot = len(manifest.classes) if config.label_smoothing else 0
    try:
        training = (UnitStreams if config.asynchronous else TrainingStreams)(
            manifest, treatment, replicas, batch, config.seed, first_step, config.shuffle_buffer, one_hot
        )
    except ShardsError as error:
        raise UsageError(str(error)) from None
    evaluation = None
    if manifest.test.examples:
        evaluation = EvaluationStreams(manifest, treatment, replicas, batch, one_hot)
    return Data(manifest, treatment, training, evaluation)
