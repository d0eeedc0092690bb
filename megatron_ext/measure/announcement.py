"""What will be measured and how long it takes, before it begins."""

import os

from megatron_ext.measure.options import MOST_OVER, Options
from megatron_ext.measure.size_grid import curves_asked, sizes_of


def announcement(options: Options) -> str:
    """Two lines for people, and a third where something was kept."""
    curves = ", ".join(f"{name} ({len(sizes_of(name, options))})" for name in curves_asked(options))
    computes = "compute" in options.links and options.modules is not None
    others = ["host memory"] * ("host_memory" in options.links) + ["compute"] * computes
    others += ["contention"] * ("contention" in options.links)
    most, kept = MOST_OVER * options.seconds, options.keep_path
    goes_on = f"\ngoes on from {kept} where that was measured for the same" if kept and os.path.exists(kept) else ""
    return (
        f"measures with {options.world_size} ranks: curves (sizes) {curves or 'none'}; "
        f"{', '.join(others) or 'nothing else'}\n"
        f"takes about {options.seconds:.0f} s and at most {most:.0f} s once the ranks have started; "
        "sizes that do not fit in it are scaled from smaller ones, what comes last is left out, and the table says "
        f"which{goes_on}"
    )
