"""Pictures by matplotlib (extra ``plot``), one per question; matplotlib is imported when one is drawn."""
