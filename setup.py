"""Packaging of megatron-ext. Versions that are known to work together: constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = next(
    line.split('"')[1]
    for line in (here / "megatron_ext" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    name="megatron-ext",
    version=version,
    description="Plan and run parameter gathers of Megatron-LM by several routes at once",
    python_requires=">=3.10",
    packages=[*find_packages(include=["megatron_ext", "megatron_ext.*"]), "megatron_ext.patches"],
    # The patch files lie at the top of the repository, where people look for them.
    package_dir={"megatron_ext.patches": "patches"},
    package_data={"megatron_ext.patches": ["*.patch", "*.json"]},
    # The planner runs on a laptop: torch and megatron-core are needed only to measure and train.
    install_requires=[
        "numpy",
        "msgspec",  # strict, typed JSON: an unknown key is an error; fast on large schedules
        "click",  # nested verbs, typed options
        "rich",  # progress bars and tables
        "matplotlib",  # timelines and cost curves
        "ortools",  # CP-SAT: the exact policy and its proven bounds
    ],
    extras_require={
        "train": ["torch>=2.6", "einops", "pybind11"],
        # What megatron-core imports, where PyTorch is there already.
        "core": ["einops", "pybind11"],
        # What megatron/training of a checkout imports besides.
        "checkout": ["pyyaml", "regex", "six", "psutil", "pydantic"],
        "megatron": ["megatron-core>=0.12"],
        "test": ["pytest", "hypothesis"],
    },
    entry_points={"console_scripts": ["megatron-ext=megatron_ext.cli:main"]},
)
