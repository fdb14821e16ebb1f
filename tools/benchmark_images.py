"""Measures the reading of images beside torchvision's, on JPEGs of ImageNet's usual size, all in one run:

    python -m venv TV && TV/bin/pip install torch torchvision
    python tools/benchmark_images.py --torch_python=TV/bin/python

Both crop (bicubic), mirror and give batches of uint8; "recipe" adds RandAugment and erasing. Each measurement is a
process of its own and the two take turns. docs/benchmarks/images.md has what it printed.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SIZE, BATCH_SIZE, NUM_IMAGES = 224, 64, 512
NUM_WARMUP_BATCHES, NUM_BATCHES = (
    16,
    96,
)  # every worker runs; what was read ahead hardly counts
OURS, TORCHVISION = "jaxpretrain", "torchvision"


def make_images(folder: pathlib.Path) -> None:
    """JPEGs of 500 x 375, quality 90, in two classes: gradients, blobs and noise, 60 KB or so each."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:375, :500]
    for n in range(NUM_IMAGES):
        gradients = np.stack([x * rng.uniform(0.1, 0.5) + y * rng.uniform(0.1, 0.3) for _ in range(3)], axis=-1)
        blobs = np.kron(rng.uniform(-40, 40, (25, 32, 3)), np.ones((15, 16, 1)))[:, :500]
        pixels = np.clip(gradients + blobs + rng.normal(0, 12, blobs.shape), 0, 255).astype(np.uint8)
        path = folder / f"class{n % 2}" / f"{n}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path, quality=90)


def our_batches(folder: str, workers: int, recipe: bool):
    from jaxpretrain import config as config_lib
    from jaxpretrain.data.images import make_image_dataset

    config = config_lib.default()
    config.model.family, config.model.image.size, config.model.image.num_classes = "vit", SIZE, 2
    config.seq_len, config.batch_size = 1, BATCH_SIZE
    config.data.source, config.data.path, config.data.workers = "images", folder, workers
    if recipe:
        config.data.images.randaugment_ops, config.data.images.erase = 2, 0.25
    for batch in make_image_dataset(config, "train").batches(0, NUM_WARMUP_BATCHES + NUM_BATCHES):
        yield batch["images"]


def torchvision_batches(folder: str, workers: int, recipe: bool):
    import itertools

    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import InterpolationMode, v2

    transforms = [
        v2.RandomResizedCrop(SIZE, interpolation=InterpolationMode.BICUBIC),
        v2.RandomHorizontalFlip(),
        *([v2.RandAugment(interpolation=InterpolationMode.BILINEAR)] if recipe else []),
        v2.PILToTensor(),
        *([v2.RandomErasing(0.25)] if recipe else []),
    ]
    loader = torch.utils.data.DataLoader(
        ImageFolder(folder, v2.Compose(transforms)),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
    )
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for images, _ in itertools.islice(epochs, NUM_WARMUP_BATCHES + NUM_BATCHES):
        yield images


def measure(candidate: str, folder: str, workers: int, recipe: bool) -> float:
    """Images per second, once all workers run."""
    batches = {OURS: our_batches, TORCHVISION: torchvision_batches}[candidate](folder, workers, recipe)
    for _ in range(NUM_WARMUP_BATCHES):
        assert next(batches).shape[0] == BATCH_SIZE
    start = time.perf_counter()
    num_images = sum(len(images) for images in batches)
    return num_images / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch_python", help="the Python that has torchvision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a child's task, as JSON
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(**json.loads(args.measure))))
        return
    if not args.torch_python:
        parser.error("--torch_python is needed: the Python of an environment with torch and torchvision")
    pythons = {OURS: sys.executable, TORCHVISION: args.torch_python}
    with tempfile.TemporaryDirectory() as folder:
        make_images(pathlib.Path(folder))
        for recipe in (False, True):
            for workers in (1, 2):
                rates = {candidate: [] for candidate in pythons}
                for _ in range(args.rounds):
                    for candidate, python in pythons.items():
                        task = dict(candidate=candidate, folder=folder, workers=workers, recipe=recipe)
                        command = [python, __file__, "--measure", json.dumps(task)]
                        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
                        rates[candidate].append(json.loads(output.splitlines()[-1]))
                ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
                print(f"{'recipe' if recipe else 'crop, flip'}, {workers} workers:", flush=True)
                for candidate, values in rates.items():
                    print(f"  {candidate:12s}", " ".join(f"{value:6.0f}" for value in values), "images/s")
                print(f"  ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]", flush=True)


if __name__ == "__main__":
    main()
