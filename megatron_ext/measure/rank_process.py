"""One rank's process: ``python -m megatron_ext.measure.rank_process``; started by local_launch.py only.

Speaks JSON lines to the launcher through an inherited pipe: progress, one result, or an error.
"""

import json
import os
import signal
import sys

from megatron_ext.launch.launcher import end_with_parent


def main() -> None:
    setup = json.loads(sys.argv[1])
    end_with_parent(setup["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends the ranks
    pipe = os.fdopen(setup["pipe"], "w", buffering=1)

    def say(**message) -> None:
        pipe.write(json.dumps(message) + "\n")

    from megatron_ext.formats.errors import InputError

    try:
        result = _measure(
            setup, lambda done, total, what: say(done=done, total=total, what=what), lambda raw: say(so_far=raw)
        )
    except InputError as error:
        say(input_error=str(error))
        sys.exit(2)
    say(result=result)
    pipe.flush()
    # Taking process groups down in order takes seconds and nothing of them is needed again.
    os._exit(0)


def _measure(setup: dict, report, so_far):
    import warnings

    # Megatron calls these functions by the names that newer torch warns about.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import msgspec
    import torch
    import torch.distributed as dist

    from megatron_ext.cpubench import gloo
    from megatron_ext.measure import rank_program
    from megatron_ext.measure.fabric import Fabric
    from megatron_ext.measure.options import Options

    options = msgspec.convert(setup["options"], Options)
    rank, world_size = setup["rank"], options.world_size
    torch.set_num_threads(options.rank_threads)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - public by torch's documentation
        "127.0.0.1",
        setup["port"],
        world_size,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=setup.get("listener"),
    )
    # Objects travel by gloo, bytes by nccl where there are devices.
    gloo.run_collectives_in_order()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if options.uses_cuda() else "gloo", store=store, rank=rank, world_size=world_size
    )
    fabric = Fabric(options, rank, setup["block"])
    result = rank_program.run(fabric, report, so_far)
    fabric.barrier()  # nobody ends while another still talks to it
    return result


if __name__ == "__main__":
    main()
