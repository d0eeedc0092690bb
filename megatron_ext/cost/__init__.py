"""Cost tables: the time that every route, link and layer takes, by size.

``cost_table`` is the file. ``estimates.Costs`` answers how long something takes. ``importers`` reads other tools' logs.
``combine_tables``, ``compare_tables`` and ``environment`` compare tables and combine them.
"""
