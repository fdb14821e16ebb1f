"""Checkpoints of a work directory: asynchronous, atomic, restored onto any mesh. Orbax is used here alone.

    WORKDIR/checkpoints/STEP/{state,config}   a directory that exists under its final name is complete
"""

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from ml_collections import ConfigDict
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    CustomSteps,
    EveryNSteps,
    LatestN,
)

from jaxpretrain import config as config_lib
from jaxpretrain.step import TrainState


class Checkpoints:
    """The checkpoints of one work directory. `close()` waits for what is being written."""

    def __init__(self, workdir: str | pathlib.Path, config: ConfigDict):
        c = config.checkpoint
        policies = [LatestN(c.keep_last), CustomSteps(list(c.at_steps))]
        if c.keep_every:
            policies.append(EveryNSteps(c.keep_every))
        self._config = json.loads(config_lib.to_json(config))
        self._manager = ocp.CheckpointManager(
            _folder(workdir),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # what a killed run left half-written
            ),
        )

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def restore(self, step: int, state: TrainState) -> TrainState:
        """The state saved at `step`, laid out as the abstract `state` says, whatever layout it was saved in."""
        return _restore_state(self._manager, step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Copies the state to the host, then writes it in the background; raises what the last write raised."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave(self._config)),
            force=True,
        )

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def restore_state(workdir: str, state: TrainState) -> TrainState:
    """The newest state of another run, laid out as the abstract `state`. Raises ValueError if there is none."""
    with _reader(workdir) as manager:
        return _restore_state(manager, _newest(manager, workdir), state)


def restore_params(workdir: str, step: int | None = None, like: Any = None) -> tuple[Any, ConfigDict]:
    """The parameters and the config of a run at `step`, by default its newest.

    `like`, abstract parameters with shardings, says where they go; without it they come to the host's memory.
    Raises ValueError if there is no such checkpoint or a parameter of `like` has another shape.
    """
    with _reader(workdir) as manager:
        if step is None:
            step = _newest(manager, workdir)
        elif step not in manager.all_steps():
            raise ValueError(f"{workdir} has no checkpoint of step {step}; it has {sorted(manager.all_steps())}")
        config = manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore())).config
        config = config_lib.from_json(json.dumps(config))
    folder = _folder(workdir) / str(step) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree["params"]
        if like is None:
            cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cpu), saved)
        _check_shapes(saved, like, workdir)
        restored = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                {"params": like},
                restore_args={"params": ocp.checkpoint_utils.construct_restore_args(like)},
                partial_restore=True,
            ),
        )
    return restored["params"], config


def _restore_state(manager: ocp.CheckpointManager, step: int, state: TrainState) -> TrainState:
    return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state))).state


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


def _check_shapes(saved: Any, like: Any, workdir: str) -> None:
    old = {jax.tree_util.keystr(k, simple=True, separator="."): v.shape for k, v in _leaves(saved)}
    new = {jax.tree_util.keystr(k, simple=True, separator="."): v.shape for k, v in _leaves(like)}
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            raise ValueError(
                f"{workdir} was trained with another model: parameter {path} is {old.get(path, 'absent')} there, "
                f"{new.get(path, 'absent')} here"
            )


def _leaves(tree: Any) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)
