"""The questions of ``path.py``, one file each: ``CASES`` names its children, ``rows`` answers in one of them."""
