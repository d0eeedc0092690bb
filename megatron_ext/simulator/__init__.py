"""How long an iteration takes by a schedule: one event engine for every consumer."""
