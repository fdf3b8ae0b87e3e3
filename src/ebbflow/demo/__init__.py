"""The experiment behind ``ebbflow demo``."""
