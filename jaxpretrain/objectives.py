"""What each family of models is trained for: the arrays of an example, and the sums that its loss is made of.

    decoder, mamba   the next token
    encoder          masked tokens
    vit, convnext    the class of an image

B rows, T seq_len, M masked tokens of a row at most, H x W pixels, C channels, V tokens or classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxpretrain import losses
from jaxpretrain.config import num_masked_tokens
from jaxpretrain.schema import IMAGE_FAMILIES

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of its training images, in [0, 1]
_HALF = ((0.5,), (0.5,))


@dataclasses.dataclass(frozen=True)
class Objective:
    """`sums(model, batch, training, **options)`: float32 scalars, sums over a batch; `options` go to the model.

    They are `loss` (nats), the `targets` that it is summed over, `tokens` seen (an image counts as one) and, of
    images, `correct`.
    """

    arrays: Batch  # of one example in training, jax.ShapeDtypeStruct without the dim of rows
    num_targets: int  # of one example, at most
    sums: Callable[..., Sums]


def make_objective(config: ConfigDict) -> Objective:
    """Of a checked config whose micro_batch_size is resolved."""
    if config.model.family in IMAGE_FAMILIES:
        return _classes(config)
    return _masked_tokens(config) if config.model.family == "encoder" else _next_token(config)


def _next_token(config: ConfigDict) -> Objective:
    cross_entropy, isolate = _cross_entropy(config, config.seq_len), config.data.isolate_documents

    def sums(model: Any, batch: Batch, training: bool, **options) -> Sums:
        inputs, segment_ids, targets, mask = losses.targets_and_mask(batch)
        # Elsewhere segment ids only mark padding at the end of rows, which causal models never look at.
        hidden = model.hidden(inputs, segment_ids if isolate else None, **options)
        hidden_NxD = hidden.reshape(-1, hidden.shape[-1])
        loss = cross_entropy(hidden_NxD, model.unembedding(), targets.reshape(-1), mask.reshape(-1))
        return {"loss": loss, "targets": mask.sum(), "tokens": mask.sum()}

    row = jax.ShapeDtypeStruct((config.seq_len + 1,), jnp.int32)
    arrays = {"tokens": row, "segment_ids": row} if isolate else {"tokens": row}
    return Objective(arrays, config.seq_len, sums)


def _masked_tokens(config: ConfigDict) -> Objective:
    width = num_masked_tokens(config)
    cross_entropy = _cross_entropy(config, width)

    def sums(model: Any, batch: Batch, training: bool, **options) -> Sums:
        hidden_BxTxD = model.hidden(batch["tokens"], batch["segment_ids"], **options)
        hidden_BxMxD = jnp.take_along_axis(hidden_BxTxD, batch["positions"][..., None], axis=1)
        hidden_NxD = model.transform(hidden_BxMxD.reshape(-1, hidden_BxMxD.shape[-1]))
        targets = batch["targets"].reshape(-1)
        mask = (targets >= 0).astype(jnp.float32)
        loss = cross_entropy(hidden_NxD, model.unembedding(), jnp.maximum(targets, 0), mask, model.unembed.bias[...])
        return {"loss": loss, "targets": mask.sum(), "tokens": jnp.sum(batch["segment_ids"] > 0, dtype=jnp.float32)}

    row, few = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (config.seq_len, width))
    return Objective({"tokens": row, "segment_ids": row, "positions": few, "targets": few}, width, sums)


def _classes(config: ConfigDict) -> Objective:
    image, smoothing = config.model.image, config.objective.label_smoothing
    mean, deviation = _IMAGENET if config.data.images.normalize == "imagenet" else _HALF

    def sums(model: Any, batch: Batch, training: bool, **options) -> Sums:
        images_BxHxWxC = (batch["images"] / 255.0 - jnp.array(mean)) / jnp.array(deviation)
        logits_BxV = model(images_BxHxWxC, **options)
        labels_Bx2, weights_B = batch["labels"], batch["weights"]
        log_probabilities_BxV = jax.nn.log_softmax(logits_BxV)
        of_labels_Bx2 = jnp.take_along_axis(log_probabilities_BxV, jnp.maximum(labels_Bx2, 0), axis=1)
        losses_B = -(weights_B * of_labels_Bx2[:, 0] + (1 - weights_B) * of_labels_Bx2[:, 1])
        if training and smoothing:
            losses_B = (1 - smoothing) * losses_B - smoothing * log_probabilities_BxV.mean(axis=1)
        mask_B = (labels_Bx2[:, 0] >= 0).astype(jnp.float32)  # -1: a row that fills a batch of the evaluation
        correct_B = (jnp.argmax(logits_BxV, axis=1) == labels_Bx2[:, 0]).astype(jnp.float32)
        count = mask_B.sum()
        return {
            "loss": jnp.sum(mask_B * losses_B),
            "targets": count,
            "tokens": count,
            "correct": jnp.sum(mask_B * correct_B),
        }

    arrays = {
        "images": jax.ShapeDtypeStruct((image.size, image.size, image.num_channels), jnp.uint8),
        "labels": jax.ShapeDtypeStruct((2,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((), jnp.float32),
    }
    return Objective(arrays, 1, sums)


def _cross_entropy(config: ConfigDict, num_targets: int) -> Callable[..., jax.Array]:
    """`losses.cross_entropy` of a micro-batch with so many targets a row."""
    vocab_size, kernel = config.model.vocab_size, config.kernels.cross_entropy
    implementation = losses.choose_cross_entropy(kernel, config.micro_batch_size * num_targets, vocab_size)

    def cross_entropy(*args) -> jax.Array:
        return losses.cross_entropy(*args, vocab_size=vocab_size, implementation=implementation)

    return cross_entropy
