"""What every benchmark shares: rows with targets, child processes, measuring, grid budgets."""
