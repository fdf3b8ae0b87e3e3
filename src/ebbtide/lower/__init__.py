"""From a schedule to two FX graphs, and the proof that they are the program."""
