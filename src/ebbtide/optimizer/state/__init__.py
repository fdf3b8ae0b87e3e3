"""What state an optimizer has and will have: stand-ins that step in its place, options, bytes."""
