"""One pure training step: loss -> gradients -> update, the same function for training, planning and measuring.

Shapes: B sequences of the global batch, T seq_len, N tokens of a micro-batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from jaxpretrain.models import registry
from jaxpretrain.models.parameter import Info, infos
from jaxpretrain.objectives import Batch, Sums, make_objective
from jaxpretrain.ops import attention, attention_blockwise
from jaxpretrain.ops.dropout import row_keys
from jaxpretrain.optim.ewa import EwaState, averaged, ewa
from jaxpretrain.optim.factory import check_roles, evaluation_params, make_optimizer
from jaxpretrain.optim.schedules import make_schedule
from jaxpretrain.parallel import offload, xla
from jaxpretrain.parallel.mesh import DATA_AXES, batch_sharding, num_data_shards, rows_per_shard
from jaxpretrain.parallel.remat import layer_runner
from jaxpretrain.parallel.strategies import Strategy, make_strategy
from jaxpretrain.schema import ATTENTION_FAMILIES


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """All that a run is, beside its config. Donated to each step."""

    step: jax.Array  # int32: batches consumed, which is where the data stands
    params: Any  # float32 masters
    opt_state: Any
    averages: EwaState | None  # of the parameters, where average.horizons names any
    skipped: jax.Array  # int32: updates not applied because a gradient was not finite
    bad_steps: jax.Array  # int32: how many in a row up to now; float16 overflows do not count
    loss_scale: jax.Array | None  # float32, float16 only: what the loss is multiplied by
    good_steps: jax.Array | None  # int32, float16 only: finite steps since loss_scale last changed
    overflows: jax.Array | None  # int32, float16 only: how many of `skipped` a smaller loss_scale answered


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """What `make_train_step` makes. All functions are jitted; `state` is a TrainState, `batch` a Batch."""

    mesh: Mesh
    strategy: Strategy
    attention: attention.Choice | None  # None: the model has none
    seq_len: int
    num_micro_batches: int  # accumulation steps per optimizer step
    eval_batch_size: int  # rows of a batch of `evaluate`
    state: TrainState  # of jax.ShapeDtypeStruct with shardings: nothing is allocated
    batch: Batch  # of jax.ShapeDtypeStruct with shardings
    init: Callable[..., TrainState]  # the state of step 0, created already sharded; takes parameters, donated
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Batch], Sums]  # params, batch -> the objective's sums
    logits: Callable[[Any, jax.Array], jax.Array]  # params, tokens [B, T] -> float32 [B, T, V]; for sampling


def make_train_step(config: ConfigDict, mesh: Mesh) -> TrainStep:
    """Builds the step of a checked config, whose micro_batch_size is resolved, on a mesh from `make_mesh`.

    The metrics of a step are scalars: loss (nats per target, before the update), grad_norm (before clipping),
    learning_rate, num_tokens (seen), skipped, bad_steps and, in float16, loss_scale and overflows.
    """
    num_shards, micro_batch_size = num_data_shards(mesh), config.micro_batch_size
    num_rows = rows_per_shard(config.batch_size, mesh)
    if num_rows % micro_batch_size:
        divisor = next(d for d in range(min(num_rows, micro_batch_size), 0, -1) if num_rows % d == 0)
        raise ValueError(
            f"micro_batch_size={micro_batch_size} does not divide the {num_rows} sequences of each device "
            f"(batch_size={config.batch_size} over {num_shards}); try {divisor}"
        )
    num_micro_batches = num_rows // micro_batch_size
    compute_dtype = jnp.dtype(config.precision.compute)
    is_float16 = compute_dtype == jnp.float16
    matmul_precision = None if config.precision.matmul == "default" else config.precision.matmul

    model = registry.build(config)
    graphdef, _ = nnx.split(model)
    parameter_infos = infos(model)
    strategy = make_strategy(config.parallel.strategy, parameter_infos, mesh, compute_dtype)
    device = mesh.devices.flat[0]
    attention_choice = _select_attention(config, model, device)
    forward_options = dict(
        attend=attention_choice and strategy.split_heads(_attend(model, attention_choice.name, attention_choice.block)),
        run_layers=layer_runner(strategy, config.parallel.remat, config.parallel.scan_layers),
    )
    objective = make_objective(config)
    has_dropout = config.model.dropout > 0 or config.model.drop_path > 0
    schedule = make_schedule(config)
    check_roles(config, parameter_infos)
    optimizer = make_optimizer(config, schedule, parameter_infos)
    state = lay_out(_abstract_state(config, optimizer), strategy, config.parallel.offload)
    shardings = jax.tree.map(lambda x: offload.of_result(x.sharding), state)
    replicated = NamedSharding(mesh, PartitionSpec())
    stacks = tuple(name for name, subtree in strategy.stacked.items() if all(jax.tree.leaves(subtree)))
    hosted = offload.hosted(state, strategy.stacked, config.parallel.offload)
    averager = ewa(config.average.horizons)

    # --- Loss and gradients; the mesh axes are manual in here: arrays are this shard's own.

    def sums_of(params: Any, batch: Batch, training: bool) -> Sums:
        """Those of the objective over a micro-batch; `params` is the compute copy."""
        whole = nnx.merge(graphdef, strategy.gather(params))
        batch = dict(batch)
        return objective.sums(whole, batch, training, keys_B=batch.pop("keys", None), **forward_options)

    def local_gradients(params: Any, batch: Batch, scale: jax.Array) -> tuple[Any, Sums]:
        """Sums over the global batch, of `scale` times the gradients and of what the objective sums."""
        compute_params = strategy.gather_for_step(params)

        def accumulate(total, micro_batch):
            def scaled_loss(params):
                sums = sums_of(params, micro_batch, training=True)
                return sums["loss"] * scale, sums

            gradients, sums = jax.grad(scaled_loss, has_aux=True)(compute_params)
            gradients = strategy.reduce_micro_batch(gradients)
            if device.platform == "tpu":
                # Without it XLA (libtpu 0.0.42) tries to move reduce-scatters out of this loop, where they would need
                # whole gradients, and fails on its own check.
                gradients = jax.lax.optimization_barrier(gradients)
            new = jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums
            return jax.tree.map(jnp.add, total, new), None

        def zeros(tree):
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)

        micro_batches = jax.tree.map(lambda x: x.reshape(num_micro_batches, micro_batch_size, *x.shape[1:]), batch)
        first = jax.tree.map(lambda x: x[0], micro_batches)
        accumulated = jax.eval_shape(strategy.reduce_micro_batch, compute_params)
        start = zeros((accumulated, jax.eval_shape(lambda: sums_of(compute_params, first, training=True))))
        (gradients, sums), _ = jax.lax.scan(accumulate, start, micro_batches)
        return strategy.reduce(gradients), jax.lax.psum(sums, DATA_AXES)

    def local_sums(params: Any, batch: Batch) -> Sums:
        return jax.lax.psum(sums_of(strategy.gather_for_step(params), batch, training=False), DATA_AXES)

    rows, scalar = PartitionSpec(DATA_AXES), PartitionSpec()
    # Replication of the outputs is not checked: kernels and custom gradients do not carry its types.
    manual = functools.partial(jax.shard_map, mesh=mesh, axis_names=strategy.manual_axes, check_vma=False)
    specs = strategy.manual_specs
    gradients_of = manual(local_gradients, in_specs=(specs, rows, scalar), out_specs=(specs, scalar))
    sums_over_batch = manual(local_sums, in_specs=(specs, rows), out_specs=scalar)

    # --- The step: outside, arrays are global and keep the layout of the parameters.

    def updated(
        optimizer: optax.GradientTransformation,
        state: TrainState,
        gradients: Any,
        *,
        factor: jax.Array,
        finite: jax.Array,
        num_tokens: jax.Array,
    ) -> TrainState:
        """The state, of the model or of a part of it, after an update by `factor * gradients` if these are finite."""

        def update(params: Any, opt_state: Any, averages: EwaState | None) -> tuple[Any, Any, EwaState | None]:
            scaled = jax.tree.map(lambda g: g * factor, gradients)
            updates, opt_state = optimizer.update(scaled, opt_state, params)
            if averages is not None:
                _, averages = averager.update(updates, averages, params, tokens=num_tokens)
            return optax.apply_updates(params, updates), opt_state, averages

        old = state.params, state.opt_state, state.averages
        if device.platform == "cpu":
            # The select below would copy the moments there, as XLA for CPUs writes one array per loop; for GPUs it is
            # the branch that copies.
            new = jax.lax.cond(finite, update, lambda *old: old, *old)
        else:
            new = jax.tree.map(functools.partial(jnp.where, finite), update(*old), old)
        params, opt_state, averages = new
        return dataclasses.replace(state, params=params, opt_state=opt_state, averages=averages)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        # Sums of float16 gradients over the targets of a micro-batch would overflow: scale their mean.
        num_micro_targets = micro_batch_size * objective.num_targets
        scale = state.loss_scale / num_micro_targets if is_float16 else jnp.ones(())
        if has_dropout:
            batch = batch | {"keys": row_keys(config.seed, state.step, jnp.arange(config.batch_size))}
        if any(jax.tree.leaves(hosted.params)):
            compute_copy = offload.map_by_layer(strategy.cast, state.params, stacks)
        else:
            compute_copy = strategy.compute_copy(state.params)
        with jax.default_matmul_precision(matmul_precision):
            gradients, sums = gradients_of(compute_copy, batch, scale)
        num_targets, num_tokens = jnp.maximum(sums["targets"], 1), sums["tokens"]
        loss = sums["loss"] / num_targets
        # Sums become means, and are clipped, in one multiplication, which fuses with what reads them.
        factor = 1 / (num_targets * scale)
        grad_norm = optax.tree.norm(gradients) * factor
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        if config.optimizer.clip:
            factor *= jnp.minimum(1, config.optimizer.clip / grad_norm)

        update = functools.partial(updated, factor=factor, finite=finite, num_tokens=num_tokens)
        if any(jax.tree.leaves(hosted)):
            parts = {name: _part(config, schedule, parameter_infos, name, stacks) for name in ("", *stacks)}
            state = offload.update_by_layer(update, parts, state, gradients, hosted)
        else:
            state = update(optimizer, state, gradients)
        metrics = dict(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=schedule(state.step - state.skipped),
            num_tokens=num_tokens,
        )
        state = dataclasses.replace(_count(state, finite, jnp.isfinite(loss), config), step=state.step + 1)
        metrics |= dict(skipped=state.skipped, bad_steps=state.bad_steps)
        if is_float16:
            metrics |= dict(loss_scale=state.loss_scale, overflows=state.overflows)
        return state, metrics

    def evaluate(params: Any, batch: Batch) -> Sums:
        with jax.default_matmul_precision(matmul_precision):
            return sums_over_batch(strategy.compute_copy(params), batch)

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        whole = nnx.merge(graphdef, strategy.compute_copy(params))
        with jax.default_matmul_precision(matmul_precision):
            return whole(tokens, attend=_attend(model, "xla"))

    def of_all_rows(example: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (config.batch_size, *example.shape)
        return jax.ShapeDtypeStruct(shape, example.dtype, sharding=batch_sharding(mesh))

    return TrainStep(
        mesh=mesh,
        strategy=strategy,
        attention=attention_choice,
        seq_len=config.seq_len,
        num_micro_batches=num_micro_batches,
        eval_batch_size=micro_batch_size * num_shards,
        state=state,
        batch=jax.tree.map(of_all_rows, objective.arrays),
        init=jax.jit(
            functools.partial(_initial_state, config, optimizer),
            donate_argnums=0,
            out_shardings=shardings,
            # It runs once: compiling its random numbers well takes a CPU longer than drawing them.
            compiler_options={"xla_backend_optimization_level": 0} if device.platform == "cpu" else None,
        ),
        step=jax.jit(
            step,
            donate_argnums=0 if config.parallel.donate else (),
            out_shardings=(shardings, replicated),
            compiler_options=xla.compiler_options(mesh, config.parallel.xla_options),
        ),
        evaluate=jax.jit(evaluate, out_shardings=replicated),
        logits=jax.jit(logits),
    )


def _attend(model: nnx.Module, implementation: str, block: int = attention_blockwise.BLOCK) -> Callable:
    causal = model.config.family == "decoder"
    return functools.partial(attention.attend, implementation=implementation, block=block, causal=causal)


def _select_attention(config: ConfigDict, model: nnx.Module, device: jax.Device) -> attention.Choice | None:
    if config.model.family not in ATTENTION_FAMILIES:
        return None
    return attention.select(
        config.kernels.attention,
        platform=device.platform,
        device_kind=device.device_kind,
        head_dim=model.config.head_dim,
        dtype=jnp.dtype(config.precision.compute),
        segmented=config.data.isolate_documents or config.model.family == "encoder",
        seq_len=model.config.max_positions if config.model.family == "vit" else config.seq_len,
    )


def abstract_state(config: ConfigDict, mesh: Mesh) -> TrainState:
    """The state of a checked config on a mesh, of jax.ShapeDtypeStruct with shardings; nothing is allocated."""
    parameter_infos = infos(registry.build(config))
    strategy = make_strategy(config.parallel.strategy, parameter_infos, mesh, jnp.dtype(config.precision.compute))
    return lay_out(shapes_of_state(config, parameter_infos), strategy, config.parallel.offload)


def shapes_of_state(config: ConfigDict, infos: dict) -> TrainState:
    """The state of a checked config, of jax.ShapeDtypeStruct, which `lay_out` gives shardings."""
    check_roles(config, infos)
    return _abstract_state(config, make_optimizer(config, make_schedule(config), infos))


def lay_out(state: TrainState, strategy: Strategy, offloaded: str) -> TrainState:
    """Gives each leaf of an abstract state its sharding; those that `parallel.offload` names, the host's memory."""

    def leaf(x: jax.ShapeDtypeStruct, sharding: NamedSharding, is_hosted: bool) -> jax.ShapeDtypeStruct:
        sharding = offload.to_host(sharding) if is_hosted else sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shardings = strategy.state_shardings(state, state.params)
    return jax.tree.map(leaf, state, shardings, offload.hosted(state, strategy.stacked, offloaded))


def _part(config: ConfigDict, schedule: optax.Schedule, infos: dict, name: str, stacks: Sequence[str]) -> tuple:
    """Optimizer and abstract state of one layer of the stack `name`, or for "" of what is not stacked."""

    def layer(info: Info) -> Info:
        return dataclasses.replace(info, shape=info.shape[1:], axes=info.axes[1:])

    if name:
        infos = {name: jax.tree.map(layer, infos[name])}
    else:
        infos = {key: subtree for key, subtree in infos.items() if key not in stacks}
    optimizer = make_optimizer(config, schedule, infos)
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), infos)
    return optimizer, jax.eval_shape(functools.partial(_initial_state, config, optimizer), params)


def _abstract_state(config: ConfigDict, optimizer: optax.GradientTransformation) -> TrainState:
    return jax.eval_shape(functools.partial(_initial_state, config, optimizer))


def _initial_state(config: ConfigDict, optimizer: optax.GradientTransformation, params: Any = None) -> TrainState:
    if params is None:
        model = registry.make(config)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    zero, is_float16 = jnp.zeros((), jnp.int32), config.precision.compute == "float16"
    return TrainState(
        step=zero,
        params=params,
        opt_state=optimizer.init(params),
        averages=ewa(config.average.horizons).init(params) if config.average.horizons else None,
        skipped=zero,
        bad_steps=zero,
        loss_scale=jnp.float32(config.precision.initial_loss_scale) if is_float16 else None,
        good_steps=zero if is_float16 else None,
        overflows=zero if is_float16 else None,
    )


def weights(state: TrainState, horizon: float | None = None) -> Any:
    """What to evaluate, sample from and export: the average over `horizon` tokens, else what the optimizer says.

    Those are the parameters themselves, or schedule-free's average. Laid out as the parameters; not jitted, as that
    would copy them. Raises ValueError if there is no such average.
    """
    if horizon is None:
        return evaluation_params(state.opt_state, state.params, offload.to_device)
    if state.averages is None:
        raise ValueError(f"no average over {horizon:,} tokens; average.horizons is empty")
    return averaged(state.averages, horizon, offload.to_device)


def _count(state: TrainState, finite: jax.Array, loss_is_finite: jax.Array, config: ConfigDict) -> TrainState:
    """Counts skipped updates; in float16 moves the loss scale, as an overflow is its business and no bad step."""
    skipped = state.skipped + ~finite
    if state.loss_scale is None:
        return dataclasses.replace(state, skipped=skipped, bad_steps=jnp.where(finite, 0, state.bad_steps + 1))
    overflow = ~finite & loss_is_finite & (state.loss_scale > 1)
    good_steps = jnp.where(finite, state.good_steps + 1, 0)
    grow = good_steps >= config.precision.loss_scale_interval
    loss_scale = jnp.where(finite, state.loss_scale, jnp.maximum(state.loss_scale / 2, 1))
    return dataclasses.replace(
        state,
        skipped=skipped,
        bad_steps=jnp.where(finite, 0, state.bad_steps + (~overflow)),
        loss_scale=jnp.where(grow, loss_scale * 2, loss_scale),
        good_steps=jnp.where(grow, 0, good_steps),
        overflows=state.overflows + overflow,
    )
