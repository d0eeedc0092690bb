"""Cost tables: what every route, link and layer costs, by size.

``model`` is the file; ``predict.Costs`` answers what something takes; ``imports`` reads other
tools' logs; ``combine``, ``compare`` and ``environment`` put tables beside each other.
"""
