"""Planning with movement: keep, recompute or move, decided per gap between two uses and priced on the timeline."""
