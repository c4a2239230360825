"""On two cores four threads read 1,507 images a second, and two processes 1,207.

Examples a second that are read and augmented, by threads and by processes.

    python -m benchmarks.studies.data [--workers=0,1,2] [--images=600] [--size=96]
        [--steps=60]

Writes a folder of PNG images, and reads batches of 64 as `image.*` experiments do, with
shifts and flips, without training. The first batches, in which processes start, do not
count. Median of three turns, which alternate.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.tables import draw
from tfgpipe_params.image.classifiers import ConvNetClassifier
from tfgpipe_params.image.digits import DigitImages
from tfgpipe_params.image.images import Augmentation
from tfgpipe_trainer.hyperparams import override

_WARM_UP = 10


def write_images(folder: Path, *, number: int, size: int) -> None:
    """Writes random images of three classes to a folder, as LABEL/NAME.png."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    for i in range(number):
        path = folder / f"class{i % 3}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = random.integers(0, 256, [size, size, 3], np.uint8)
        path.write_bytes(tf.io.encode_png(pixels).numpy())


def examples_per_second(
    folder: Path, *, num_workers: int, size: int, num_steps: int
) -> float:
    """Returns how many examples a second the training batches of a folder have."""
    experiment = ConvNetClassifier(
        data=DigitImages(files=f"{folder}/*/*.png", shape=(size, size, 3)),
        augmentation=Augmentation(shift=8, flip="horizontal"),
    )
    experiment = override(
        experiment,
        [
            f"training.num_steps={_WARM_UP + num_steps}",
            "training.batch_size=64",
            f"training.num_workers={num_workers}",
        ],
    )
    batches = iter(experiment.batches("train"))
    for _ in itertools.islice(batches, _WARM_UP):
        pass
    start = time.perf_counter()
    number = sum(1 for _ in batches)
    return 64 * number / (time.perf_counter() - start)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    workers = [int(each) for each in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory() as place:
        write_images(Path(place), number=arguments.images, size=arguments.size)
        turns = [
            {
                number: examples_per_second(
                    Path(place),
                    num_workers=number,
                    size=arguments.size,
                    num_steps=arguments.steps,
                )
                for number in workers
            }
            for _ in range(3)
        ]
    rows = [
        {
            "num_workers": number,
            "examples/s": round(statistics.median(turn[number] for turn in turns)),
        }
        for number in workers
    ]
    print(draw(rows))


if __name__ == "__main__":
    main()
