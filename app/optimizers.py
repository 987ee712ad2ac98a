"""Keras's optimizers by name, made from the flags; weight decay of two kinds, clipping, averages and loss scales with each.

`OPTIMIZERS` and `problems` need no TensorFlow.

Not in the table: FTRL (McMahan et al. 2013), whose state starts as if the weights were 0, so that its first update drops the
initial ones: four convolutions stay at chance on the digits with rates of 0.01 and 0.1 (Adagrad: 99 %). Muon (Jordan et al.
2024), which Keras applies to matrices alone, in a convolutional network only to the classifier, for which it is not meant.
"""

import dataclasses
import math

_ADAM = ("beta_1", "beta_2", "epsilon")
_RULES = {  # name: (Keras's class, the flags it has)
    "sgd": ("SGD", ()),
    "momentum": ("SGD", ("momentum",)),
    "nesterov": ("SGD", ("momentum",)),
    "rmsprop": ("RMSprop", ("rho", "momentum", "epsilon")),
    "adam": ("Adam", _ADAM),
    "adamw": ("AdamW", _ADAM),
    "adagrad": ("Adagrad", ("epsilon",)),
    "adadelta": ("Adadelta", ("rho", "epsilon")),
    "adamax": ("Adamax", _ADAM),
    "nadam": ("Nadam", _ADAM),
    "lamb": ("Lamb", _ADAM),
    "lion": ("Lion", ("beta_1", "beta_2")),
    "adafactor": ("Adafactor", ()),
}
OPTIMIZERS = tuple(_RULES)


def make(config, schedule, model):
    """The configured optimizer for `model`, to be made under the strategy's scope.

    Its `learning_rate` is a variable with the rate of step 0; `Trainer.compile(schedule=...)` sets it for every update.

    * momentum: v = mu v - rate g, w += v (Polyak 1964); nesterov: w += mu v - rate g (Sutskever et al. 2013). A gradient keeps
      the rate it came with; PyTorch multiplies all of v by the rate of the day (Goyal et al. 2017, 3, momentum correction).
    * rmsprop: Tieleman & Hinton 2012, with --momentum, 0.9 by default; its mean of squares starts at 0 (tf_cnn_benchmarks': 1).
    * adam, adamax: Kingma & Ba 2015; adamw: Loshchilov & Hutter 2019; nadam: Dozat 2016; adagrad: Duchi et al. 2011.
    * adadelta: Zeiler 2012, who has rho 0.95 and a rate of 1. lion: Chen et al. 2023, who have beta_2 0.99.
    * lamb: You et al. 2020, but its decay is added outside the trust ratio.
    * adafactor: Shazeer & Stern 2018, with steps of min(rate, 1 / sqrt(t)) times the root mean square of the weights: a rate
      above 1 / sqrt(t) has no effect.

    The global gradient, averaged and without the loss scale, is clipped: all of it to a norm (Pascanu et al. 2013), or each
    element. Decoupled weight decay is w -= rate x lambda x w before the update (Loshchilov & Hutter 2019, with eta x alpha
    together as the rate), and is not clipped; L2 (`regularize`) is part of the gradient, and is. Keras saves no exclusions: a
    saved file that is trained elsewhere decays every variable.

    --loss_scale=dynamic: Keras's LossScaleOptimizer, which skips a step with a non-finite gradient and halves the scale, and
    doubles it after 2,000 good steps (Micikevicius et al. 2018). A number: a fixed scale; nothing is checked then, and an
    overflow in float16 ends in weights that are NaN. Compile with `auto_scale_loss=False` if --loss_scale is given: Keras
    would make a dynamic scale of it.

    Args:
      config: `problems(config)` is empty.
      schedule: a `schedules.Schedule`.
      model: the built plain model.
    """
    import keras

    class_name, flags = _RULES[config.optimizer]
    arguments = {name: getattr(config, name) for name in flags}
    if not config.epsilon:
        arguments.pop("epsilon", None)
    if config.optimizer == "nesterov":
        arguments["nesterov"] = True
    dynamic = config.loss_scale == "dynamic"
    decay = config.weight_decay_kind == "decoupled" and config.weight_decay
    optimizer = getattr(keras.optimizers, class_name)(
        learning_rate=schedule.at(0),
        weight_decay=decay or None,
        global_clipnorm=config.clip_norm or None,
        clipvalue=config.clip_value or None,
        use_ema=config.ema > 0,
        ema_momentum=config.ema,
        loss_scale_factor=None if dynamic else float(config.loss_scale or 0) or None,
        **arguments,
    )
    if decay:
        decayed = {id(variable) for variable in _decayed(model, config)}
        optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if id(v) not in decayed])
    return keras.optimizers.LossScaleOptimizer(optimizer) if dynamic else optimizer


def regularize(model, config):
    """With --weight_decay_kind=l2, adds lambda / 2 x sum of squares to the loss, so lambda x w to the gradient.

    It takes the place of regularizers that the model has on those variables. Layers are told too, where they know a regularizer
    of that name, so that a saved file has it. To be called before `compile`.
    """
    import keras

    if config.weight_decay_kind != "l2" or not config.weight_decay:
        return
    penalty = keras.regularizers.L2(config.weight_decay / 2)
    decayed = {id(variable) for variable in _decayed(model, config)}
    for layer in model._flatten_layers():
        for variable in layer._trainable_variables:
            if id(variable) in decayed:
                variable.regularizer = penalty
                names = [variable.name, variable.name.removesuffix("_kernel"), "depthwise"]  # of DepthwiseConv2D
                known = [name for name in names if hasattr(layer, f"{name}_regularizer")]
                if known:
                    setattr(layer, f"{known[0]}_regularizer", penalty)


def problems(config) -> list[str]:
    """What contradicts itself in the flags of the optimizer: a line each, with the flag, its value, and what to do."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    found = []
    for name in ("momentum", *_ADAM, "rho"):
        users = [rule for rule, (_, flags) in _RULES.items() if name in flags]
        if config.optimizer not in users and getattr(config, name) != defaults[name]:
            found.append(
                f"--{name}={getattr(config, name)}: --optimizer={config.optimizer} has none; leave it out, or take it back "
                f"with --{name}={defaults[name]}, or use one of {', '.join(users)}"
            )
    if config.clip_norm and config.clip_value:
        found.append(f"--clip_norm={config.clip_norm} and --clip_value={config.clip_value}: give one of them")
    if config.optimizer == "adamw" and (config.weight_decay_kind == "l2" or not config.weight_decay):
        found.append(
            f"--optimizer=adamw is adam with decoupled decay, and here are --weight_decay={config.weight_decay} and "
            f"--weight_decay_kind={config.weight_decay_kind}: use --optimizer=adam, or --weight_decay=0.01 as decoupled"
        )
    if not config.weight_decay:
        for name in ("weight_decay_kind", "decay_norm_and_bias"):
            if getattr(config, name) != defaults[name]:
                found.append(f"--{name}={getattr(config, name)} needs a --weight_decay above 0; leave it out, or give one")
    if config.optimizer == "lion" and not config.beta_1:
        found.append("--beta_1=0.0: lion needs one above 0")
    if config.loss_scale not in ("", "dynamic") and not _is_scale(config.loss_scale):
        found.append(f"--loss_scale={config.loss_scale}: dynamic, or a number above 0, as 128")
    return found


def _decayed(model, config):
    """Kernels: all but what has one dimension, biases and normalisation (He et al. 2018, arXiv 1812.01187, 3.1)."""
    if not model.trainable_variables:
        raise ValueError(f"{model.name} has no weights to decay yet: give it a keras.Input, or call it once, before.")
    return [v for v in model.trainable_variables if config.decay_norm_and_bias or len(v.shape) > 1]


def _is_scale(text):
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
