"""Days and dollars by hand."""

import dataclasses

import pytest

from jaxpretrain import config as config_lib
from jaxpretrain import hardware
from jaxpretrain.plan.cost import KG_CO2_PER_KWH, POWER_OVERHEAD, cost
from jaxpretrain.plan.memory import StateBytes

STATE = StateBytes(
    params=10**9,
    optimizer=2 * 10**9,
    averages=0,
    gradients=10**9,
    micro_batch_gradients=0,
    compute_copy=0,
    undonated=0,
    host=0,
)


@pytest.fixture
def config():
    config = config_lib.default()
    config.steps, config.checkpoint.every, config.eval.every = 864_000, 0, -1
    return config


def test_the_papers_prices(config):
    """Research note, section 3: 17.571 days of four A100s are 804 dollars of a machine of 83,500."""
    machine = hardware.parse_machine("a100-80gb", 4)
    costs = cost(config, machine, STATE, 17.571 * 86400 / config.steps)
    assert costs.training_days == pytest.approx(17.571)
    assert costs.purchase_usd * costs.training_days / costs.days == pytest.approx(804, abs=0.5)
    assert machine.price_usd == 83_500


def test_rent_energy_and_carbon_follow_the_days(config):
    machine = hardware.parse_machine("a100-80gb", 4)
    costs = cost(config, machine, STATE, 1.0)
    assert costs.cloud_usd == pytest.approx(machine.rent_usd * 24 * costs.days)
    assert costs.kwh == pytest.approx(machine.watts * POWER_OVERHEAD * 24 * costs.days / 1000)
    assert costs.kg_co2 == pytest.approx(costs.kwh * KG_CO2_PER_KWH)
    assert costs.usd == min(costs.purchase_usd, costs.cloud_usd)


def test_what_is_no_training_adds_days(config):
    """One save of 3 GB; 1,000 of them; evaluations of a hundredth of a thousand steps; jobs of four hours."""
    machine = hardware.parse_machine("a100-80gb", 4)
    plain = cost(config, machine, STATE, 1.0)
    assert plain.training_days == 10
    assert plain.checkpoint_days == pytest.approx(3e9 / machine.accelerator.host_link / 86400)
    config.checkpoint.every = 864
    assert cost(config, machine, STATE, 1.0).checkpoint_days == pytest.approx(1000 * plain.checkpoint_days)
    lost = cost(config, machine, STATE, 1.0).restart_days
    config.checkpoint.every_minutes = 7.2  # half of the 864 seconds
    assert cost(config, machine, STATE, 1.0).checkpoint_days == pytest.approx(2000 * plain.checkpoint_days)
    assert cost(config, machine, STATE, 1.0).restart_days < lost < plain.restart_days
    config.checkpoint.every_minutes = 0.0
    config.eval.every, config.eval.max_tokens = 8640, 100 * config.batch_size * config.seq_len
    assert cost(config, machine, STATE, 1.0).evaluation_days == pytest.approx(100 * 100 / 3 / 86400)
    cut = cost(config, machine, STATE, 1.0, job_hours=4.0)
    assert cut.restart_days > cost(config, machine, STATE, 1.0).restart_days + 59 * 300 / 86400


def test_unknown_prices_are_none(config):
    machine = hardware.parse_machine("a100-80gb", 4)
    device = dataclasses.replace(machine.accelerator, price_usd=None, rent_usd=None)
    costs = cost(config, dataclasses.replace(machine, accelerator=device), STATE, 1.0)
    assert costs.purchase_usd is costs.cloud_usd is costs.usd is None
