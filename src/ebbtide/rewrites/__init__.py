"""Programs with the same bits and a lower floor: what replaces a part of a captured step, and why it may."""
