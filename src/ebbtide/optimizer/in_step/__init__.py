"""The optimizer while a step runs: gradients are applied in the backward, where they are made, and go."""
