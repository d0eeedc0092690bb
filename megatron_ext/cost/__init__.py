"""Cost tables: what every route, link and layer costs, by size.

``cost_table`` is the file; ``estimates.Costs`` answers what something takes; ``importers`` reads other tools' logs;
``combine_tables``, ``compare_tables`` and ``environment`` compare tables and put them together.
"""
