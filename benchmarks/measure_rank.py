"""One rank of ``python -m megatron_ext measure``, for what starts scripts: ``measure_rank.py measure ...``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron_ext", run_name="__main__", alter_sys=True)
