"""Adam-mini: AdamW whose second moment is one number per block of parameters.

Needs JAX and Optax only, and knows nothing of any model: blocks are given as axes of the leaves.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which elements of one leaf share a second moment, where a tuple of axes to average over cannot say it.

    Attributes:
      reduce: axes, of the view if there is one, to average over; negative ones count from the end.
      view: the shape to see the leaf in, e.g. ``(D, H, K)`` for a kernel stored as ``[D, H * K]``.
      axis: the axis that holds several matrices one after the other, as fused projections do.
      segments: of each of these matrices, its size along ``axis`` and the axes that it averages over in addition
        to ``reduce``; ``axis`` may be among them.

    Queries, keys and values fused as ``[D, 3 * H * K]``, queries and keys with a block per head, values with one
    per output neuron: ``Blocks(reduce=(0,), view=(D, 3, H, K), axis=1, segments=((2, (3,)), (1, ())))``.
    """

    reduce: tuple[int, ...] = ()
    view: tuple[int, ...] | None = None
    axis: int = 0
    segments: tuple[tuple[int, tuple[int, ...]], ...] = ()


BlockSpec = tuple[int, ...] | Blocks
BlockSpecs = Any | Callable[[str, tuple[int, ...]], BlockSpec] | None  # Any: a pytree of BlockSpec


class ScaleByAdamMiniState(NamedTuple):
    """State of :func:`scale_by_adam_mini`. The trees have the structure of the parameters."""

    count: jax.Array  # int32 []: updates applied
    mu: optax.Updates  # first moment, of the parameters' shapes
    mu_scale: optax.Updates | None  # float32, one per row of an int8 mu; None for other dtypes
    nu: optax.Updates  # second moment, float32: the shape of the leaf, or of its view, 1 along averaged axes


def scale_by_adam_mini(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: Any | None = None,
    blocks: BlockSpecs = None,
) -> optax.GradientTransformation:
    r"""Rescale updates according to the Adam-mini algorithm.

    See :func:`adam_mini` for the mathematics and the arguments.

    Returns:
      The corresponding :class:`optax.GradientTransformation`.

    Raises:
      ValueError: for blocks that do not fit the parameters, naming the parameter.
    """
    if mu_dtype is not None:
        mu_dtype = jnp.dtype(mu_dtype)
        if mu_dtype != jnp.int8 and not jnp.issubdtype(mu_dtype, jnp.floating):
            raise ValueError(f"mu_dtype={mu_dtype} cannot hold a first moment: use float32, bfloat16 or int8")
    quantized = mu_dtype == jnp.int8

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        # Means of zeros, because they are laid out over devices as those of gradients will be; the compiler knows
        # their value without computing it, which is not so of a maximum.
        zeros = [jnp.zeros_like(p, dtype=jnp.float32) for p in leaves]
        nu = treedef.unflatten(map(_block_mean, zeros, _layouts(blocks, params)))
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        mu_scale = treedef.unflatten(x.mean(_last(x), keepdims=True) for x in zeros) if quantized else None
        return ScaleByAdamMiniState(jnp.zeros([], jnp.int32), mu, mu_scale, nu)

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        bias_correction1 = 1 - jnp.asarray(b1, jnp.float32) ** count
        bias_correction2 = 1 - jnp.asarray(b2, jnp.float32) ** count

        def update_leaf(g, mu, mu_scale, nu, layout):
            dtype, g = g.dtype, g.astype(jnp.promote_types(g.dtype, jnp.float32))
            mu32 = b1 * (_dequantize(mu, mu_scale) if quantized else mu.astype(g.dtype)) + (1 - b1) * g
            new_nu = (b2 * nu + (1 - b2) * _block_mean(jnp.square(g), layout)).astype(nu.dtype)
            # The root and the division are done once a block; an element costs one multiplication.
            scale = 1 / (bias_correction1 * (jnp.sqrt(new_nu / bias_correction2) + eps))
            if quantized:
                new_mu, new_scale = _quantize(mu32)
            else:
                new_mu, new_scale = mu32.astype(mu.dtype), None
                # The update is made from the moment as stored: from mu32, XLA on CPUs would copy the old bfloat16
                # moment and compute the new one twice, at half the speed.
                mu32 = new_mu.astype(g.dtype)
            u = (mu32 * _per_element(scale, layout)).astype(dtype)
            return u, new_mu, new_scale, new_nu

        leaves, treedef = jax.tree.flatten(updates)
        mu, nu = treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu)
        mu_scale = treedef.flatten_up_to(state.mu_scale) if quantized else [None] * len(leaves)
        new = _unzip(map(update_leaf, leaves, mu, mu_scale, nu, _layouts(blocks, updates)), 4)
        u, mu, mu_scale, nu = (treedef.unflatten(x) for x in new)
        return u, ScaleByAdamMiniState(count, mu, mu_scale if quantized else None, nu)

    return optax.GradientTransformation(init, update)


def adam_mini(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    mu_dtype: Any | None = None,
    blocks: BlockSpecs = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam with one second moment for each block of parameters, and weight decay.

    The learning rate of a block of parameters whose Hessian is dense can be one number, and a good one is Adam's
    own averaged over the block. As blocks of a transformer are whole heads and neurons, the second moment all but
    vanishes from memory: the state is half of AdamW's, a quarter with a bfloat16 and an eighth with an int8 first
    moment.

    Let :math:`\alpha_t` be the learning rate, :math:`\beta_1, \beta_2, \varepsilon` the arguments ``b1``, ``b2``
    and ``eps``, :math:`\lambda` the weight decay, :math:`\theta_t` the parameters, :math:`g_t` the gradient, and
    :math:`\operatorname{mean}_B` the mean over each block, which has one value for all elements of a block. From
    :math:`m_0 = v_0 = 0`, for :math:`t > 0`,

    .. math::

      \begin{align*}
        m_t &\leftarrow \beta_1 \cdot m_{t-1} + (1-\beta_1) \cdot g_t \\
        v_t &\leftarrow \beta_2 \cdot v_{t-1} + (1-\beta_2) \cdot \operatorname{mean}_B({g_t}^2) \\
        \hat{m}_t &\leftarrow m_t / {(1-\beta_1^t)} \\
        \hat{v}_t &\leftarrow v_t / {(1-\beta_2^t)} \\
        u_t &\leftarrow -\alpha_t \cdot \left( \hat{m}_t / \left({\sqrt{\hat{v}_t} + \varepsilon} \right)
          + \lambda \theta_{t} \right).
      \end{align*}

    So :math:`v_t` is the block mean of Adam's, and blocks of one element give AdamW. It is kept in float32
    whatever the dtype of the gradients: it is tiny, and in bfloat16 it would stop growing.

    An int8 first moment is stored as :math:`s \cdot \operatorname{sign}(c) \cdot (c / 127)^2` with an int8
    :math:`c` for each element and a float32 :math:`s` for each row along the last axis, the row's largest
    magnitude. The square spends codes where most elements are, near zero: an element of a hundredth of its row's
    largest is kept to 8 %, where equal steps would keep it to 40 %. The update uses the moment before it is
    rounded to int8. The second moment is left alone: there is nothing to save, and its rounding to zero is what makes
    8-bit optimizers diverge.

    Args:
      learning_rate: A global scaling factor, either fixed or evolving along iterations with a scheduler, see
        :func:`optax.scale_by_learning_rate`.
      b1: Exponential decay rate to track the first moment of past gradients.
      b2: Exponential decay rate to track the second moment of past gradients.
      eps: A small constant applied to denominator outside of the square root.
      mu_dtype: Optional `dtype` of the first moment: a floating one or `int8`; if `None` then that of the
        parameters.
      blocks: For each leaf a tuple of the axes to average over, ``()`` for AdamW, or :class:`Blocks`: as a tree
        with the structure of the parameters, or as a function of a leaf's path (its keys joined by ``"."``) and
        shape. By default leaves of two and more axes are averaged over all but the last one, as fits a kernel
        ``[in, out]``, and other leaves over none. That is a poor choice for queries and keys, which want a block
        per head, and for embeddings ``[vocabulary, features]``, which want one per token: give blocks for a
        transformer. Axes that stack layers or experts should not be averaged over.
      weight_decay: Strength of the weight decay regularization, multiplied with the learning rate.
      mask: A tree with same structure as (or a prefix of) the params PyTree, or a Callable that returns such a
        pytree given the params/updates, `True` where to apply weight decay.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: by ``init`` and ``update`` for blocks that do not fit the parameters, naming the parameter.

    Examples:
      >>> import optax
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxpretrain.optim.adam_mini import adam_mini
      >>> def f(params): return jnp.sum((params['query'] - 1) ** 2) + jnp.sum(params['bias'] ** 2)
      >>> params = {'query': jnp.zeros((3, 2, 4)), 'bias': jnp.ones(4)}
      >>> blocks = {'query': (0, 2), 'bias': ()}  # [features, heads, head size]: one block per head
      >>> solver = adam_mini(learning_rate=0.1, blocks=blocks)
      >>> print('Objective function: {:.2f}'.format(f(params)))
      Objective function: 28.00
      >>> opt_state = solver.init(params)
      >>> print(opt_state[0].nu['query'].shape)
      (1, 2, 1)
      >>> for _ in range(3):
      ...  grad = jax.grad(f)(params)
      ...  updates, opt_state = solver.update(grad, opt_state, params)
      ...  params = optax.apply_updates(params, updates)
      ...  print('Objective function: {:.2f}'.format(f(params)))
      Objective function: 22.68
      Objective function: 17.94
      Objective function: 13.78

    References:
      Zhang et al, `Adam-mini: Use Fewer Learning Rates To Gain More <https://arxiv.org/abs/2406.16793>`_, 2024

      Loshchilov et al, `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_, 2019

    .. note::
      With :func:`optax.inject_hyperparams`, name a callable ``blocks`` or ``mask`` in ``static_args``.
    """
    return optax.chain(
        scale_by_adam_mini(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype, blocks=blocks),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


# --- Block means. Large arrays keep the shape of their leaf, so a view never moves a shard: dims that are averaged
# over whole go first, and only what is left of them is reshaped.


class _Layout(NamedTuple):
    """Checked Blocks of one leaf, with axes that count from the start."""

    shape: tuple[int, ...]  # of the leaf
    own_axes: tuple[int, ...]  # axes of the leaf that are averaged over before reshaping
    view: tuple[int, ...]  # the view after that: 1 where it was averaged over
    axes: tuple[int, ...]  # axes of the view that are averaged over after reshaping
    axis: int
    segments: tuple[tuple[int, tuple[int, ...]], ...]


def _block_mean(x: jax.Array, layout: _Layout) -> jax.Array:
    """Mean of x, of the leaf's shape, over its blocks: the shape of nu."""
    x = jnp.mean(x, layout.own_axes, keepdims=True).reshape(layout.view)
    if layout.axes:
        x = jnp.mean(x, layout.axes, keepdims=True)
    if layout.segments:
        ends = [sum(size for size, _ in layout.segments[: i + 1]) for i in range(len(layout.segments) - 1)]
        means = [
            jnp.mean(part, axes, keepdims=True) + jnp.zeros_like(part)  # a broadcast laid out as `part` is
            for part, (_, axes) in zip(jnp.split(x, ends, layout.axis), layout.segments, strict=True)
        ]
        x = jnp.concatenate(means, layout.axis)
    return x


def _per_element(nu: jax.Array, layout: _Layout) -> jax.Array:
    """What has the shape of nu, in a shape that broadcasts against the leaf."""
    shape = tuple(1 if d in layout.own_axes else size for d, size in enumerate(layout.shape))
    return jnp.broadcast_to(nu, layout.view).reshape(shape)


def _layouts(blocks: BlockSpecs, params: Any) -> list[_Layout]:
    """The blocks of each leaf of `params`, in the order of its leaves."""
    leaves = {_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if blocks is None:
        specs = {name: tuple(range(len(shape)))[:-1] for name, shape in leaves.items()}
    elif callable(blocks):
        specs = {name: blocks(name, shape) for name, shape in leaves.items()}
    else:
        specs = {_name(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(blocks, is_leaf=_is_spec)}
        missing = [name for name in leaves if name not in specs]
        if missing:
            raise ValueError(f"{missing[0]}: blocks have no entry for this parameter")
        masked = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
        known = {*leaves, *(_name(path) for path, _ in masked)}
        # Without leaves it is no tree of parameters: `optax.tree.map_params` asks what a state looks like.
        unknown = [name for name in specs if not any(name == n or name.startswith(n + ".") for n in known)]
        if unknown and leaves:
            raise ValueError(f"{unknown[0]}: blocks have an entry for it but there is no such parameter")
    return [_layout(specs[name], name, shape) for name, shape in leaves.items()]


def _layout(spec: BlockSpec, name: str, shape: tuple[int, ...]) -> _Layout:
    if not _is_spec(spec):
        raise ValueError(f"{name}: blocks must be a tuple of axes to average over or Blocks(...), not {spec!r}")
    spec = spec if isinstance(spec, Blocks) else Blocks(spec)
    view = shape if spec.view is None else spec.view
    if math.prod(view) != math.prod(shape):
        raise ValueError(f"{name}: a view as {view} does not have the size of the shape {shape}")

    def positive(axes: tuple[int, ...]) -> tuple[int, ...]:
        for axis in axes:
            if not -len(view) <= axis < len(view):
                raise ValueError(f"{name}: blocks reduce axis {axis}, which the shape {view} does not have")
        return tuple(axis % len(view) for axis in axes)

    reduce = positive(spec.reduce)
    segments = tuple((size, positive(axes)) for size, axes in spec.segments)
    for axes in (reduce, *(reduce + further for _, further in segments)):
        if len(set(axes)) < len(axes):
            raise ValueError(f"{name}: blocks reduce an axis twice in {axes}")
    axis = positive((spec.axis,))[0] if segments else 0
    sizes = [size for size, _ in segments]
    if segments and (sum(sizes) != view[axis] or min(sizes) < 1 or axis in reduce):
        raise ValueError(f"{name}: segments of {sizes} do not divide up axis {axis} of the shape {view}")

    own_axes, collapsed = [], list(view)
    for own, viewed in _common_axes(shape, view):
        if set(viewed) <= set(reduce):
            own_axes += own
            for a in viewed:
                collapsed[a] = 1
    axes = tuple(a for a in reduce if collapsed[a] > 1)
    return _Layout(shape, tuple(own_axes), tuple(collapsed), axes, axis, segments)


def _common_axes(shape: tuple[int, ...], view: tuple[int, ...]) -> list[tuple[range, range]]:
    """The smallest runs of axes of two shapes of one size that hold the same elements, e.g. (0, 0), (1, 1..2)."""
    if shape == view:
        return [(range(d, d + 1), range(d, d + 1)) for d in range(len(shape))]
    runs, i, j = [], 0, 0
    while i < len(shape) and j < len(view):
        start, own_size, view_size = (i, j), shape[i], view[j]
        i, j = i + 1, j + 1
        while own_size != view_size:
            if own_size < view_size:
                own_size, i = own_size * shape[i], i + 1
            else:
                view_size, j = view_size * view[j], j + 1
        runs.append((range(start[0], i), range(start[1], j)))
    return runs


def _is_spec(spec: Any) -> bool:
    return isinstance(spec, Blocks) or (type(spec) is tuple and all(isinstance(axis, int) for axis in spec))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


# --- The int8 first moment.


def _quantize(mu: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes, int8 of mu's shape, and scales, float32 with 1 along the last axis."""
    scale = jnp.max(jnp.abs(mu), _last(mu), keepdims=True).astype(jnp.float32)
    fraction = mu / jnp.where(scale > 0, scale, 1)
    return (jnp.sign(mu) * jnp.round(127 * jnp.sqrt(jnp.abs(fraction)))).astype(jnp.int8), scale


def _dequantize(mu: jax.Array, scale: jax.Array) -> jax.Array:
    code = mu.astype(jnp.float32)
    return code * jnp.abs(code) * (scale / 127**2)


def _last(x: jax.Array) -> tuple[int, ...]:
    return tuple(range(x.ndim))[-1:]  # none of a scalar


def _unzip(rows: Any, num: int) -> list[list]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(num)]
