"""What a schedule would take: one event engine for every consumer."""
