"""Metadata of tfgpipe; `make train` and `make test` install it from here.

TFGPIPE_TENSORFLOW in the environment names another TensorFlow to require:
`tensorflow-tpu` or `tensorflow-cpu` (docs/how-to/install.md).
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$',
    (HERE / "tfgpipe" / "__init__.py").read_text("utf-8"),
    re.MULTILINE,
)

# Both ends are tested (`make test-tensorflow TENSORFLOW=2.20.0`), since private names
# are used of functions, collectives and variables. `tensorflow-tpu` ends at 2.20.
TENSORFLOW_RANGE = ">=2.20,<2.22"
# Distributions with the same files: pip replaces those of one by those of the next
# without a word. So only one may be required, here and by what is required here.
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
TENSORFLOW = os.environ.get("TFGPIPE_TENSORFLOW") or "tensorflow"
if TENSORFLOW not in TENSORFLOWS:
    raise SystemExit(
        "TFGPIPE_TENSORFLOW names the TensorFlow that is required: expected one of "
        f"{', '.join(TENSORFLOWS)}; received {TENSORFLOW!r}."
    )


def with_tensorflow(*requirements: str) -> list[str]:
    """Returns packages that require `tensorflow`, unless another one is chosen."""
    return [*requirements] if TENSORFLOW == "tensorflow" else []


# `tensorflow-tpu` takes any from 0.0.14 on. Those from 0.0.32 on lack functions that
# TensorFlow 2.20 calls, and newer ones most of them: it then finds no TPU, or aborts.
LIBTPU = ["libtpu>=0.0.14,<0.0.32"] if TENSORFLOW == "tensorflow-tpu" else []

# The site: `make site`.
DOCS = [
    "griffelib>=2.4,<3",
    "mkdocs>=1.6,<2",
    "mkdocs-material>=9.8,<10",
    "mkdocstrings>=1.0.8,<2",
    "mkdocstrings-python>=2.0.11,<3",
    "nbformat>=5.10,<6",
]

setup(
    name="tfgpipe",
    version=VERSION,
    description="GPipe-style pipeline parallelism for Keras 3, as a Keras layer.",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # `examples`, `tests` and `benchmarks` run from the checkout. `tfgpipe_trainer` and
    # `tfgpipe_params` are links there to `trainer` and `params`, names others may have.
    packages=[
        package
        for top in ("tfgpipe", "tfgpipe_trainer", "tfgpipe_params")
        for package in find_packages(include=[top, f"{top}.*"])
    ],
    entry_points={"console_scripts": ["tfgpipe-train=tfgpipe_trainer.main:command"]},
    package_data={"tfgpipe": ["py.typed", "accelerators/tpu_kernels.txt"]},
    # `typing.dataclass_transform` is new in Python 3.11.
    python_requires=">=3.11,<3.14",
    install_requires=[
        "absl-py>=1.4",
        # Both ends are tested (`make test-keras KERAS=3.14.1`): private names of Keras
        # may move in any release.
        "keras>=3.14,<3.16",
        "numpy>=1.26,<3",
        "rich>=13",
        f"{TENSORFLOW}{TENSORFLOW_RANGE}",
        *with_tensorflow("tensorflow-model-optimization>=0.8,<0.9"),
        *LIBTPU,
    ],
    extras_require={
        "and-cuda": with_tensorflow(f"tensorflow[and-cuda]{TENSORFLOW_RANGE}"),
        "pictures": ["matplotlib>=3.8"],
        "trainer": [
            "fsspec>=2024.6",
            "google-crc32c>=1.7,<2",
            # The order of examples is its own: resumed runs depend on the version.
            "grain>=0.2.18,<0.3",
            "matplotlib>=3.8",
            "packaging>=24",
            "psutil>=6,<8",
            "safetensors>=0.4,<1",
            "scikit-learn>=1.5,<2",
            "tensorboard>=2.20,<2.22",
            "universal_pathlib>=0.2.6,<0.4",
        ],
        # One of them, for the files that `data.tokenizer` names.
        "tokenizer": ["sentencepiece>=0.2,<0.3", "tokenizers>=0.20,<0.24"],
        # `tfgpipe.accelerators` compiles for accelerators that are not there. JAX, its
        # plugin and libtpu are of one month: each is built for the others.
        "compilers": [
            "jax>=0.10.2,<0.11",
            "jax-cuda12-pjrt>=0.10.2,<0.11",
            "jax-cuda12-plugin>=0.10.2,<0.11",
            "jaxlib>=0.10.2,<0.11",
            "libtpu>=0.0.52,<0.0.53",
            "nvidia-cuda-nvcc-cu12>=12.8,<13",
        ],
        "docs": DOCS,
        "dev": [
            *DOCS,
            "alembic>=1.13",
            "build>=1.2",
            "datasets>=3,<6",
            "flask>=3,<4",
            "flask-cors>=5,<7",
            "google-crc32c>=1.7,<2",
            "hypothesis>=6.100",
            "ipykernel>=6.29,<8",
            "kubernetes-validate>=1.33,<2",
            "lm-eval>=0.4.9,<0.5",
            # Models of others, and where their mistakes are is known for this range.
            *with_tensorflow("keras-hub>=0.32,<0.33"),
            "mlflow-skinny>=3,<4",
            # A server of S3, for the tests of remote folders.
            "moto[s3]>=5.1,<6",
            "mypy>=1.11",
            "nbclient>=0.10,<1",
            "pyarrow>=17",
            "pytest>=8.2",
            "pytest-xdist>=3.5",
            "pyyaml>=6,<7",
            "ray>=2.40,<3",
            # Its format changes between minor releases.
            "ruff>=0.17,<0.18",
            "s3fs>=2024.6",
            "sentencepiece>=0.2,<0.3",
            "setuptools>=64",
            "sqlalchemy>=2,<3",
            "tokenizers>=0.20,<0.24",
            "wandb>=0.19,<0.32",
            "wheel>=0.43",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
