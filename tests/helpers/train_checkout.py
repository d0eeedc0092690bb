"""Script for the launcher's ``--fork``: train on the CPU by a checkout's script, with whatever kernels it finds.

``train_checkout.py TREE/pretrain_gpt.py ...`` turns no kernel off: Transformer Engine's or Apex's stand-in
(``engine_stand_in``) has to be on the path. Imported, it imports what ranks would each import for themselves.
"""

from megatron_ext.cpubench import parser_options
from megatron_ext.megatron import cpu_compat

parser_options.KERNELS.clear()
cpu_compat.install()

import megatron.core.models.gpt
import megatron.training
import megatron.training.training  # noqa: F401 - half of a rank's start

if __name__ == "__main__":
    cpu_compat.main()
