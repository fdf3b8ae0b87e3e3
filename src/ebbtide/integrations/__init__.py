"""Ebbtide in the training loops of others; each module needs the package that it is named after."""
