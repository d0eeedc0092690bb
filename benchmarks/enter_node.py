"""Run a rank's command inside its emulated node: ``enter_node.py COMMAND...``, or ``enter_node.py SCRIPT.py ...``,
which runs in this process and so finds imported what a launcher has imported before it forked this rank.

The launcher starts this once a rank, with the variables of ``Nodes.environment``; the node follows
from RANK, as on a cluster. The process becomes the command, so that signals and exit codes pass unchanged.

Where there are as many processors as nodes each node has its own; else all share all of them, which
the measurement sees and the cost table says.
"""

import os
import runpy
import sys

from emulated_nodes import enter


def main() -> None:
    rank, per_node = int(os.environ["RANK"]), int(os.environ["EMULATED_PER_NODE"])
    nodes, node = os.environ["EMULATED_NODES"].split(","), rank // per_node
    enter(nodes[node])
    every = sorted(os.sched_getaffinity(0))
    own = every[node :: len(nodes)] if len(every) >= len(nodes) else every
    os.sched_setaffinity(0, own)
    os.environ |= {
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": os.environ["EMULATED_MASTER"],
    }
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 makes the store, inside its node
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
