"""The experiment behind ``ebbtide demo``."""
