"""Plan and run parameter gathers of Megatron-LM by several routes.

The package measures what each route of a parameter to the device costs, plans a
``user_defined_schedule`` from it, and trains by that schedule. Rooms (sub-packages)
import only rooms on the floors below them; see README.md for the map.
"""

__version__ = "0.1.0"
