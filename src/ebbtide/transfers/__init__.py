"""Moving tensors to slower memory and back while a step runs: tiers, lanes, and the copies of one step."""
