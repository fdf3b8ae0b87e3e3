"""What a step is, as plain data: programs, schedules, machines, and the one judge of both. No torch here."""
