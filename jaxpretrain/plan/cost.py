"""Days, money and energy of a whole run, from the time of one step."""

import dataclasses
import math

from ml_collections import ConfigDict

from jaxpretrain.hardware import Machine
from jaxpretrain.plan.memory import StateBytes
from jaxpretrain.schema import IMAGE_FAMILIES

LIFETIME_DAYS = 5 * 365  # of a machine, whose price is spread evenly over it (arXiv 2410.23261)
# A node of GPUs draws more than its cards, and a room more than its nodes: fans, processors, cooling.
POWER_OVERHEAD = 1.3
KG_CO2_PER_KWH = 0.445  # the world's grids in 2024 (IEA, Electricity 2025); between 0.02 and 0.8 by country
_DISK = 1e9  # bytes/s that a checkpoint is written with; while it is copied off the devices, nothing is trained
_RESTART_SECONDS = 300  # until a run that was stopped trains again: queue not counted, compiling and loading are
_DAYS_BETWEEN_FAILURES = 7  # of a machine of up to eight devices


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a whole run; dollars are None where no price is known."""

    days: float
    training_days: float  # of these: the steps alone
    checkpoint_days: float
    evaluation_days: float
    restart_days: float  # starting again, and steps done twice
    purchase_usd: float | None  # the machine's price for the time it is used
    cloud_usd: float | None  # rented by the hour
    kwh: float | None  # None: the power of the devices is not published
    kg_co2: float | None

    @property
    def usd(self) -> float | None:
        """The cheaper of the two."""
        known = [dollars for dollars in (self.purchase_usd, self.cloud_usd) if dollars is not None]
        return min(known, default=None)


def cost(
    config: ConfigDict, machine: Machine, state: StateBytes, step_seconds: float, job_hours: float | None = None
) -> Cost:
    """Of all steps of a recipe.

    Args:
      state: of one device; what is saved of it is copied off the devices while they wait.
      job_hours: a queue's limit: the run is cut into jobs that each start anew.
    """
    training = config.steps * step_seconds
    saved = state.params + state.optimizer + state.averages
    interval = _seconds_between_checkpoints(config, step_seconds)
    checkpoints = (training / interval + len(config.checkpoint.at_steps)) * saved / machine.accelerator.host_link
    evaluation = _evaluations(config) * _evaluation_seconds(config, step_seconds)
    days = (training + checkpoints + evaluation) / 86400
    failures = days / _DAYS_BETWEEN_FAILURES * math.ceil(machine.num_devices / 8)
    # Each loses half of what is between two checkpoints.
    restarts = failures * (_RESTART_SECONDS + saved / _DISK + interval / 2)
    if job_hours is not None:
        restarts += max(0, math.ceil(days * 24 / job_hours) - 1) * (_RESTART_SECONDS + saved / _DISK)
    days += restarts / 86400
    kwh = None if machine.watts is None else machine.watts * POWER_OVERHEAD * days * 24 / 1000
    price, rent = machine.price_usd, machine.rent_usd
    return Cost(
        days=days,
        training_days=training / 86400,
        checkpoint_days=checkpoints / 86400,
        evaluation_days=evaluation / 86400,
        restart_days=restarts / 86400,
        purchase_usd=None if price is None else price * days / LIFETIME_DAYS,
        cloud_usd=None if rent is None else rent * days * 24,
        kwh=kwh,
        kg_co2=None if kwh is None else kwh * KG_CO2_PER_KWH,
    )


def _seconds_between_checkpoints(config: ConfigDict, step_seconds: float) -> float:
    by_steps, by_minutes = config.checkpoint.every * step_seconds, config.checkpoint.every_minutes * 60
    return min(seconds for seconds in (by_steps, by_minutes, config.steps * step_seconds) if seconds)


def _evaluations(config: ConfigDict) -> float:
    if config.eval.every == -1:
        return 0
    return config.steps / config.eval.every if config.eval.every else 1


def _evaluation_seconds(config: ConfigDict, step_seconds: float) -> float:
    """Of one evaluation, a forward of its tokens; unknown lengths of validation splits count as 1 % of the data."""
    batch_tokens = config.batch_size * (1 if config.model.family in IMAGE_FAMILIES else config.seq_len)
    tokens = config.eval.max_tokens or 0.01 * batch_tokens * min(config.steps, 1000)
    return tokens / batch_tokens * step_seconds / 3
