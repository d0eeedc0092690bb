"""Packages and version of megatron-ext; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = next(
    line.split('"')[1]
    for line in (here / "megatron_ext" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    version=version,
    packages=[*find_packages(include=["megatron_ext", "megatron_ext.*"]), "megatron_ext.patches"],
    # The patch files lie at the top of the repository, where people look for them.
    package_dir={"megatron_ext.patches": "patches"},
    package_data={
        "megatron_ext": ["py.typed"],
        "megatron_ext.patches": ["*.patch", "*.json"],
        "megatron_ext.cost": ["hardware/*.json"],
    },
)
