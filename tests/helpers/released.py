"""Which released trees of Megatron the tests run on."""

import os

MIRROR = os.environ.get("MEGATRON_MIRROR")
"""A git clone or mirror of Megatron-LM with its tags, where there is one."""

RELEASES = "0.19.0 0.16.1 0.17.1 0.12.3 0.14.0 0.13.1 0.15.3 0.18.2".split()
"""Releases of megatron-core that are fetched from the package index; CI fetches the first four and patches two."""

CANDIDATES = ("0.15.0rc4", "0.14.0rc3")
"""Candidates that no patch is for. The package index has the second one only for Python 3.11 and older."""
