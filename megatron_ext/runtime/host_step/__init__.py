"""The host's optimizer step (``--optimizer-cpu-offload``): its units, the memory through which gradients and parameters
pass, and when the units are stepped.

A unit (unit.py) is the set of parameters that one optimizer on the host steps together. Its gradients arrive and its
new parameters leave through a room (room.py). It is stepped after the gradient norm (after_norm.py), during the
backward (early.py) or during the next iteration (delayed.py). Its states are in memory or on a drive (drive_states.py).
"""
