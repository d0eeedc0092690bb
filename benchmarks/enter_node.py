"""Run a rank's command inside its emulated node: ``enter_node.py COMMAND...``.

The launcher starts this once a rank; the node follows from RANK and LOCAL_WORLD_SIZE, as on a
cluster. The process becomes the command, so that signals and exit codes pass unchanged.
"""

import os
import sys

from emulated_nodes import enter


def main() -> None:
    rank, per_node = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    enter(os.environ["EMULATED_NODES"].split(",")[rank // per_node])
    os.environ["LOCAL_RANK"] = str(rank % per_node)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
