"""Measures the trainer beside PyTorch on a CPU, all in one run:

    python tools/benchmark_cpu.py train|loader|startup|optimizer

Each measurement is a process of its own; the candidates take turns, so that a machine whose speed drifts
treats them alike, and ratios are taken round by round. docs/benchmarks/{cpu,optimizers}.md have what it printed.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
# glibc: huge pages, and freed buffers kept. A step allocates hundreds of MB, and page faults would dominate.
ALLOCATOR = ":".join(
    f"glibc.malloc.{setting}"
    for setting in ("hugetlb=1", "mmap_max=0", "trim_threshold=200000000000", "arena_max=1", "top_pad=268435456")
)
BATCH_SIZE, SEQ_LEN = 4, 256
NUM_THREADS = 2
OPTIMIZERS = ("optax_adamw", "adam_mini_float32", "adam_mini_bfloat16", "adam_mini_int8", "torch_adamw")


def jax_config(model: str):
    from jaxpretrain import config as config_lib

    overrides = dict(batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    overrides |= {
        "data.source": "synthetic",
        "precision.compute": "float32",
        "steps": 100,
        "parallel.scan_layers": False,
    }
    return config_lib.load(f"{ROOT}/configs/{model}.py", [(key, str(value)) for key, value in overrides.items()])


def measure_jax(model: str, num_steps: int) -> list[float]:
    """Seconds of each step, synchronised on the whole new state."""
    import jax

    from jaxpretrain.data.dataset import make_dataset
    from jaxpretrain.parallel.mesh import make_mesh
    from jaxpretrain.step import make_train_step

    config = jax_config(model)
    train_step = make_train_step(config, make_mesh("ddp", jax.devices()[:1]))
    dataset, state, times = make_dataset(config, "train"), train_step.init(), []
    for step in range(num_steps):
        batch = jax.device_put(dataset.batch(step))
        start = time.perf_counter()
        state, _ = jax.block_until_ready(train_step.step(state, batch))
        times.append(time.perf_counter() - start)
    return times


def measure_torch(model: str, num_steps: int, compiled: bool) -> list[float]:
    """The same model of transformers, with the fused AdamW and the same clipping, on the same tokens."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from jaxpretrain.data.dataset import make_dataset
    from jaxpretrain.interop import huggingface_config
    from jaxpretrain.models import registry

    torch.set_num_threads(NUM_THREADS)
    config = jax_config(model)
    hf = huggingface_config.to_json(registry.build(config).config, config.seq_len, "float32", None)
    network = GPTNeoXForCausalLM(GPTNeoXConfig(**{k: v for k, v in hf.items() if k != "architectures"}))
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        network.parameters(), o.learning_rate, (o.b1, o.b2), o.eps, o.weight_decay, fused=True
    )
    forward = torch.compile(network) if compiled else network
    dataset, times = make_dataset(config, "train"), []
    for step in range(num_steps):
        tokens = torch.from_numpy(dataset.batch(step)["tokens"]).long()
        start = time.perf_counter()
        logits = forward(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), o.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)
    return times


def measure_loader(kind: str, file: str, num_batches: int) -> list[float]:
    """Tokens/s over `num_batches` batches of 64 rows of 2,049 tokens, the first ten dropped."""
    import numpy as np

    rows, length = 64, 2049
    if kind == "jaxpretrain":
        from jaxpretrain import config as config_lib
        from jaxpretrain.data.dataset import make_dataset
        from jaxpretrain.data.loader import Loader

        config = config_lib.default()
        config.batch_size, config.seq_len, config.model.vocab_size = rows, length - 1, 65536
        config.data.source, config.data.path = "tokens", file
        batches = Loader(make_dataset(config, "train"), lambda batch: batch, 0, num_batches)
    else:
        import torch

        class Rows(torch.utils.data.Dataset):
            def __init__(self):
                self.tokens = np.memmap(file, np.uint16, "r")

            def __len__(self):
                return (len(self.tokens) - 1) // (length - 1)

            def __getitem__(self, i):
                start = i * (length - 1)
                return torch.from_numpy(self.tokens[start : start + length].astype(np.int32))

        num_workers = int(kind.removeprefix("torch_workers"))
        sampler = torch.utils.data.RandomSampler(Rows(), num_samples=rows * num_batches)
        batches = iter(torch.utils.data.DataLoader(Rows(), rows, sampler=sampler, num_workers=num_workers))
    for _ in range(10):
        next(batches)
    start = time.perf_counter()
    for _ in range(num_batches - 10):
        next(batches)
    return [rows * length * (num_batches - 10) / (time.perf_counter() - start)]


def measure_optimizer(kind: str, model: str, num_steps: int) -> list[float]:
    """Seconds of each update of the model's parameters by the optimizer alone, on gradients that stay the same."""
    import jax
    import optax

    from jaxpretrain.models import parameter, registry
    from jaxpretrain.optim.adam_mini import adam_mini
    from jaxpretrain.optim.blocks import adam_mini_blocks

    infos = parameter.infos(registry.build(jax_config(model)))
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(infos)))
    keys = jax.tree.unflatten(jax.tree.structure(infos), list(keys))
    params = jax.tree.map(lambda info, key: jax.random.normal(key, info.shape), infos, keys)
    settings, times = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1), []
    if kind == "torch_adamw":
        import numpy as np
        import torch

        torch.set_num_threads(NUM_THREADS)
        tensors = [torch.nn.Parameter(torch.from_numpy(np.array(p))) for p in jax.tree.leaves(params)]
        for tensor in tensors:
            tensor.grad = 0.1 * tensor.detach()
        optimizer = torch.optim.AdamW(tensors, 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)
        for _ in range(num_steps):
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
        return times
    if kind == "optax_adamw":
        optimizer = optax.adamw(1e-3, **settings)
    else:
        dtype = kind.removeprefix("adam_mini_")
        optimizer = adam_mini(1e-3, **settings, mu_dtype=dtype, blocks=adam_mini_blocks(infos, "v1_1"))

    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    gradients, state = jax.tree.map(lambda p: 0.1 * p, params), optimizer.init(params)
    update = jax.jit(update, donate_argnums=(0, 1))
    for _ in range(num_steps):
        start = time.perf_counter()
        params, state = jax.block_until_ready(update(params, state, gradients))
        times.append(time.perf_counter() - start)
    return times


def child(*arguments: str, allocator: bool = True) -> list[float]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(NUM_THREADS)}
    if allocator:
        environment["GLIBC_TUNABLES"] = ALLOCATOR
    command = [sys.executable, __file__, "child", *arguments]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    return json.loads(output.splitlines()[-1])


def run_child(what: str, *arguments: str) -> list[float]:
    if what == "jax":
        return measure_jax(arguments[0], int(arguments[1]))
    if what in ("torch", "torch_compiled"):
        return measure_torch(arguments[0], int(arguments[1]), what == "torch_compiled")
    if what in OPTIMIZERS:
        return measure_optimizer(what, arguments[0], int(arguments[1]))
    return measure_loader(what, arguments[0], int(arguments[1]))


def compare(title: str, candidates: list[str], base: str, rounds: int, measure) -> None:
    """Prints each candidate's figure per round, and its ratio to `base` round by round (higher is better)."""
    figures = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in candidates:
            figures[name].append(measure(name))
    print(f"\n### {title}\n\n| | median | ratio to {base}: median [min, max] | rounds |\n|---|---|---|---|")
    for name, values in figures.items():
        ratios = [value / reference for value, reference in zip(values, figures[base], strict=True)]
        each = " ".join(f"{value:,.4g}" if value < 100 else f"{value:,.0f}" for value in values)
        print(
            f"| {name} | {statistics.median(values):,.4g} | {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}] | {each} |",
            flush=True,
        )


def train(rounds: int, num_steps: int, models: list[str]) -> None:
    for model in models:
        for allocator in (False, True):

            def measure(name: str, model=model, allocator=allocator) -> float:
                times = child(name, model, str(num_steps), allocator=allocator)
                return BATCH_SIZE * SEQ_LEN / statistics.median(times[3:])

            title = f"{model}, tokens/s, {'with' if allocator else 'without'} the allocator settings"
            compare(title, ["jax", "torch", "torch_compiled"], "torch", rounds, measure)


def loader(rounds: int) -> None:
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/tokens.bin"
        np.random.default_rng(0).integers(0, 50304, 300_000_000, np.uint16).tofile(file)
        candidates = ["jaxpretrain", "torch_workers0", "torch_workers2"]
        compare(
            "Input, tokens/s, batches of 64 x 2049 from a 600 MB file in the page cache",
            candidates,
            "torch_workers0",
            rounds,
            lambda name: child(name, file, "200" if name == "jaxpretrain" else "60", allocator=False)[0],
        )


def startup(rounds: int, model: str) -> None:
    def measure(name: str) -> float:
        start = time.perf_counter()
        child("torch" if name == "torch" else "jax", model, "1", allocator=False)
        return time.perf_counter() - start

    compare(f"{model}, seconds from start to the end of the first step", ["jax", "torch"], "torch", rounds, measure)


def optimizer(rounds: int, num_steps: int, models: list[str]) -> None:
    for model in models:

        def measure(name: str, model=model) -> float:
            return 1000 * statistics.median(child(name, model, str(num_steps))[3:])

        title = f"{model}, optimizer alone, milliseconds, with the allocator settings"
        compare(title, list(OPTIMIZERS), "optax_adamw", rounds, measure)


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(run_child(*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "loader", "startup", "optimizer"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--models", help="recipes (default: pythia14m,pythia70m; optimizer: gpt2_small,llama2_102m)")
    arguments = parser.parse_args()
    default = "gpt2_small,llama2_102m" if arguments.what == "optimizer" else "pythia14m,pythia70m"
    models = (arguments.models or default).split(",")
    if arguments.what == "train":
        train(arguments.rounds, arguments.steps, models)
    elif arguments.what == "loader":
        loader(arguments.rounds)
    elif arguments.what == "optimizer":
        optimizer(arguments.rounds, arguments.steps, models)
    else:
        startup(arguments.rounds, models[0])


if __name__ == "__main__":
    main()
