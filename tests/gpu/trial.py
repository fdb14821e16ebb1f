"""One memory-saving method in a process of its own: losses, step times, and the peak of memory beside the compiler's.

    python tests/gpu/trial.py --config=configs/pythia160m.py --config.parallel.strategy=fsdp ... > trial.json

Synthetic tokens; the micro-batch must be given. The last line of the output is a JSON object.
"""

import json
import statistics
import time

import jax

from jaxpretrain import cli
from jaxpretrain.data.dataset import make_dataset
from jaxpretrain.evaluation import own_rows, place
from jaxpretrain.parallel import offload
from jaxpretrain.parallel.mesh import make_mesh
from jaxpretrain.plan import aot
from jaxpretrain.step import make_train_step

WARM_UP = 2  # steps that are not timed


def main(argv: list[str]) -> int:
    arguments, overrides = cli.ArgumentParser(description=__doc__).parse(argv)
    config = cli.load_config(arguments, [("data.source", "synthetic"), *overrides])
    mesh = make_mesh(config.parallel.strategy, tensor=config.parallel.tensor)
    train_step = make_train_step(config, mesh)
    compiled = train_step.step.lower(train_step.state, train_step.batch).compile()
    offload.check(compiled, train_step.state, config.parallel.remat.startswith("offload"))
    dataset, state = make_dataset(config, "train"), train_step.init()
    losses, times = [], []
    for step in range(config.steps):
        batch = jax.block_until_ready(place(dataset.batch(step, own_rows(config.batch_size)), train_step))
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        times.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"]))
    device, memory = mesh.devices.flat[0], aot.memory(compiled)
    result = {
        "device": device.device_kind,
        "num_devices": mesh.size,
        "losses": losses,
        "step_time": statistics.median(times[WARM_UP:]),
        "step_times": times,
        "predicted_bytes": memory.device,
        "predicted_host_bytes": memory.host,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }
    print(json.dumps(result))
    return cli.EXIT_DONE


if __name__ == "__main__":
    cli.run(main)
