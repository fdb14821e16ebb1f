"""Checkpoints of a work directory: asynchronous, atomic, restored onto any mesh. Orbax is used here alone.

WORKDIR/checkpoints/STEP/{state,config,progress}   a directory that exists under its final name is complete
"""

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    CustomSteps,
    EveryNSteps,
    LatestN,
)

from jaxpretrain import config as config_lib
from jaxpretrain.errors import is_out_of_memory
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.step import TrainState, abstract_state, weights


class Checkpoints:
    """The checkpoints of one work directory. `close()` waits for what is being written.

    Raises ValueError, saying what to do, for a checkpoint that cannot be written or read.
    """

    def __init__(self, workdir: str | pathlib.Path, config: ConfigDict):
        """`config`, as it is when a checkpoint is saved, is saved along; so is `progress`, a dict of JSON types."""
        c = config.checkpoint
        policies = [LatestN(c.keep_last), CustomSteps(list(c.at_steps))]
        if c.keep_every:
            policies.append(EveryNSteps(c.keep_every))
        self._config, self._folder, self.progress = config, _folder(workdir), {}
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # what a killed run left half-written
                # Otherwise a directory that cannot be made keeps the process from ending for five minutes.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def read(self, step: int) -> tuple[ConfigDict, dict[str, Any]]:
        """The config and the progress saved at `step`."""
        return _read(self._manager, step)

    def restore(self, step: int, state: TrainState) -> TrainState:
        """The state saved at `step`, laid out as the abstract `state` says, whatever layout it was saved in."""
        return _restore_state(self._manager, step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Copies the state to the host, then writes it in the background; raises what the last write raised."""
        if step in self._manager.all_steps():
            return
        config = json.loads(config_lib.to_json(self._config))
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    config=ocp.args.JsonSave(config),
                    progress=ocp.args.JsonSave(self.progress),
                ),
                force=True,
            )

    def check(self) -> None:
        """Raises what the last write raised, if it has ended; does not wait."""
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever class: Orbax, TensorStore and the system each have theirs
            if is_out_of_memory(error):
                raise
            newest = self._manager.latest_step()
            go_on = "start again" if newest is None else f"go on from step {newest}"
            raise ValueError(
                f"a checkpoint could not be written to {self._folder}: {_short(error)}; make room there, then run the "
                f"same command to {go_on}"
            ) from error


def restore_state(workdir: str, state: TrainState) -> tuple[TrainState, ConfigDict]:
    """The newest state of another run, laid out as the abstract `state`, and its config.

    Raises ValueError if none fits it.
    """
    with _reader(workdir) as manager:
        step = _newest(manager, workdir)
        config, _ = _read(manager, step)
        horizons = state.averages.horizons if state.averages else ()
        if horizons != config.average.horizons:  # which shapes do not show
            raise ValueError(f"{workdir} has average.horizons={config.average.horizons}, not {horizons}; use its own")
        return _restore_state(manager, step, state), config


def read_config(workdir: str) -> ConfigDict:
    """The config of a run's newest checkpoint. Raises ValueError if there is none."""
    with _reader(workdir) as manager:
        return _read(manager, _newest(manager, workdir))[0]


def restore_weights(
    workdir: str, step: int | None = None, like: Any = None, average: float | None = None
) -> tuple[Any, ConfigDict]:
    """The weights of a run at `step`, by default its newest, as `step.weights` has them, and the run's config.

    `like`, abstract parameters with NamedShardings, says where they go; without it they come to the host's memory.
    `average` is the horizon, in tokens, of the average to take. Of the state no more is read than is used.
    Raises ValueError if there is no such checkpoint or average, or a parameter of `like` has another shape.
    """
    with _reader(workdir) as manager:
        if step is None:
            step = _newest(manager, workdir)
        elif step not in manager.all_steps():
            raise ValueError(f"{workdir} has no checkpoint of step {step}; it has {sorted(manager.all_steps())}")
        config, _ = _read(manager, step)
        if average is not None and average not in config.average.horizons:
            there = ", ".join(f"{horizon:,}" for horizon in config.average.horizons) or "no horizon"
            raise ValueError(f"{workdir} has no average over {average:,.0f} tokens; it has averages over {there}")
        if like is None:
            mesh = make_mesh("ddp", jax.local_devices(backend="cpu")[:1])
        else:
            mesh = jax.tree.leaves(like)[0].sharding.mesh
        config.parallel.offload = "none"
        state = abstract_state(config, mesh)
        with _reading(manager, step):
            saved = _saved_tree(manager, step)
        _check_shapes({"params": saved["params"]}, {"params": state.params if like is None else like}, workdir)

        leaves = _leaves(state)
        wanted = {_name(path): leaf for (path, leaf), used in zip(leaves, _used(state, average), strict=True) if used}
        item = jax.tree_util.tree_map_with_path(lambda path, _: wanted.get(_name(path)), saved)
        with _reading(manager, step), ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(
                manager.directory / str(step) / "state",
                args=ocp.args.PyTreeRestore(
                    item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
                ),
            )
    restored = {_name(path): leaf for path, leaf in _leaves(restored)}
    state = jax.tree.unflatten(jax.tree.structure(state), [restored.get(_name(path)) for path, _ in leaves])
    if average is not None and not state.averages.tokens.any():
        raise ValueError(f"{workdir} has averaged nothing at step {step}; take a later one")
    return weights(state, average), config


def _used(state: TrainState, average: float | None) -> list[bool]:
    """Of each leaf of a state, whether `weights` reads it."""
    jaxpr = jax.make_jaxpr(functools.partial(weights, horizon=average))(state).jaxpr
    used = {id(v) for v in (*jaxpr.outvars, *(v for equation in jaxpr.eqns for v in equation.invars))}
    return [id(v) in used for v in jaxpr.invars]


def _read(manager: ocp.CheckpointManager, step: int) -> tuple[ConfigDict, dict[str, Any]]:
    items = ocp.args.Composite(config=ocp.args.JsonRestore(), progress=ocp.args.JsonRestore())
    with _reading(manager, step):
        saved = manager.restore(step, args=items)
        return config_lib.from_json(json.dumps(saved.config)), saved.progress


def _restore_state(manager: ocp.CheckpointManager, step: int, state: TrainState) -> TrainState:
    with _reading(manager, step):
        saved = _saved_tree(manager, step)
    _check_shapes(saved, state, manager.directory.parent)
    with _reading(manager, step):
        return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state))).state


def _saved_tree(manager: ocp.CheckpointManager, step: int) -> Any:
    """Shapes and dtypes of the saved state, as nested dicts and lists."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(manager.directory / str(step) / "state").item_metadata
    if metadata is None:
        raise ValueError("no metadata of the state")
    return metadata.tree


@contextlib.contextmanager
def _reading(manager: ocp.CheckpointManager, step: int) -> Iterator[None]:
    """A damaged checkpoint stops the run: to go on silently from an older one could lose days unnoticed."""
    try:
        yield
    except Exception as error:  # of whatever class: what a missing or truncated file raises differs
        if is_out_of_memory(error):
            raise
        older = [s for s in sorted(manager.all_steps()) if s < step]
        raise ValueError(
            f"{manager.directory / str(step)} cannot be read, a file in it is damaged or missing ({_short(error)}); "
            f"remove that directory to {f'go on from step {older[-1]}' if older else 'start again'}"
        ) from error


def _short(error: Exception) -> str:
    """The error's text without TensorStore's description of the whole array; of the system's errors the end."""
    text = " ".join(str(error).split()).split(" [tensorstore_spec=")[0].split(" See full TensorStore")[0]
    return text.split(" [os_error_code")[0].split(": ")[-1] if "os_error_code" in text else text[:400]


def _folder(workdir: str | pathlib.Path) -> pathlib.Path:
    return pathlib.Path(workdir).absolute() / "checkpoints"


def _reader(workdir: str) -> ocp.CheckpointManager:
    if not _folder(workdir).is_dir():
        raise ValueError(f"{workdir} holds no checkpoints/: it is not the work directory of a run that has saved")
    return ocp.CheckpointManager(_folder(workdir), options=ocp.CheckpointManagerOptions(read_only=True))


def _newest(manager: ocp.CheckpointManager, workdir: str) -> int:
    step = manager.latest_step()
    if step is None:
        raise ValueError(f"{workdir}/checkpoints holds no complete checkpoint")
    return step


def _check_shapes(saved: Any, like: Any, workdir: Any) -> None:
    old = {_name(path): leaf.shape for path, leaf in _leaves(saved)}
    new = {_name(path): leaf.shape for path, leaf in _leaves(like)}
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            raise ValueError(
                f"{workdir} is a run of another model, optimizer or precision: {path} is {old.get(path, 'absent')} "
                f"there, {new.get(path, 'absent')} here; use its model, optimizer and precision keys"
            )


def _leaves(tree: Any) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
